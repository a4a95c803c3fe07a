"""A rank process: it joins the group, loads its shard, runs the plans it is sent in order, and leaves with its driver.

Also here, because both ends need them: the channel between driver and rank, and what a runner is.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
import torch

from bireme import errors
from bireme.config import CacheCapacity, EngineConfig
from bireme.distributed import GroupAborted, GroupSpec, TpGroup, join_group, rank_device
from bireme.errors import BiremeError, ExecutorError
from bireme.executor.protocol import Allocate, Done, Execute, Failed, FromRank, Loaded, Ready, Start, Stop, ToRank
from bireme.types import SamplingParams, StepOutput, StepPlan

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_ABORTED = 3
"""Exit codes of a rank: it failed by itself; it left because another one did."""

HELLO = b"hello"
"""A rank's first message: it is up and about to join the group."""

_PR_SET_PDEATHSIG = 1
_HEADER = struct.Struct("<Q")


class Deferred(Protocol):
    """The output of a plan that a device is still at: see ``deferred.DeferredOutput``."""

    seq: int

    @property
    def is_ready(self) -> bool: ...

    def result(self) -> StepOutput: ...


class Runner(Protocol):
    """What a rank runs plans with: ``model_runner.ModelRunner``, or a stand-in in tests.

    ``depth``: plans that it takes before the first one's output is read (see ``protocol.Executor``).
    ``step_seconds``: on ranks above 0, the last plan's time in the model; on CUDA, of the last one known to have ended.
    """

    depth: int
    step_seconds: float

    def load(self) -> CacheCapacity: ...

    def allocate(self, capacity: CacheCapacity) -> None: ...

    def prepare(self, params: SamplingParams) -> Future[Any]: ...

    def release(self, slot: int) -> None: ...

    def execute(self, plan: StepPlan) -> StepOutput | Deferred | None: ...

    def close(self) -> None: ...


RunnerFactory = Callable[[EngineConfig, TpGroup, torch.device], Runner]


def resolve_factory(factory: str | RunnerFactory) -> RunnerFactory:
    """A factory given as "package.module:name", or as itself."""
    if not isinstance(factory, str):
        return factory
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing a rank process is told. ``runner_factory`` is pickled."""

    rank: int
    driver_pid: int
    num_threads: int
    group: GroupSpec
    runner_factory: bytes


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """Whole messages over a stream socket, one reader and one writer at a time.

    A receive that times out in the middle of a message loses nothing: the next one goes on from there.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, payload: bytes) -> None:
        """Send one message, waiting for room as long as it takes.

        Raises:
            ChannelClosed: the other end is gone.
        """
        left = memoryview(_HEADER.pack(len(payload)) + payload)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._writable.poll()
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next message, or None when it is not complete after ``timeout`` seconds (None: wait for ever).

        Raises:
            ChannelClosed: the other end is gone, and every message it sent has been received.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._take()
            if message is not None:
                return message
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._readable.poll(None if left is None else left * 1000)
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("end of stream")
            self._received += data

    def _take(self) -> bytes | None:
        received = self._received
        if len(received) < _HEADER.size:
            return None
        end = _HEADER.size + _HEADER.unpack_from(received)[0]
        if len(received) < end:
            return None
        message = bytes(received[_HEADER.size : end])
        del received[:end]
        return message

    def close(self) -> None:
        self._socket.close()


def describe_failure(error: BaseException, rank: int, doing: str) -> tuple[str, str]:
    """(text, class name in ``bireme.errors``). Bireme's own errors keep their text; others get rank and activity."""
    kind = type(error).__name__
    if isinstance(error, BiremeError) and getattr(errors, kind, None) is type(error):
        return str(error), kind
    return f"rank {rank} failed while {doing}: {kind}: {error}", "ExecutorError"


def leave_with_driver(driver_pid: int) -> None:
    """End this process when the driver dies, whatever it is doing then (a collective, a kernel, a read)."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
        if os.getppid() != driver_pid:
            os._exit(EXIT_ABORTED)
        return

    def watch() -> None:
        while os.getppid() == driver_pid:
            time.sleep(0.5)
        os._exit(EXIT_ABORTED)

    threading.Thread(target=watch, name="bireme-driver-watch", daemon=True).start()


def main() -> None:
    """Entry of a rank process: ``argv`` is [program, rank (for people who read ps), socket descriptor]."""
    channel = Channel(socket.socket(fileno=int(sys.argv[2])))
    try:
        first = channel.receive()
    except ChannelClosed:
        sys.exit(EXIT_ABORTED)
    launch = msgspec.msgpack.decode(first or b"", type=Launch)
    leave_with_driver(launch.driver_pid)
    torch.set_num_threads(launch.num_threads)
    code = run_rank(channel, launch)
    if code:
        # A failed rank leaves at once: tearing down a broken communicator or device can hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_rank(channel: Channel, launch: Launch) -> int:
    """Serve the driver on ``channel`` until it says stop or anything goes wrong. Returns the exit code."""
    rank = launch.rank
    decoder = msgspec.msgpack.Decoder(ToRank)
    send = _sender(channel)
    doing = "joining the group"
    group: TpGroup | None = None
    runner: Runner | None = None
    next_seq = 0
    try:
        factory = resolve_factory(pickle.loads(launch.runner_factory))
        channel.send(HELLO)
        while True:
            message = decoder.decode(channel.receive() or b"")
            match message:
                case Execute(plan=plan):
                    doing = f"running plan {plan.seq}"
                    if runner is None or plan.seq != next_seq:
                        raise ExecutorError(f"rank {rank} was sent plan {plan.seq} where plan {next_seq} was due")
                    runner.execute(plan)
                    next_seq += 1
                    send(Done(rank, plan.seq, runner.step_seconds))
                case Start(config=config):
                    device = rank_device(config, rank)
                    group = join_group(launch.group, rank, device)
                    doing = "loading"
                    runner = factory(config, group, device)
                    send(Loaded(rank, runner.load()))
                case Allocate(capacity=capacity):
                    doing = "allocating the caches"
                    if runner is None:
                        raise ExecutorError(f"rank {rank} was told to allocate before it was told to start")
                    runner.allocate(capacity)
                    gc.collect()
                    gc.freeze()  # see engine_process.run_engine
                    send(Ready(rank))
                case Stop():
                    break
        if runner is not None:
            runner.close()
        if group is not None:
            group.close()
        return 0
    except (ChannelClosed, GroupAborted):
        return EXIT_ABORTED
    except BaseException as error:
        text, kind = describe_failure(error, rank, doing)
        if not isinstance(error, BiremeError):
            logger.exception("rank %d failed while %s", rank, doing)
        try:
            # Before the abort, so that the driver finds this cause before its consequences.
            send(Failed(rank, text, kind))
        except ChannelClosed:
            return EXIT_ABORTED
        if group is not None:
            group.abort()
        return EXIT_FAILED


def _sender(channel: Channel) -> Callable[[FromRank], None]:
    encoder = msgspec.msgpack.Encoder()

    def send(message: Any) -> None:
        channel.send(encoder.encode(message))

    return send
