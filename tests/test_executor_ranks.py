"""The executor fails closed: what real rank processes do when they are killed, raise, hang, or lose their driver."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from executor_fakes import (
    HANG,
    NOTHING,
    RAISE,
    SUM,
    BrokenCheckpointRunner,
    FakeRunner,
    LostRunner,
    make_config,
    make_plan,
)

from bireme.errors import CheckpointError, ExecutorError
from bireme.executor.launcher import LocalExecutor, create_executor
from bireme.types import StepOutput


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def child_pids() -> set[int]:
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def pids(executor: LocalExecutor) -> list[int]:
    return [rank.process.pid for rank in executor._ranks]


def run(executor: LocalExecutor, seq: int, operation: int = NOTHING, rank: int = 0) -> StepOutput:
    executor.submit(make_plan(seq, operation, rank))
    return executor.collect()


@pytest.fixture
def start() -> Iterator[Callable[..., LocalExecutor]]:
    """Starts executors; afterwards proves that shutting them down leaves no process, memory or descriptor."""
    executors: list[LocalExecutor] = []
    children = child_pids()
    descriptors = len(os.listdir("/proc/self/fd"))

    def create(tp_size: int, **options: float) -> LocalExecutor:
        executors.append(create_executor(make_config(tp_size), FakeRunner, start_timeout=120, **options))
        return executors[-1]

    yield create
    for executor in executors:
        started = time.monotonic()
        executor.shutdown()
        executor.shutdown()
        assert time.monotonic() - started < 10
        with pytest.raises(ExecutorError):
            executor.check()
    executors.clear()
    gc.collect()
    assert child_pids() <= children
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert not [name for name in os.listdir("/dev/shm") if "bireme" in name]
    assert "memfd:bireme" not in Path("/proc/self/maps").read_text()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bireme")]


def test_two_ranks_run_plans_in_order_and_leave_without_a_trace(start: Callable[..., LocalExecutor]) -> None:
    executor = start(2)
    assert executor.capacity.num_slots == 9  # rank 1's, the smaller
    assert executor._runner is not None and executor._runner.capacity == executor.capacity  # type: ignore[attr-defined]
    for seq in range(50):
        assert run(executor, seq, SUM).token_ids == [3, os.getpid()]
    executor.check()


def test_a_single_rank_has_no_process_and_fails_closed_too(start: Callable[..., LocalExecutor]) -> None:
    children = child_pids()
    executor = start(1)
    assert child_pids() == children
    assert run(executor, 0).seq == 0
    with pytest.raises(ExecutorError, match="rank 0 failed while running plan 1: ValueError: the mast broke"):
        executor.submit(make_plan(1, RAISE))
    with pytest.raises(ExecutorError, match="the mast broke"):
        executor.check()


def test_a_rank_killed_while_idle_is_noticed(start: Callable[..., LocalExecutor]) -> None:
    executor = start(2)
    run(executor, 0, SUM)
    os.kill(pids(executor)[0], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ExecutorError, match=r"rank 1 died \(signal 9, SIGKILL\) while idle after plan 0"):
        while time.monotonic() - started < 2:
            executor.check()
            time.sleep(0.01)
    for call in (executor.check, executor.collect, lambda: executor.submit(make_plan(1))):
        with pytest.raises(ExecutorError, match="rank 1 died"):
            call()


def test_a_rank_killed_between_plans_fails_the_next_one(start: Callable[..., LocalExecutor]) -> None:
    executor = start(2)
    run(executor, 0, SUM)
    os.kill(pids(executor)[0], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ExecutorError, match=r"rank 1 died \(signal 9, SIGKILL\)"):
        run(executor, 1, SUM)
    assert time.monotonic() - started < 2


def test_a_rank_killed_inside_a_plan_frees_the_ranks_that_wait_for_it(start: Callable[..., LocalExecutor]) -> None:
    executor = start(3)
    run(executor, 0, SUM)
    killed_at = []

    def kill() -> None:
        time.sleep(0.3)
        killed_at.append(time.monotonic())
        os.kill(pids(executor)[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ExecutorError, match=r"rank 1 died \(signal 9, SIGKILL\) while running plan 1"):
        run(executor, 1, HANG, rank=1)
    assert time.monotonic() - killed_at[0] < 2
    killer.join()
    ranks = pids(executor)
    executor.shutdown()
    assert not any(is_running(pid) for pid in ranks)


def test_a_rank_killed_inside_a_plan_frees_gloo_ranks_too() -> None:
    executor = create_executor(make_config(3, "gloo"), FakeRunner, start_timeout=120)
    try:
        run(executor, 0, SUM)
        threading.Timer(0.3, os.kill, (pids(executor)[0], signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(ExecutorError, match=r"rank 1 died \(signal 9, SIGKILL\) while running plan 1"):
            run(executor, 1, HANG, rank=1)
        assert time.monotonic() - started < 2.3
    finally:
        executor.shutdown()


def test_a_rank_that_raises_tells_the_driver_why(start: Callable[..., LocalExecutor]) -> None:
    executor = start(3)
    with pytest.raises(ExecutorError, match="rank 2 failed while running plan 0: ValueError: the mast broke"):
        run(executor, 0, RAISE, rank=2)


def test_a_rank_that_hangs_overruns_the_step_timeout(start: Callable[..., LocalExecutor]) -> None:
    executor = start(2, step_timeout=1.0)
    with pytest.raises(ExecutorError, match=r"no answer from ranks \[0, 1\] within 1 s while running plan 0"):
        run(executor, 0, HANG, rank=1)


def test_interrupts_and_terminations_of_the_process_group_do_not_reach_ranks(
    start: Callable[..., LocalExecutor],
) -> None:
    executor = start(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pids(executor)[0], number)
    assert run(executor, 0, SUM).token_ids[0] == 3


def test_a_checkpoint_error_of_any_rank_is_raised_as_itself() -> None:
    children = child_pids()
    with pytest.raises(CheckpointError, match=r"^tensor 'norm.weight' of shard 2 is truncated: 10 bytes of 256$"):
        create_executor(make_config(2), BrokenCheckpointRunner, start_timeout=120)
    assert child_pids() <= children


def test_a_rank_that_dies_while_loading_fails_the_start() -> None:
    children = child_pids()
    with pytest.raises(ExecutorError, match=r"rank 2 died \(signal 9, SIGKILL\) while loading"):
        create_executor(make_config(3), LostRunner, start_timeout=120)
    assert child_pids() <= children


def test_a_runner_that_rank_processes_cannot_import_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "__module__", "__main__")
    with pytest.raises(ExecutorError, match="lives in __main__"):
        create_executor(make_config(2), FakeRunner)


def test_ranks_leave_when_the_driver_is_killed_idle_or_inside_a_plan() -> None:
    script = (
        "from executor_fakes import *; from bireme.executor.launcher import create_executor\n"
        "import sys, threading\n"
        "idle = create_executor(make_config(2), FakeRunner)\n"
        "busy = create_executor(make_config(3), FakeRunner)\n"
        "print(*[rank.process.pid for e in (idle, busy) for rank in e._ranks], flush=True)\n"
        "busy.submit(make_plan(0, HANG, 0))\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    assert driver.stdout is not None
    ranks = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(ranks) == 3 and all(is_running(pid) for pid in ranks)
    time.sleep(0.3)
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 2
    while any(is_running(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    driver.stdout.close()
    assert not [pid for pid in ranks if is_running(pid)]


def test_ranks_outlive_the_thread_that_created_the_executor() -> None:
    executors = []
    thread = threading.Thread(
        target=lambda: executors.append(create_executor(make_config(2), FakeRunner, start_timeout=120))
    )
    thread.start()
    thread.join()
    try:
        assert run(executors[0], 0, SUM).token_ids[0] == 3
    finally:
        executors[0].shutdown()
