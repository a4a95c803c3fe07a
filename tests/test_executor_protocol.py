"""Both ends of the protocol against a scripted other end: exactly one answer per rank and plan, in order."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from executor_fakes import NOTHING, RAISE, FakeRunner, make_capacity, make_config, make_plan

from bireme.distributed import GroupSpec
from bireme.errors import ExecutorError
from bireme.executor.launcher import LocalExecutor, RankProcess, create_executor, threads_per_rank
from bireme.executor.protocol import Allocate, Done, Execute, Failed, FromRank, Loaded, Ready, Start, Stop, ToRank
from bireme.executor.worker import EXIT_ABORTED, EXIT_FAILED, HELLO, Channel, ChannelClosed, Launch, run_rank
from bireme.types import NewRequest, SamplingParams, StepPlan

Answer = Callable[[Channel, int], None]


def send(channel: Channel, message: Any) -> None:
    channel.send(msgspec.msgpack.encode(message))


def receive(channel: Channel, timeout: float = 10.0) -> FromRank:
    payload = channel.receive(timeout)
    assert payload is not None, "no answer"
    return msgspec.msgpack.decode(payload, type=FromRank)


# ---- the driver, against a scripted rank 1 ----


@pytest.fixture
def start_scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LocalExecutor]]:
    """Starts an executor of two ranks; rank 1 is a thread that answers plans through ``answer(channel, seq)``."""
    executors: list[LocalExecutor] = []

    def create(answer: Answer, **options: float) -> LocalExecutor:
        def launch_rank(self: LocalExecutor, rank: int, num_threads: int) -> RankProcess:
            ours, theirs = socket.socketpair()

            def script() -> None:
                channel = Channel(theirs)
                decoder = msgspec.msgpack.Decoder(ToRank)
                channel.send(HELLO)
                with contextlib.suppress(ChannelClosed):
                    while True:
                        match decoder.decode(channel.receive() or b""):
                            case Start():
                                send(channel, Loaded(1, make_capacity(9)))
                            case Allocate():
                                send(channel, Ready(1))
                            case Execute(plan=plan):
                                answer(channel, plan.seq)
                            case Stop():
                                break
                process.kill()
                channel.close()

            # Something to kill and to wait for.
            process = subprocess.Popen(["sleep", "1000"])
            threading.Thread(target=script, daemon=True).start()
            return RankProcess(rank, process, Channel(ours))

        monkeypatch.setattr(LocalExecutor, "_launch_rank", launch_rank)
        executors.append(create_executor(make_config(2), FakeRunner, **options))
        return executors[-1]

    yield create
    for executor in executors:
        executor.shutdown()


def answer_well(channel: Channel, seq: int) -> None:
    send(channel, Done(1, seq))


def run(executor: LocalExecutor, seq: int) -> None:
    executor.submit(make_plan(seq))
    executor.collect()


def test_a_rank_that_answers_once_for_every_plan_is_trusted(start_scripted: Callable[..., LocalExecutor]) -> None:
    executor = start_scripted(answer_well)
    for seq in range(100):
        run(executor, seq)
    executor.check()


def test_an_output_carries_the_time_of_every_rank(start_scripted: Callable[..., LocalExecutor]) -> None:
    executor = start_scripted(lambda channel, seq: send(channel, Done(1, seq, 0.5 + seq)))
    for seq in range(2):
        executor.submit(make_plan(seq))
        assert executor.collect().rank_seconds == [0.5 + seq]


def test_a_rank_that_answers_twice_poisons_the_executor(start_scripted: Callable[..., LocalExecutor]) -> None:
    def answer(channel: Channel, seq: int) -> None:
        for _ in range(2 if seq == 3 else 1):
            answer_well(channel, seq)

    executor = start_scripted(answer)
    with pytest.raises(ExecutorError, match=r"rank 1 answered Done\(1, 3\)"):
        for seq in range(6):
            run(executor, seq)
    with pytest.raises(ExecutorError, match=r"rank 1 answered Done\(1, 3\)"):
        executor.submit(make_plan(4))


@pytest.mark.parametrize("wrong", [Done(1, 7), Done(2, 0), Ready(1), Loaded(1, make_capacity(1))])
def test_a_rank_that_answers_wrongly_poisons_the_executor(
    start_scripted: Callable[..., LocalExecutor], wrong: FromRank
) -> None:
    executor = start_scripted(lambda channel, seq: send(channel, wrong))
    with pytest.raises(ExecutorError, match=r"rank 1 answered .* where it owed plan 0"):
        run(executor, 0)
    with pytest.raises(ExecutorError, match="where it owed plan 0"):
        executor.check()


def test_a_rank_that_speaks_unasked_poisons_the_idle_executor(start_scripted: Callable[..., LocalExecutor]) -> None:
    channels = []

    def answer(channel: Channel, seq: int) -> None:
        channels.append(channel)
        answer_well(channel, seq)

    executor = start_scripted(answer)
    run(executor, 0)
    executor.check()
    answer_well(channels[0], 1)
    with pytest.raises(ExecutorError, match=r"rank 1 answered Done\(1, 1\) while idle after plan 0"):
        executor.check()


def test_bytes_that_are_no_message_poison_the_executor(start_scripted: Callable[..., LocalExecutor]) -> None:
    executor = start_scripted(lambda channel, seq: channel.send(b"\xc1 what"))
    with pytest.raises(ExecutorError, match="rank 1"):
        run(executor, 0)


def test_a_late_answer_poisons_the_executor_for_good(start_scripted: Callable[..., LocalExecutor]) -> None:
    def answer(channel: Channel, seq: int) -> None:
        time.sleep(2.0 if seq == 1 else 0.0)
        answer_well(channel, seq)

    executor = start_scripted(answer, step_timeout=0.6)
    run(executor, 0)
    started = time.monotonic()
    with pytest.raises(ExecutorError, match=r"no answer from ranks \[1\] within 0.6 s while running plan 1"):
        run(executor, 1)
    assert time.monotonic() - started < 1.8
    time.sleep(0.6)
    with pytest.raises(ExecutorError, match=r"within 0\.6 s"):
        executor.check()


def test_a_rank_that_reports_failure_is_quoted(start_scripted: Callable[..., LocalExecutor]) -> None:
    executor = start_scripted(lambda channel, seq: send(channel, Failed(1, "the oar split")))
    with pytest.raises(ExecutorError, match=r"^rank 1 failed while running plan 0: the oar split$"):
        run(executor, 0)


def test_a_rank_that_is_silent_while_starting_overruns_the_start_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch_rank(self: LocalExecutor, rank: int, num_threads: int) -> RankProcess:
        ours, theirs = socket.socketpair()
        self.__dict__.setdefault("kept", []).append(theirs)
        return RankProcess(rank, subprocess.Popen(["sleep", "1000"]), Channel(ours))

    monkeypatch.setattr(LocalExecutor, "_launch_rank", launch_rank)
    with pytest.raises(ExecutorError, match=r"no answer from ranks .* within 0.3 s while starting"):
        create_executor(make_config(2), FakeRunner, start_timeout=0.3)


@pytest.mark.parametrize("seq", [0, 2, 5, -1])
def test_a_gap_or_repeat_in_submitted_plans_poisons_the_executor(seq: int) -> None:
    executor = create_executor(make_config(1), FakeRunner)
    run(executor, 0)
    with pytest.raises(ExecutorError, match=f"plan {seq} where plan 1 was due"):
        executor.submit(make_plan(seq))
    with pytest.raises(ExecutorError, match="where plan 1 was due"):
        executor.submit(make_plan(1))
    executor.shutdown()


def test_more_plans_than_depth_poison_the_executor() -> None:
    executor = create_executor(make_config(1), FakeRunner)
    executor.submit(make_plan(0))
    with pytest.raises(ExecutorError, match="plan 1 was submitted while 1 were outstanding"):
        executor.submit(make_plan(1))
    executor.shutdown()


def test_collecting_nothing_is_an_error_but_no_poison() -> None:
    executor = create_executor(make_config(1), FakeRunner)
    with pytest.raises(ExecutorError, match="no plan outstanding"):
        executor.collect()
    run(executor, 0)
    executor.shutdown()
    with pytest.raises(ExecutorError, match="shut down"):
        executor.submit(make_plan(1))


def test_an_interrupt_inside_a_plan_reaches_the_caller_and_poisons() -> None:
    class Interrupted(FakeRunner):
        def execute(self, plan: StepPlan) -> None:
            raise KeyboardInterrupt

    executor = create_executor(make_config(1), Interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.submit(make_plan(0))
    with pytest.raises(ExecutorError, match="KeyboardInterrupt"):
        executor.check()
    executor.shutdown()


def test_a_runner_whose_closing_fails_does_not_stop_the_shutdown() -> None:
    class Sticky(FakeRunner):
        def close(self) -> None:
            raise RuntimeError("stuck")

    executor = create_executor(make_config(1), Sticky)
    executor.shutdown()
    executor.shutdown()


# ---- a rank, against a scripted driver ----


@pytest.fixture
def rank() -> Iterator[tuple[Channel, list[int]]]:
    """A started rank 1 of its own group of one, on a thread; and where its exit code appears."""
    ours, theirs = socket.socketpair()
    launch = Launch(
        rank=1,
        driver_pid=os.getpid(),
        num_threads=1,
        group=GroupSpec(backend="none", size=1),
        runner_factory=pickle.dumps("executor_fakes:FakeRunner"),
    )
    codes: list[int] = []
    rank_channel, channel = Channel(theirs), Channel(ours)

    def serve() -> None:
        codes.append(run_rank(rank_channel, launch))
        rank_channel.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert channel.receive(10) == HELLO
    send(channel, Start(make_config(1)))
    loaded = receive(channel)
    assert isinstance(loaded, Loaded) and loaded.rank == 1
    send(channel, Allocate(loaded.capacity))
    assert receive(channel) == Ready(1)
    yield channel, codes
    channel.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_rank_answers_every_plan_once_and_stops_when_told(rank: tuple[Channel, list[int]]) -> None:
    channel, codes = rank
    for seq in range(5):
        send(channel, Execute(make_plan(seq)))
        assert receive(channel) == Done(1, seq, FakeRunner.step_seconds)
    assert channel.receive(0.05) is None
    send(channel, Stop())
    with pytest.raises(ChannelClosed):
        channel.receive(10)
    assert codes == [0]


@pytest.mark.parametrize("seq", [0, 2, 9])
def test_a_gap_or_repeat_is_fatal_to_a_rank(rank: tuple[Channel, list[int]], seq: int) -> None:
    channel, codes = rank
    send(channel, Execute(make_plan(0)))
    assert receive(channel) == Done(1, 0, FakeRunner.step_seconds)
    send(channel, Execute(make_plan(seq)))
    assert receive(channel) == Failed(1, f"rank 1 was sent plan {seq} where plan 1 was due")
    with pytest.raises(ChannelClosed):
        channel.receive(10)
    assert codes == [EXIT_FAILED]


def test_a_failing_rank_reports_before_it_leaves(rank: tuple[Channel, list[int]]) -> None:
    channel, codes = rank
    send(channel, Execute(make_plan(0, RAISE)))
    assert receive(channel) == Failed(1, "rank 1 failed while running plan 0: ValueError: the mast broke")
    with pytest.raises(ChannelClosed):
        channel.receive(10)
    assert codes == [EXIT_FAILED]


def test_a_rank_leaves_when_its_driver_closes_the_channel(rank: tuple[Channel, list[int]]) -> None:
    channel, codes = rank
    channel.close()
    deadline = time.monotonic() + 5
    while not codes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert codes == [EXIT_ABORTED]


# ---- the channel ----


def test_messages_of_any_size_arrive_whole_and_in_order() -> None:
    a, b = map(Channel, socket.socketpair())
    payloads = [b"", b"x", b"y" * 100, b"z" * 3_000_000, b"w"]
    sender = threading.Thread(target=lambda: list(map(a.send, payloads)))
    sender.start()
    assert [b.receive(10) for _ in payloads] == payloads
    sender.join()
    assert b.receive(0.0) is None
    a.close()
    with pytest.raises(ChannelClosed):
        b.receive(1.0)
    with pytest.raises(ChannelClosed):
        b.send(b"anyone?")
    b.close()


def test_a_receive_that_times_out_within_a_message_goes_on_later() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    message = (5).to_bytes(8, "little") + b"hello"
    ours.sendall(message[:10])
    assert channel.receive(0.02) is None
    ours.sendall(message[10:])
    assert channel.receive(1.0) == b"hello"
    ours.close()
    channel.close()


def test_a_plan_survives_the_wire_unchanged() -> None:
    params = SamplingParams(seed=-(2**63), logit_bias={5: -100.0}, stop=["a"], top_p=0.5, logprobs=20)
    plan = StepPlan(3, [NewRequest(1, [1, 2, 3], [4, 5], params, [0])], [7, NOTHING], [])
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(Execute(plan)), type=ToRank)
    assert isinstance(message, Execute) and message.plan == plan


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_per_rank(size) for size in (2, 4, 16)] == [4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_per_rank(2) == 1
