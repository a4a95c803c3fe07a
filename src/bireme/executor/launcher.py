"""The driver's side of the ranks: starts them, sends them plans in order, and fails closed when any of them strays."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, NoReturn

import msgspec
import torch

from bireme import errors
from bireme.cache.capacity import smallest
from bireme.config import CacheCapacity, EngineConfig
from bireme.distributed import GroupAborted, NullGroup, Rendezvous, TpGroup, choose_backend, rank_device
from bireme.errors import BiremeError, ExecutorError
from bireme.executor.protocol import Allocate, Done, Execute, Failed, FromRank, Loaded, Ready, Start, Stop, ToRank
from bireme.executor.worker import (
    EXIT_ABORTED,
    HELLO,
    Channel,
    ChannelClosed,
    Deferred,
    Launch,
    Runner,
    RunnerFactory,
    describe_failure,
    resolve_factory,
)
from bireme.types import SamplingParams, StepOutput, StepPlan

logger = logging.getLogger(__name__)

DEFAULT_RUNNER = "bireme.executor.model_runner:ModelRunner"

_SLICE_SECONDS = 0.1
"""How long the driver waits for a rank before it looks again whether the executor has been poisoned."""

_DEVICE_POLL_SECONDS = 20e-6
"""How often a step that runs on several GPUs is looked at."""

_CAUSE_SECONDS = 1.0
"""How long a first cause may take to show (an exit status, a last message) after its consequence was seen."""

_LEAVE_SECONDS = 5.0
"""How long ranks may take to leave when told to, before they are killed."""

_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "from bireme.executor.worker import main; main()"
)
"""A rank process. The driver decides when it leaves: terminals and service managers signal the whole process group."""


def create_executor(
    config: EngineConfig,
    runner_factory: str | RunnerFactory = DEFAULT_RUNNER,
    *,
    start_timeout: float = 3600.0,
    step_timeout: float = 300.0,
) -> LocalExecutor:
    """Start every rank of ``config`` and return once all are ready for plan 0.

    Args:
        runner_factory: builds each rank's runner from (config, group, device): "module:name", or a callable that the
            rank processes can import (not one from ``__main__``).
        start_timeout: seconds until every rank must be ready.
        step_timeout: seconds in which every rank must answer a plan.

    Raises:
        ConfigError, CheckpointError, …: what failed on any rank while it started, with that rank's text.
        ExecutorError: any other failure at start, a rank's death included. Nothing is left running.
    """
    executor = LocalExecutor(config, runner_factory, start_timeout=start_timeout, step_timeout=step_timeout)
    try:
        executor.start()
    except BaseException:
        executor.shutdown()
        raise
    return executor


class RankProcess:
    """One rank other than 0, as the driver sees it. ``failed`` is its own account, once it has given one."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.rank = rank
        self.process = process
        self.channel = channel
        self.failed: Failed | None = None
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        # The monitor reads too, when it looks for the cause of a death.
        self._lock = threading.Lock()

    def receive(self, timeout: float) -> FromRank | None:
        """The next message, or None after ``timeout`` seconds.

        Raises:
            ChannelClosed: the rank is gone.
            msgspec.DecodeError: not a message of the protocol.
        """
        with self._lock:
            payload = self.channel.receive(timeout)
            if payload is None:
                return None
            message = self._decoder.decode(payload)
            if isinstance(message, Failed):
                self.failed = message
            return message

    def receive_hello(self, timeout: float) -> bool:
        """Whether the rank has said that it is up. Raises ChannelClosed; another message is kept for ``failed``."""
        with self._lock:
            payload = self.channel.receive(timeout)
        if payload is None or payload == HELLO:
            return payload is not None
        message = self._decoder.decode(payload)
        if isinstance(message, Failed):
            self.failed = message
        raise ChannelClosed(f"rank {self.rank} did not come up")

    def drain(self) -> None:
        """Read what the rank has sent so far, for its ``failed``."""
        with contextlib.suppress(ChannelClosed):
            while True:
                with contextlib.suppress(msgspec.DecodeError):
                    if self.receive(0.0) is None:
                        return


class LocalExecutor:
    """All ranks on this host: rank 0 in this process, on the calling thread; the others as processes of their own.

    Implements ``protocol.Executor``. A monitor thread starts the processes and watches over them: it notices a rank
    that dies or overruns its time, also while the calling thread is inside a collective, and poisons the executor.
    Poisoned means: collectives raise, rank processes are killed, all methods raise ExecutorError with the first cause.
    """

    capacity: CacheCapacity

    def __init__(
        self,
        config: EngineConfig,
        runner_factory: str | RunnerFactory = DEFAULT_RUNNER,
        *,
        start_timeout: float = 3600.0,
        step_timeout: float = 300.0,
    ) -> None:
        self.depth = 1
        self._config = config
        self._size = config.parallel.tp_size
        self._factory = runner_factory
        self._start_timeout = start_timeout
        self._step_timeout = step_timeout
        self._encoder = msgspec.msgpack.Encoder()
        self._ranks: list[RankProcess] = []
        self._runner: Runner | None = None
        self._group: TpGroup = NullGroup()
        self._rendezvous: Rendezvous | None = None
        self._next_seq = 0
        self._pending: deque[tuple[int, StepOutput | Deferred]] = deque()
        self._doing = "starting"
        self._is_started = False
        self._deadline = math.inf
        self._timeout = start_timeout
        # First cause wins: (text, name of the error's class). Written under the lock, read anywhere.
        self._cause: tuple[str, str] | None = None
        self._cause_lock = threading.RLock()
        self._shutdown_lock = threading.Lock()
        self._is_closing = False
        self._is_shut_down = False
        self._monitor: threading.Thread | None = None
        self._wake_monitor: socket.socket | None = None
        self._threads_before: int | None = None

    # ---- start ----

    def start(self) -> None:
        """Start the ranks, load, agree on the smallest capacity, allocate. Called once, by ``create_executor``."""
        self._set_deadline(self._start_timeout)
        device = rank_device(self._config, 0)
        factory = resolve_factory(self._factory)
        if self._size > 1:
            self._start_ranks()
            assert self._rendezvous is not None
            self._send_all(Start(self._config))
            try:
                self._group = self._rendezvous.join(device)
            except Exception as error:
                self._fail_rank0(error, "joining the group")
            if self._cause is not None:
                # The monitor may have poisoned while there was no group to abort.
                self._group.abort()
            self._rendezvous.close()
        self._doing = "loading"
        try:
            self._runner = factory(self._config, self._group, device)
            capacities = [self._runner.load()]
        except BaseException as error:
            self._fail_rank0(error, "loading")
        for rank in self._ranks:
            message = self._receive(rank)
            if not isinstance(message, Loaded) or message.rank != rank.rank:
                self._fail(f"rank {rank.rank} answered {message!r} where its capacity was due")
            capacities.append(message.capacity)
        self.capacity = smallest(capacities)
        self._doing = "allocating the caches"
        self._send_all(Allocate(self.capacity))
        try:
            self._runner.allocate(self.capacity)
        except BaseException as error:
            self._fail_rank0(error, "allocating the caches")
        for rank in self._ranks:
            message = self._receive(rank)
            if not isinstance(message, Ready) or message.rank != rank.rank:
                self._fail(f"rank {rank.rank} answered {message!r} where it should have been ready")
        self.depth = self._runner.depth
        self._deadline = math.inf
        self._doing = "idle before plan 0"
        self._is_started = True

    def _start_ranks(self) -> None:
        backend = choose_backend(self._config)
        if getattr(self._factory, "__module__", None) == "__main__":
            raise ExecutorError(
                f"cannot start {self._size} ranks: runner_factory {self._factory!r} lives in __main__, which rank "
                "processes cannot import"
            )
        num_threads = threads_per_rank(self._size)
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        self._rendezvous = Rendezvous(backend, self._size)
        self._wake_monitor, wake = socket.socketpair()
        launched = threading.Event()
        self._monitor = threading.Thread(
            target=self._watch, args=(num_threads, launched, wake), name="bireme-rank-monitor", daemon=True
        )
        self._monitor.start()
        launched.wait()
        self._raise_if_poisoned()
        waiting = list(self._ranks)
        while waiting:
            self._raise_if_poisoned()
            try:
                if waiting[0].receive_hello(_SLICE_SECONDS):
                    del waiting[0]
            except (ChannelClosed, msgspec.DecodeError) as error:
                self._fail_by_cause(f"rank {waiting[0].rank} did not come up: {error}")

    def _launch_rank(self, rank: int, num_threads: int) -> RankProcess:
        assert self._rendezvous is not None
        spec = self._rendezvous.spec
        ours, theirs = socket.socketpair()
        with theirs:
            # The child finds bireme and the runner where this process does. -P: not in its working directory, unless
            # this process does too.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, f"rank{rank}", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), spec.fd) if spec.fd >= 0 else (theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(num_threads)},
            )
        channel = Channel(ours)
        launch = Launch(
            rank=rank,
            driver_pid=os.getpid(),
            num_threads=num_threads,
            group=spec,
            runner_factory=pickle.dumps(self._factory),
        )
        with contextlib.suppress(ChannelClosed):
            channel.send(self._encoder.encode(launch))
        return RankProcess(rank, process, channel)

    # ---- requests that need more than a plan: rank 0 samples, so it alone is told ----

    def prepare(self, params: SamplingParams) -> Future[Any]:
        """See ``protocol.Executor.prepare``."""
        if self._runner is None:
            raise ExecutorError("the executor has been shut down")
        return self._runner.prepare(params)

    def release(self, slot: int) -> None:
        """See ``protocol.Executor.release``."""
        if self._runner is not None:
            self._runner.release(slot)

    # ---- steps ----

    def submit(self, plan: StepPlan) -> None:
        """Send ``plan`` to every rank and run it on rank 0, on the calling thread.

        Raises:
            ExecutorError: the plan is out of sequence, ``depth`` plans are outstanding, or a rank failed (poisoned).
        """
        self.check()
        if plan.seq != self._next_seq:
            self._fail(f"rank 0 was given plan {plan.seq} where plan {self._next_seq} was due")
        if len(self._pending) >= self.depth:
            self._fail(
                f"plan {plan.seq} was submitted while {len(self._pending)} were outstanding (depth {self.depth})"
            )
        runner = self._runner
        if runner is None:
            self._fail(f"plan {plan.seq} was submitted to an executor that has not started")
        self._next_seq += 1
        self._doing = f"running plan {plan.seq}"
        if self._ranks:
            self._set_deadline(self._step_timeout)
            self._send_all(Execute(plan))
        try:
            output = runner.execute(plan)
        except BaseException as error:
            self._fail_rank0(error, self._doing)
        if output is None or output.seq != plan.seq:
            self._fail(f"rank 0 answered plan {plan.seq} with {'nothing' if output is None else f'plan {output.seq}'}")
        self._pending.append((plan.seq, output))

    def collect(self) -> StepOutput:
        """The output of the oldest outstanding plan, once every rank has acknowledged it.

        Raises:
            ExecutorError: no plan is outstanding; or a rank is missing, late, or answered wrongly (poisoned).
        """
        self._raise_if_poisoned()
        if not self._pending:
            raise ExecutorError("collect() was called with no plan outstanding")
        seq, pending = self._pending[0]
        output = self._answer(seq, pending)
        rank_seconds = []
        for rank in self._ranks:
            message = self._receive(rank)
            if not isinstance(message, Done) or message.rank != rank.rank or message.seq != seq:
                self._fail(f"rank {rank.rank} answered {_name(message)} where it owed plan {seq}")
            rank_seconds.append(message.seconds)
        output.rank_seconds = rank_seconds
        self._pending.popleft()
        if self._pending:
            self._set_deadline(self._step_timeout)
        else:
            self._deadline = math.inf
        self._doing = f"idle after plan {seq}"
        return output

    def _answer(self, seq: int, pending: StepOutput | Deferred) -> StepOutput:
        """Rank 0's output of plan ``seq``, once its device has it."""
        if isinstance(pending, StepOutput):
            return pending
        self._doing = f"waiting for the device to finish plan {seq}"
        try:
            while self._ranks and not pending.is_ready:
                # A collective whose peer is gone never ends: do not wait inside CUDA.
                self._raise_if_poisoned()
                time.sleep(_DEVICE_POLL_SECONDS)
            return pending.result()
        except ExecutorError:
            raise
        except BaseException as error:
            self._fail_rank0(error, self._doing)

    def check(self) -> None:
        """Raise ExecutorError if the executor is poisoned, a rank is gone, or one speaks without being asked."""
        self._raise_if_poisoned()
        if self._pending:
            return
        for rank in self._ranks:
            try:
                message = rank.receive(0.0)
            except (ChannelClosed, msgspec.DecodeError) as error:
                self._fail_by_cause(f"rank {rank.rank} left: {error}")
            if isinstance(message, Failed):
                self._fail_by_cause(message.error)
            if message is not None:
                self._fail(f"rank {rank.rank} answered {_name(message)} while {self._doing}, when it owed nothing")

    def _receive(self, rank: RankProcess) -> FromRank:
        """The rank's next message. The monitor sees to the deadline."""
        while True:
            self._raise_if_poisoned()
            try:
                message = rank.receive(_SLICE_SECONDS)
            except (ChannelClosed, msgspec.DecodeError) as error:
                self._fail_by_cause(f"rank {rank.rank} left: {error}")
            if isinstance(message, Failed):
                self._fail_by_cause(message.error)
            if message is not None:
                return message

    def _send_all(self, message: ToRank) -> None:
        payload = self._encoder.encode(message)
        for rank in self._ranks:
            try:
                rank.channel.send(payload)
            except ChannelClosed as error:
                self._fail_by_cause(f"rank {rank.rank} left: {error}")

    # ---- failure ----

    def _set_deadline(self, seconds: float) -> None:
        self._timeout = seconds
        self._deadline = time.monotonic() + seconds

    def _error(self) -> BiremeError:
        assert self._cause is not None
        text, kind = self._cause
        return ExecutorError(text) if self._is_started else getattr(errors, kind)(text)

    def _raise_if_poisoned(self) -> None:
        if self._cause is not None:
            raise self._error()
        if self._is_closing:
            raise ExecutorError("the executor has been shut down")

    def _poison(self, text: str, kind: str = "ExecutorError") -> None:
        with self._cause_lock:
            if self._cause is not None:
                return
            self._cause = (text, kind)
            if self._is_started:
                logger.error("the executor is poisoned: %s", text)
            self._group.abort()
            # No rank's state can be trusted any more, and a collective of gloo only ends when its peers are gone.
            for rank in self._ranks:
                rank.process.kill()

    def _poison_by_cause(self, fallback: str) -> None:
        """Poison with what went wrong first: a rank's own report, then a death, then ``fallback``."""
        with self._cause_lock:
            deadline = time.monotonic() + _CAUSE_SECONDS
            while self._cause is None:
                codes = {rank: rank.process.poll() for rank in self._ranks}
                for rank in self._ranks:
                    rank.drain()
                    if rank.failed is not None:
                        return self._poison(self._report(rank.failed), rank.failed.kind)
                for rank, code in codes.items():
                    if code is not None and code != EXIT_ABORTED:
                        return self._poison(f"rank {rank.rank} died ({_exit_text(code)}) while {self._doing}")
                if time.monotonic() > deadline:
                    return self._poison(fallback)
                time.sleep(0.005)

    def _report(self, failed: Failed) -> str:
        is_named = not self._is_started or failed.error.startswith(f"rank {failed.rank} ")
        return failed.error if is_named else f"rank {failed.rank} failed while {self._doing}: {failed.error}"

    def _fail(self, text: str) -> NoReturn:
        self._poison(text)
        raise self._error()

    def _fail_by_cause(self, fallback: str) -> NoReturn:
        self._poison_by_cause(fallback)
        raise self._error()

    def _fail_rank0(self, error: BaseException, doing: str) -> NoReturn:
        """Rank 0's runner raised ``error``: poison with it, or with the failure of another rank that it is due to."""
        if isinstance(error, GroupAborted):
            self._poison_by_cause(f"rank 0 failed while {doing}: {error}")
        else:
            text, kind = describe_failure(error, 0, doing)
            if self._is_started and kind != "ExecutorError":
                text = f"rank 0 failed while {doing}: {text}"
            self._poison(text, kind)
        if not isinstance(error, Exception):
            raise error
        raise self._error() from error

    def _watch(self, num_threads: int, launched: threading.Event, wake: socket.socket) -> None:
        """The monitor thread. It starts the processes because Linux ends them with the thread that did."""
        with wake:
            try:
                for rank in range(1, self._size):
                    self._ranks.append(self._launch_rank(rank, num_threads))
            except Exception as error:
                self._poison(f"cannot start the rank processes: {type(error).__name__}: {error}")
            finally:
                launched.set()
            poller = select.poll()
            for process in self._ranks:
                # No events asked for: poll still reports that the other end is gone, and nothing else.
                poller.register(process.channel, 0)
            poller.register(wake, select.POLLIN)
            while True:
                for fd, _ in poller.poll(500):
                    if fd == wake.fileno():
                        return
                    poller.unregister(fd)
                    if not self._is_closing:
                        self._poison_by_cause(f"a rank left while {self._doing}")
                if time.monotonic() > self._deadline and not self._is_closing:
                    self._poison(self._overrun())

    def _overrun(self) -> str:
        poller = select.poll()
        for rank in self._ranks:
            poller.register(rank.channel, select.POLLIN)
        answered = {fd for fd, _ in poller.poll(0)}
        silent = [rank.rank for rank in self._ranks if rank.channel.fileno() not in answered]
        if not self._pending:
            silent.insert(0, 0)
        return f"no answer from ranks {silent} within {self._timeout:g} s while {self._doing}"

    # ---- end ----

    def shutdown(self) -> None:
        """End every rank, free shared memory, restore torch's threads. Idempotent, bounded in time, never raises."""
        with self._shutdown_lock:
            if self._is_shut_down:
                return
            self._is_closing = True
            for step in (self._dismiss_ranks, self._close_rank0, self._end_ranks, self._end_monitor):
                try:
                    step()
                except Exception:
                    logger.exception("shutting the executor down: %s failed", step.__name__)
            self._is_shut_down = True

    def _dismiss_ranks(self) -> None:
        if self._cause is not None or not self._is_started:
            self._group.abort()
            for rank in self._ranks:
                rank.process.kill()
            return
        payload = self._encoder.encode(Stop())
        for rank in self._ranks:
            with contextlib.suppress(ChannelClosed):
                rank.channel.send(payload)

    def _close_rank0(self) -> None:
        runner, self._runner = self._runner, None
        try:
            if runner is not None:
                runner.close()
        finally:
            self._group.close()
            if self._rendezvous is not None:
                self._rendezvous.close()

    def _end_ranks(self) -> None:
        deadline = time.monotonic() + _LEAVE_SECONDS
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank %d did not leave within %g s and is killed", rank.rank, _LEAVE_SECONDS)
                rank.process.kill()
                rank.process.wait(_LEAVE_SECONDS)

    def _end_monitor(self) -> None:
        # After the ranks: Linux would end them with this thread.
        if self._monitor is not None and self._wake_monitor is not None:
            self._wake_monitor.close()
            self._monitor.join(_LEAVE_SECONDS)
        for rank in self._ranks:
            rank.channel.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)


def threads_per_rank(size: int) -> int:
    """torch threads of each of ``size`` ranks: an equal share of the cores, at least 1, at most OMP_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores // size, int(wanted) if wanted.isdigit() else cores))


def _name(message: FromRank) -> str:
    return f"{type(message).__name__}({message.rank}, {message.seq})" if isinstance(message, Done) else repr(message)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code}, {signal.Signals(-code).name}"
    return f"signal {-code}"
