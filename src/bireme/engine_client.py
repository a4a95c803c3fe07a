"""The engine as an asyncio server sees it: requests in, outputs out, and whether it lives."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

import msgspec
import zmq

from bireme.config import CacheCapacity
from bireme.engine_process import (
    Abort,
    Add,
    Died,
    Drain,
    Drained,
    EngineProcess,
    FromEngine,
    Ready,
    Step,
    ToEngine,
    Watch,
)
from bireme.errors import EngineDeadError
from bireme.step_account import StepReport
from bireme.types import EngineStats, FinishReason, Request, RequestOutput

LAST_WORDS_SECONDS = 0.2
"""How long after the engine process ended its last messages may still be on their way."""

EXIT_SECONDS = 10.0
"""How long, beyond draining, the engine may take to leave before it is ended."""

PASS_SECONDS = 0.001
"""After so long the event loop's other work has its turn: an engine that is ahead must not silence it."""


class Submission:
    """Requests handed in together, and what has come back for any of them.

    Use it as an async context manager: whatever is unfinished at its end is aborted.
    """

    __slots__ = ("_client", "_is_nudged", "_items", "_left", "_open", "_waiter")

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._open = {request.request_id for request in requests}
        self._items: list[RequestOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._left = False
        self._is_nudged = False

    @property
    def num_open(self) -> int:
        """Requests without their terminal output (taken or not)."""
        return len(self._open)

    @property
    def is_over(self) -> bool:
        """True when ``take`` has nothing more to give."""
        return self._left or not (self._open or self._items)

    async def take(self) -> list[RequestOutput]:
        """Wait until something has arrived and return all of it, in order.

        Empty once every request has ended, after ``leave``, and after a ``nudge`` if there is nothing.
        What one step gave for all the requests arrives together. Only one task may wait.
        """
        while not self._items and self._open and not self._left and not self._is_nudged:
            self._waiter = self._client.loop.create_future()
            await self._waiter
        self._is_nudged = False
        items, self._items = self._items, []
        return [] if self._left else items

    def leave(self) -> None:
        """Nobody wants the rest: ``take`` returns nothing from now on. Whoever waits in it is woken."""
        self._left = True
        self._wake()

    def nudge(self) -> None:
        """Let the next or the waiting ``take`` return, though nothing may have arrived."""
        self._is_nudged = True
        self._wake()

    def abort(self, request_id: str) -> None:
        """End one of the requests; nothing more comes for it. Does nothing for one that has ended."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._items = [item for item in self._items if item.request_id != request_id]
            self._client.abort(request_id)
            if not self._open:
                self._wake()

    def put(self, output: RequestOutput) -> None:
        """For the client: ``output`` has arrived."""
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._items.append(output)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aenter__(self) -> Submission:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.abort_all(self._open)
        self._open.clear()


class EngineClient:
    """Talks to an engine process from one event loop (create it while that loop runs).

    As a context manager it takes its hands off the engine's descriptors at its end, however that comes: a loop that
    watches one that has been closed ends the process. ``close`` does so too.

    Attributes:
        loop: that loop.
        capacity: the engine's limits, once it is ready.
        stats: the engine's state after its last step.
        report: what its steps were made of, as it last told; None before the first.
        error: why it is dead, or None. A dead client stays dead.
        has_left: it finished what it had and went, because somebody told it to.
        on_report: called with each report.
        on_death: called once, when the engine dies, or leaves unasked by ``close``.
    """

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.loop = asyncio.get_running_loop()
        self.capacity: CacheCapacity | None = None
        self.stats = EngineStats()
        self.report: StepReport | None = None
        self.on_report: Callable[[StepReport], object] | None = None
        self.error: str | None = None
        self.has_left = False
        self.on_death: Callable[[], object] | None = None
        self._open: dict[str, Submission] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._changed = asyncio.Event()
        self._is_closing = False
        self._is_gone = False
        self.loop.add_reader(engine.events.fileno(), self._receive)
        self.loop.add_reader(engine.process.sentinel, self._on_exit)
        self.loop.call_soon(self._receive)

    @property
    def is_ready(self) -> bool:
        """True from when the engine serves until it dies or is told to leave."""
        return self.capacity is not None and self.error is None and not self._is_closing

    @property
    def is_alive(self) -> bool:
        """False once the engine has failed or left (True while it loads)."""
        return self.error is None

    @property
    def num_open(self) -> int:
        """Requests that have not ended, running or waiting."""
        return len(self._open)

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()

    async def wait_ready(self) -> CacheCapacity:
        """Wait until the engine serves.

        Raises:
            EngineDeadError: it could not start; the message is its own.
        """
        while self.capacity is None and self.error is None:
            await self._changed.wait()
            self._changed.clear()
        if self.error is not None:
            raise EngineDeadError(self.error)
        assert self.capacity is not None
        return self.capacity

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Hand in ``requests``, whose ids nobody else uses.

        Raises:
            EngineDeadError: the engine is dead, leaving or not ready yet.
        """
        if not self.is_ready:
            raise EngineDeadError(self.error or "the engine is not serving")
        submission = Submission(self, requests)
        self._send(Add(list(requests)))
        for request in requests:
            self._open[request.request_id] = submission
        return submission

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, the last with a finish reason. Leaving the iteration aborts the request."""
        async with self.submit([request]) as submission:
            while outputs := await submission.take():
                for output in outputs:
                    yield output

    def abort(self, request_id: str) -> None:
        """End a request; nothing more comes for it. An id that is not open is ignored."""
        self.abort_all([request_id])

    def abort_all(self, request_ids: Sequence[str] | set[str]) -> None:
        """End several requests with one message."""
        known = [request_id for request_id in request_ids if self._open.pop(request_id, None) is not None]
        if known and self.error is None:
            self._send(Abort(known))

    def watch_steps(self, seconds: float) -> None:
        """For so long, let the engine's reports show single steps."""
        if self.is_ready:
            self._send(Watch(seconds))

    def end_all(self) -> None:
        """Abort everything that is open; each request still gets its terminal output, an ABORT."""
        submissions, self._open = self._open, {}
        if submissions and self.error is None:
            self._send(Abort(list(submissions)))
        for request_id, submission in submissions.items():
            submission.put(RequestOutput(request_id, [], FinishReason.ABORT))

    async def close(self, drain_seconds: float = 0.0) -> int | None:
        """Let the engine finish what is open within ``drain_seconds``, then leave; return its exit code.

        Whatever is still open then gets its terminal output. An engine that does not leave is ended.
        """
        self._is_closing = True
        if self.capacity is None:
            self.engine.process.terminate()
        elif self.error is None:
            self._send(Drain(drain_seconds))
        deadline = time.monotonic() + drain_seconds + EXIT_SECONDS
        while not self._is_gone and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.5)
            self._changed.clear()
        await asyncio.to_thread(self.engine.end, 0.1)
        self._on_gone()
        self.engine.close()
        return self.engine.process.exitcode

    def _send(self, message: ToEngine) -> None:
        # With nobody at the other end the engine is gone, which its process's end will tell.
        with contextlib.suppress(zmq.Again):
            self.engine.commands.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _receive(self) -> None:
        """Take in what has arrived and hand its outputs out; of very much, a part now and the rest soon."""
        if self._is_gone:
            return
        if self._take_in(time.perf_counter() + PASS_SECONDS):
            # The descriptor tells of new messages only, so that the rest needs a call of its own.
            self.loop.call_soon(self._receive)

    def _take_in(self, until: float) -> bool:
        """Take in messages until none is left (False), or the performance counter is past ``until`` (True)."""
        receive = self.engine.events.recv
        decode = self._decoder.decode
        num_read = self.engine.num_read
        while time.perf_counter() < until:
            try:
                message = decode(receive(zmq.NOBLOCK))
            except zmq.Again:
                return False
            num_read.value += 1
            if type(message) is Step:
                self.stats = message.stats
                if message.report is not None:
                    self.report = message.report
                    if self.on_report is not None:
                        self.on_report(message.report)
                self._hand_out(message.outputs)
            else:
                self._handle(message)
        return True

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        submissions = self._open
        for output in outputs:
            if output.finish_reason is None:
                submission = submissions.get(output.request_id)
            else:
                submission = submissions.pop(output.request_id, None)
            if submission is not None:
                submission.put(output)

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Ready(capacity):
                self.capacity = capacity
                self.stats = EngineStats(
                    num_free_slots=capacity.num_slots,
                    num_slots=capacity.num_slots,
                    num_free_blocks=capacity.num_blocks,
                    num_blocks=capacity.num_blocks,
                )
            case Died(error, outputs):
                self._hand_out(outputs)
                self._die(error)
            case Drained():
                self.has_left = True
                self._die("the engine was told to leave, and has left")
        self._changed.set()

    def _on_exit(self) -> None:
        self.loop.remove_reader(self.engine.process.sentinel)
        self.loop.call_later(LAST_WORDS_SECONDS, self._on_gone)

    def _on_gone(self) -> None:
        """The process is gone; whatever it had to say has been said."""
        if self._is_gone:
            return
        self._take_in(math.inf)
        self._detach()
        self.engine.process.join(0)
        self._die(_how_it_ended(self.engine.process.exitcode))
        self._changed.set()

    def _detach(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            self.loop.remove_reader(self.engine.events.fileno())
            self.loop.remove_reader(self.engine.process.sentinel)

    def _die(self, error: str) -> None:
        if self.error is not None:
            return
        self.error = error
        submissions, self._open = self._open, {}
        for request_id, submission in submissions.items():
            submission.put(RequestOutput(request_id, [], FinishReason.ERROR, error=error))
        if self.on_death is not None and not self._is_closing:
            self.on_death()


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the engine process was killed by {signal.Signals(-exit_code).name}"
    return f"the engine process ended with exit code {exit_code}"
