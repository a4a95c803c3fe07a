"""The engine in a process of its own: launching it, what travels to and from it, and its loop.

Two one-way sockets (zmq over ipc, msgpack) lie in a private folder. The launching process binds both, so that it can
wait for the engine to come up; the engine connects. Everything that a step produced leaves in one message.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, cast

import msgspec
import zmq

from bireme.config import CacheCapacity, EngineConfig
from bireme.errors import BiremeError
from bireme.step_account import StepReport
from bireme.types import EngineStats, FinishReason, Request, RequestOutput

if TYPE_CHECKING:
    from bireme.engine import EngineCore
    from bireme.executor.protocol import Executor

ExecutorFactory = Callable[[EngineConfig], "Executor"]

CHECK_MILLISECONDS = 500
"""An idle engine looks this often whether its ranks are alive."""

EXIT_SECONDS = 5.0
"""How long an engine whose parent died may take to leave before it is ended the hard way."""

MAX_HELD_STEPS = 16
"""Steps whose outputs are gathered for a reader who has not taken the last message; then the engine waits for him."""

PAUSE_MILLISECONDS = 1
"""How often an engine that waits for its reader looks again."""

FAILED_EXIT_CODE = 1

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_PR_SET_PDEATHSIG = 1
_LONGEST_IPC_PATH = 100

logger = logging.getLogger(__name__)


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Client → engine: new requests, in order of arrival."""

    requests: list[Request]


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Client → engine: nobody waits for these any more."""

    request_ids: list[str]


class Drain(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Client → engine: take nothing new, finish what is open within ``seconds``, abort the rest, leave."""

    seconds: float


class Watch(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Client → engine: for ``seconds`` somebody looks at single steps."""

    seconds: float


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Engine → client: requests may come."""

    capacity: CacheCapacity


class Step(msgspec.Struct, tag=True, array_like=True):
    """Engine → client: what one step produced for all its requests together.

    ``report`` comes a few times a second, and when nothing is left to do.
    """

    outputs: list[RequestOutput]
    stats: EngineStats
    report: StepReport | None = None


class Died(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Engine → client, last: it could not start or cannot go on. ``outputs`` end every request that was open."""

    error: str
    outputs: list[RequestOutput] = []


class Drained(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Engine → client, last: it was asked to leave and leaves."""


ToEngine = Add | Abort | Drain | Watch
FromEngine = Ready | Step | Died | Drained


class EngineProcess:
    """A launched engine, seen from the process that launched it.

    Attributes:
        config: what it was launched with.
        process: the engine process; its ranks are children of that.
        commands: PUSH socket for ToEngine messages.
        events: PULL socket of FromEngine messages.
        num_read: messages that the reader of ``events`` has taken; the reader counts them here, and the engine looks.
    """

    def __init__(self, config: EngineConfig, executor_factory: ExecutorFactory | None, drain_seconds: float) -> None:
        self.config = config
        self._folder = _private_folder()
        self._context = zmq.Context()
        self.commands = self._bind(zmq.PUSH, "commands")
        self.events = self._bind(zmq.PULL, "events")
        spawn = multiprocessing.get_context("spawn")
        self.num_read = spawn.RawValue(ctypes.c_uint64, 0)
        # The engine holds the other end and takes its closing, however this process ends, as the order to leave.
        parent_end, self._lifeline = spawn.Pipe(duplex=False)
        on_main_thread = threading.current_thread() is threading.main_thread()
        self.process = spawn.Process(
            target=_engine_main,
            args=(
                config,
                executor_factory,
                self._folder,
                self.num_read,
                parent_end,
                on_main_thread,
                drain_seconds,
                *_log_style(),
            ),
            name="bireme-engine",
        )
        self._is_closed = False
        try:
            self.process.start()
        except BaseException:
            self._remove()
            raise
        parent_end.close()
        # multiprocessing joins its children at exit, and this one leaves only when told to.
        atexit.register(self.close)

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_endpoint(self._folder, name))
        return socket

    def end(self, seconds: float) -> None:
        """Wait ``seconds`` for the process to leave by itself, then end it (blocks)."""
        self.process.join(seconds)
        if self.process.is_alive():
            logger.warning("the engine process %s did not leave within %g s: ending it", self.process.pid, seconds)
            self.process.terminate()
            self.process.join(EXIT_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def close(self) -> None:
        """End the process if it still runs, and remove sockets and folder. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._lifeline.close()
        self.end(EXIT_SECONDS)
        self._remove()

    def _remove(self) -> None:
        self.commands.close(linger=0)
        self.events.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def launch_engine(
    config: EngineConfig, executor_factory: ExecutorFactory | None = None, *, drain_seconds: float = 30.0
) -> EngineProcess:
    """Start an engine process and return at once; ``EngineClient.wait_ready`` says when it serves, or why it cannot.

    Args:
        config: the engine's.
        executor_factory: what makes the executor there; any picklable callable (None: ``create_executor``).
        drain_seconds: how long a SIGTERM sent to the engine itself lets open requests run.
    """
    return EngineProcess(config, executor_factory, drain_seconds)


def _log_style() -> tuple[int, logging.Formatter]:
    """How this process logs, so that the engine's lines look like its own."""
    root = logging.getLogger()
    # One of the package's own or of the standard library's: others may not survive the way to a process.
    formatters = [
        handler.formatter
        for handler in root.handlers
        if handler.formatter is not None
        and type(handler.formatter).__module__.partition(".")[0] in ("bireme", "logging")
    ]
    return root.getEffectiveLevel(), formatters[0] if formatters else logging.Formatter(LOG_FORMAT)


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="bireme-")
    if len(folder) > _LONGEST_IPC_PATH - len("/commands"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="bireme-", dir="/tmp")
    return folder


def _endpoint(folder: str, name: str) -> str:
    return f"ipc://{folder}/{name}"


# ---- inside the engine process ----


class LeaveRequest:
    """Whether and until when the engine shall leave: whoever asked for the earliest end is obeyed.

    While the engine still loads there is nothing to finish, so a signal ends it at once.

    Attributes:
        deadline: on the monotonic clock; None to stay.
        is_serving: set by the engine once requests may come.
        is_orphan: nobody is left to talk to.
    """

    def __init__(self, drain_seconds: float) -> None:
        self._drain_seconds = drain_seconds
        self.deadline: float | None = None
        self.is_serving = False
        self.is_orphan = False

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handler of SIGTERM."""
        if not self.is_serving:
            raise SystemExit(128 + signum)
        self.within(self._drain_seconds)

    def within(self, seconds: float) -> None:
        """Leave in ``seconds`` at the latest."""
        deadline = time.monotonic() + seconds
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)


def _engine_main(
    config: EngineConfig,
    executor_factory: ExecutorFactory | None,
    folder: str,
    num_read: ctypes.c_uint64,
    lifeline: Connection,
    watch_parent: bool,
    drain_seconds: float,
    log_level: int,
    log_formatter: logging.Formatter,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave = LeaveRequest(drain_seconds)
    signal.signal(signal.SIGTERM, leave.on_signal)
    _die_with_parent(folder, lifeline, watch_parent, leave)
    log_handler = logging.StreamHandler()
    log_handler.setFormatter(log_formatter)
    logging.basicConfig(level=log_level, handlers=[log_handler])
    context = zmq.Context()
    commands = context.socket(zmq.PULL)
    events = context.socket(zmq.PUSH)
    for socket, name in ((commands, "commands"), (events, "events")):
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(_endpoint(folder, name))
    try:
        code = run_engine(config, executor_factory, commands, Outbox(events, num_read), leave)
    finally:
        commands.close(linger=0)
        events.close(linger=0 if leave.is_orphan else int(EXIT_SECONDS * 1000))
        context.term()
    sys.exit(code)


def _die_with_parent(folder: str, lifeline: Connection, watch_parent: bool, leave: LeaveRequest) -> None:
    """Leave when the parent is gone, by whatever means it went; its folder is removed in its stead."""
    if watch_parent and sys.platform == "linux":
        # The kernel watches the thread that started this process, so this is only for a main thread's child.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv_bytes()
        shutil.rmtree(folder, ignore_errors=True)
        leave.is_orphan = True
        leave.within(0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(EXIT_SECONDS)
        os._exit(FAILED_EXIT_CODE)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


class Outbox:
    """The way out of the engine process.

    Args:
        events: PUSH socket for FromEngine messages.
        num_read: how many of them the reader has taken.

    Attributes:
        held: outputs that go with the next message.
    """

    def __init__(self, events: zmq.Socket[bytes], num_read: ctypes.c_uint64) -> None:
        self._events = events
        self._encode = msgspec.msgpack.Encoder().encode
        self._num_read = num_read
        self._num_sent = 0
        self.held: list[RequestOutput] = []

    @property
    def is_behind(self) -> bool:
        """The reader has not taken the last message: what comes now is gathered for the next."""
        return self._num_sent > self._num_read.value

    def publish(self, message: FromEngine) -> None:
        """Send at once, however far the reader is."""
        self._num_sent += 1
        self._events.send(self._encode(message))


def run_engine(
    config: EngineConfig,
    executor_factory: ExecutorFactory | None,
    commands: zmq.Socket[bytes],
    outbox: Outbox,
    leave: LeaveRequest,
) -> int:
    """Build the engine, serve until told to leave or until it fails, and return the process's exit code.

    The last message says how it went: ``Died``, with one error for every open request, or ``Drained``.
    """
    from bireme.engine import EngineCore

    publish = outbox.publish
    executor: Executor | None = None
    try:
        if executor_factory is None:
            from bireme.executor.launcher import create_executor

            executor_factory = create_executor
        executor = executor_factory(config)
        core = EngineCore(config, executor)
    except Exception as error:
        publish(Died(_explain(error, "the engine could not start")))
        if executor is not None:
            executor.shutdown()
        return FAILED_EXIT_CODE
    # What has been loaded stays: a full collection that went through it would hold every stream up.
    gc.collect()
    gc.freeze()
    leave.is_serving = True
    publish(Ready(core.capacity))
    try:
        last_outputs = _serve(core, commands, outbox, leave)
    except Exception as error:
        last_outputs = core.fail(_explain(error, "the engine failed"))
    if core.error is not None:
        publish(Died(core.error, outbox.held + last_outputs))
        core.shutdown()
        return FAILED_EXIT_CODE
    publish(Step(outbox.held + core.shutdown(), core.stats()))
    publish(Drained())
    return 0


def _serve(core: EngineCore, commands: zmq.Socket[bytes], outbox: Outbox, leave: LeaveRequest) -> list[RequestOutput]:
    """Drain → step → publish, until a leaving engine has nothing more to do (or no more time), or the engine is dead.

    Returns:
        What a dead engine's last check gave. It and what the outbox holds are for the message that tells of the death,
        so that nobody who reads one of these errors finds the engine alive.
    """
    decoder = msgspec.msgpack.Decoder(ToEngine)
    outputs = outbox.held
    has_news = False
    num_held = 0
    while True:
        if leave.deadline is not None and (not core.has_unfinished or time.monotonic() >= leave.deadline):
            return []
        if not core.has_unfinished and not commands.poll(CHECK_MILLISECONDS):
            last_outputs = core.check()
            if core.is_dead:
                return last_outputs
            continue
        while cast(int, commands.get(zmq.EVENTS)) & zmq.POLLIN:
            message = decoder.decode(commands.recv())
            has_news = True
            outputs += _apply(core, message, leave)
        if num_held >= MAX_HELD_STEPS and outbox.is_behind:
            commands.poll(PAUSE_MILLISECONDS)
            continue
        if core.has_unfinished:
            outputs += core.step()
        if core.is_dead:
            return []
        if outbox.is_behind and core.has_unfinished:
            num_held += 1
            continue
        report = core.account.report(is_last=not core.has_unfinished)
        if outputs or has_news or report is not None:
            outbox.publish(Step(outputs, core.stats(), report))
            outputs.clear()
            has_news = False
            num_held = 0


def _apply(core: EngineCore, message: ToEngine, leave: LeaveRequest) -> list[RequestOutput]:
    """Do what a message says; the answers that it has at once are returned."""
    match message:
        case Add(requests):
            if leave.deadline is not None:
                error = "the engine is shutting down"
                return [RequestOutput(request.request_id, [], FinishReason.ERROR, error=error) for request in requests]
            for request in requests:
                core.add_request(request)
        case Abort(request_ids):
            for request_id in request_ids:
                core.abort(request_id)
        case Drain(seconds):
            leave.within(seconds)
        case Watch(seconds):
            core.account.watch(seconds)
    return []


def _explain(error: Exception, what: str) -> str:
    """The error for people: a named error's own words; anything else with its type, and its trace in the log."""
    if isinstance(error, BiremeError):
        return str(error)
    logger.error("%s", what, exc_info=error)
    return f"{what}: {type(error).__name__}: {error}"
