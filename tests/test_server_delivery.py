"""The way from the engine to the server when one of them is slower than the other."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from server_sim import make_config, make_executor
from server_support import build_tokenizer

from bireme.engine_client import PASS_SECONDS, EngineClient
from bireme.engine_process import (
    MAX_HELD_STEPS,
    Add,
    Died,
    Drain,
    Drained,
    FromEngine,
    LeaveRequest,
    Outbox,
    Ready,
    Step,
    launch_engine,
    run_engine,
)
from bireme.sim import SimExecutor, sim_capacity
from bireme.types import FinishReason, Request, RequestOutput, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine")
    build_tokenizer(path)
    return path


def request(name: str, max_tokens: int) -> Request:
    return Request(name, [10, 11, 12], SamplingParams(max_tokens=max_tokens, ignore_eos=True))


NUM_TOKENS = 500


class Reader:
    """The other end of an engine that runs in a thread: it reads when it likes, and says so."""

    def __init__(self, folder: Path, executor: SimExecutor) -> None:
        self._context = zmq.Context()
        self.num_read = ctypes.c_uint64(0)
        self._sockets = [self._context.socket(kind) for kind in (zmq.PUSH, zmq.PULL, zmq.PULL, zmq.PUSH)]
        self.commands, inbox, self.events, outbox = self._sockets
        for one, other, name in ((self.commands, inbox, "commands"), (self.events, outbox, "events")):
            one.bind(f"inproc://{name}")
            other.connect(f"inproc://{name}")
        self._run = functools.partial(
            run_engine,
            make_config(folder),
            lambda config: executor,
            inbox,
            Outbox(outbox, self.num_read),
            LeaveRequest(0.0),
        )
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode

    async def __aenter__(self) -> Reader:
        self.engine = asyncio.create_task(asyncio.to_thread(self._run))
        assert isinstance(await self.read(), Ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        while not self.engine.done():
            self.send(Drain(0.0))
            with contextlib.suppress(zmq.Again):
                self.events.recv(zmq.NOBLOCK)
                self.num_read.value += 1
            await asyncio.sleep(0.001)
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def send(self, message: Add | Drain) -> None:
        self.commands.send(msgspec.msgpack.encode(message))

    async def read(self) -> FromEngine:
        assert await asyncio.to_thread(self.events.poll, 10_000), "the engine says nothing"
        message = self._decode(self.events.recv())
        self.num_read.value += 1
        return message


class CountingExecutor(SimExecutor):
    """Knows how many plans it was given."""

    num_submitted = 0

    def submit(self, plan: object) -> None:
        self.num_submitted += 1
        super().submit(plan)  # type: ignore[arg-type]


def with_reader(folder: Path, executor: SimExecutor, body: Callable[[Reader], object]) -> None:
    async def run() -> None:
        async with Reader(folder, executor) as reader:
            await asyncio.wait_for(body(reader), 30)  # type: ignore[arg-type]

    asyncio.run(run())


def test_an_engine_waits_for_a_reader_who_does_not_come_after_and_loses_nothing(folder: Path) -> None:
    executor = CountingExecutor(sim_capacity(max_model_len=2048))

    async def body(reader: Reader) -> None:
        reader.send(Add([request("a", NUM_TOKENS)]))
        await asyncio.sleep(0.3)
        stopped_at = executor.num_submitted
        # One step in the message that nobody has taken, and those that are held for the next.
        assert stopped_at <= MAX_HELD_STEPS + 2
        await asyncio.sleep(0.1)
        assert executor.num_submitted == stopped_at
        outputs: list[RequestOutput] = []
        sizes = []
        while not outputs or outputs[-1].finish_reason is None:
            step = await reader.read()
            assert isinstance(step, Step)
            outputs += step.outputs
            sizes.append(len(step.outputs))
        assert [token_id for output in outputs for token_id in output.token_ids] == [
            10 + i % 3 for i in range(NUM_TOKENS)
        ]
        assert max(sizes) <= MAX_HELD_STEPS + 2

    with_reader(folder, executor, body)


def test_a_waiting_engine_still_hears_that_it_shall_leave_and_says_all_it_holds(folder: Path) -> None:
    async def body(reader: Reader) -> None:
        reader.send(Add([request("a", NUM_TOKENS)]))
        await asyncio.sleep(0.2)
        reader.send(Drain(0.0))
        messages = [await reader.read()]
        while not isinstance(messages[-1], Drained):
            messages.append(await reader.read())
        outputs = [output for step in messages if isinstance(step, Step) for output in step.outputs]
        tokens = [token_id for output in outputs for token_id in output.token_ids]
        assert tokens == [10 + i % 3 for i in range(len(tokens))]
        assert len(tokens) > 1
        assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.ABORT]
        assert await reader.engine == 0

    with_reader(folder, CountingExecutor(sim_capacity(max_model_len=2048)), body)


def test_what_is_held_when_an_engine_dies_comes_before_the_errors(folder: Path) -> None:
    async def body(reader: Reader) -> None:
        reader.send(Add([request("short", 4), request("long", 500)]))
        await asyncio.sleep(0.2)
        first = await reader.read()
        last = await reader.read()
        assert isinstance(first, Step) and isinstance(last, Died)
        outputs = first.outputs + last.outputs
        of = {name: [output for output in outputs if output.request_id == name] for name in ("short", "long")}
        assert of["short"][-1].finish_reason is FinishReason.LENGTH
        assert [token_id for output in of["short"] for token_id in output.token_ids] == [10, 11, 12, 10]
        assert [output.finish_reason for output in of["long"]].count(FinishReason.ERROR) == 1
        assert of["long"][-1].finish_reason is FinishReason.ERROR

    with_reader(folder, SimExecutor(sim_capacity(max_model_len=2048), fail_collect_seq=10), body)


def test_a_flood_of_messages_leaves_the_event_loop_to_others_in_between(folder: Path) -> None:
    """Messages that each take long to read: between passes others have their turn, and nothing is lost."""

    async def run() -> tuple[int, int, list[int]]:
        engine = launch_engine(make_config(folder), functools.partial(make_executor, num_slots=1))
        client = EngineClient(engine)
        hand_out = client._hand_out
        handed = []

        def slowly(outputs: list[RequestOutput]) -> None:
            time.sleep(2 * PASS_SECONDS)
            handed.append(len(outputs))
            hand_out(outputs)

        client._hand_out = slowly  # type: ignore[method-assign]
        try:
            await client.wait_ready()
            num_turns = 0
            tokens = []

            async def count_turns() -> None:
                nonlocal num_turns
                while True:
                    num_turns += 1
                    await asyncio.sleep(0)

            turns = asyncio.create_task(count_turns())
            async for output in client.generate(request("a", 300)):
                tokens += output.token_ids
            turns.cancel()
            return num_turns, len(handed), tokens
        finally:
            await client.close()

    num_turns, num_messages, tokens = asyncio.run(run())
    assert tokens == [10 + i % 3 for i in range(300)]
    assert num_turns >= num_messages > 1
