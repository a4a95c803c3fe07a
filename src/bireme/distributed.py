"""Tensor-parallel groups: what ranks say to each other while one plan runs, and over which wire.

Four kinds with one interface: ``NullGroup`` (one rank), ``SharedMemoryGroup`` (CPU ranks of one host), ``TorchGroup``
(gloo, nccl) and ``StagedGroup`` (CUDA ranks that share a GPU: tensors pass through host memory). Collectives run in the
same order on every rank. Sums are formed in rank order (with nccl: once per element), so all ranks hold the same bits.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import platform
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from bireme.config import EngineConfig
from bireme.errors import ConfigError, ExecutorError

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""Bytes that a rank puts into shared memory at a time; larger tensors go in several rounds."""

_LINE_WORDS = 16
"""8-byte words between two flags: 128 bytes, because adjacent cache lines are fetched in pairs."""

_SPINS = 100
"""Reads of a flag (about 7 µs) before the core is offered to others."""

_YIELD_SECONDS = 0.0001
_SHORT_SLEEP_SECONDS = 0.00001
_LONG_WAIT_SECONDS = 0.1
_LONG_SLEEP_SECONDS = 0.001
"""A wait yields for so long, then sleeps, then sleeps longer. Where cores are scarce this is worth a factor: a rank
that only spins costs its peers whole time slices, and Linux charges a slice to whoever yields while others wait.
"""

_TORCH_TIMEOUT = timedelta(minutes=30)
"""gloo's and nccl's own limit. The executor's step timeout is the one that counts and comes first."""


class GroupAborted(ExecutorError):
    """A collective cannot finish because another rank failed or left: a consequence, never the first cause."""


class TpGroup(ABC):
    """The ranks that hold one model's shards. Every rank calls the same collectives in the same order.

    Raises (all collectives):
        GroupAborted: another rank failed or left; no rank may use the group afterwards.
    """

    rank: int
    size: int
    can_be_captured: bool = False
    """Whether collectives can be recorded in a CUDA graph: they then neither wait for the host nor pass through it."""

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x`` (any shape). Contiguous input is overwritten with the result and returned.

        float16 and bfloat16 are summed in float32 and rounded once (nccl rounds as it sums).
        """

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] of every rank → [..., size * n], joined along the last dimension in rank order."""

    @abstractmethod
    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """``x`` of rank ``src`` on every rank. Contiguous input is overwritten with the result and returned."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has called it."""

    def abort(self) -> None:
        """Make every rank that waits in a collective, now or later, raise GroupAborted. Safe from any thread."""
        return None

    def close(self) -> None:
        """Free what this rank holds. Idempotent."""
        return None


class NullGroup(TpGroup):
    """The group of a single rank: every collective is the identity."""

    can_be_captured = True

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return x

    def barrier(self) -> None:
        return None


def sum_in_rank_order(parts: Sequence[Tensor] | Tensor, out: Tensor) -> None:
    """Write ``parts[0] + parts[1] + …``, added from left to right, into ``out`` (one shape and dtype for all)."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
    elif out.dtype in (torch.float16, torch.bfloat16):
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
    else:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)


def create_shared_memory(num_bytes: int) -> int:
    """File descriptor of ``num_bytes`` of zeroed memory without a name: nothing is left when its last holder dies."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("bireme", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


class SharedMemoryGroup(TpGroup):
    """CPU ranks of one host over one shared mapping: a copy in, one flag each, a sum out.

    Layout: flag words (poison, then one round number per rank, each on its own pair of cache lines), then two sets of
    one buffer per rank. Round n writes set n % 2, raises the own flag to n and waits for all flags ≥ n. A rank that
    writes round n + 2 has seen every flag at n + 1, so every rank has finished reading round n: two sets make one wait
    per round enough. The data must be visible before the flag: x86-64 orders stores, and loads, without a fence.

    Args:
        fd: from ``create_shared_memory(SharedMemoryGroup.segment_bytes(size))``; the caller closes it afterwards.
    """

    def __init__(self, fd: int, rank: int, size: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.rank = rank
        self.size = size
        self._chunk_bytes = chunk_bytes
        header = self._header_bytes(size)
        memory = mmap.mmap(fd, self.segment_bytes(size, chunk_bytes))
        self._words = memoryview(memory).cast("Q")
        self._own_word = _LINE_WORDS * (1 + rank)
        self._peer_words = [_LINE_WORDS * (1 + r) for r in range(size) if r != rank]
        self._round = 0
        # Inference tensors cannot be written outside inference mode; ordinary ones can be written in both.
        with torch.inference_mode(False):
            self._data = torch.frombuffer(memory, dtype=torch.uint8)[header:].view(2, size, chunk_bytes)
        self._views: dict[tuple[torch.dtype, int], tuple[list[Tensor], list[Tensor]]] = {}

    @staticmethod
    def _header_bytes(size: int) -> int:
        return -(-8 * _LINE_WORDS * (1 + size) // 4096) * 4096

    @staticmethod
    def segment_bytes(size: int, chunk_bytes: int = CHUNK_BYTES) -> int:
        """Bytes of shared memory that ``size`` ranks need; ``chunk_bytes`` is a multiple of 128."""
        return SharedMemoryGroup._header_bytes(size) + 2 * size * chunk_bytes

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        flat = x.view(-1)
        limit = self._chunk_bytes // x.element_size()
        chunks = (flat,) if 0 < flat.numel() <= limit else flat.split(limit) if flat.numel() else ()
        for chunk in chunks:
            parts = self._parts(chunk.dtype, chunk.numel())
            parts[self.rank].copy_(chunk)
            self._meet()
            sum_in_rank_order(parts, chunk)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        out = x.new_empty((*x.shape[:-1], self.size * n))
        if x.numel() == 0:
            return out
        rows = x.reshape(-1, n)
        joined = out.view(-1, self.size, n)
        limit = self._chunk_bytes // x.element_size()
        height, width = max(1, limit // n), min(n, limit)
        for top in range(0, rows.shape[0], height):
            for left in range(0, n, width):
                block = rows[top : top + height, left : left + width]
                parts = self._parts(block.dtype, block.numel())
                parts[self.rank].view(block.shape).copy_(block)
                self._meet()
                target = joined[top : top + height, :, left : left + width]
                for rank, part in enumerate(parts):
                    target[:, rank].copy_(part.view(block.shape))
        return out

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        x = x.contiguous()
        if x.numel() == 0:
            return x
        for chunk in x.view(-1).split(self._chunk_bytes // x.element_size()):
            part = self._parts(chunk.dtype, chunk.numel())[src]
            if self.rank == src:
                part.copy_(chunk)
            self._meet()
            if self.rank != src:
                chunk.copy_(part)
        return x

    def barrier(self) -> None:
        self._round += 1
        self._meet()

    def abort(self) -> None:
        # Not through _words[…] alone: close() may have run in another thread.
        with contextlib.suppress(ValueError, IndexError):
            self._words[0] = 1

    def close(self) -> None:
        self._views.clear()
        self._data = torch.empty(0)
        self._words.release()

    def _parts(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """Open the next round: its buffers, one [numel] view per rank."""
        self._round += 1
        views = self._views.get((dtype, numel))
        if views is None:
            if len(self._views) >= 1024:
                self._views.clear()
            num_bytes = numel * dtype.itemsize
            with torch.inference_mode(False):
                first, second = ([self._data[s, r, :num_bytes].view(dtype) for r in range(self.size)] for s in range(2))
            views = self._views[dtype, numel] = (first, second)
        return views[self._round & 1]

    def _meet(self) -> None:
        """Raise the own flag to this round and wait for all the others."""
        words = self._words
        number = self._round
        words[self._own_word] = number
        for index in self._peer_words:
            if words[index] < number:
                self._wait(index, number)

    def _wait(self, index: int, number: int) -> None:
        words = self._words
        for _ in range(_SPINS):
            if words[index] >= number:
                return
        started = time.monotonic()
        while words[index] < number:
            if words[0]:
                raise GroupAborted(f"rank {self.rank} left a collective: another rank failed")
            waited = time.monotonic() - started
            if waited < _YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_SHORT_SLEEP_SECONDS if waited < _LONG_WAIT_SECONDS else _LONG_SLEEP_SECONDS)


class TorchGroup(TpGroup):
    """Ranks over one of torch's process groups: gloo for CPU tensors, nccl for one GPU per rank.

    The process group is this object's own: torch's global default group is neither used nor changed.

    Args:
        store: rendezvous that all ranks reach (see ``create_rendezvous``).
        device: this rank's; nccl tensors must live there.
    """

    def __init__(self, backend: str, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.can_be_captured = backend == "nccl"
        self._backend = backend
        self._device = device
        store = dist.PrefixStore(f"bireme/{backend}", store)
        self._group: Any
        if backend == "gloo":
            # Named by address: without it gloo resolves the host name, which need not lead to an interface that works.
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = _TORCH_TIMEOUT
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        else:
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TORCH_TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            # nccl connects at the first collective of a size; let it be this one and not one of a plan.
            self.all_reduce(torch.zeros(1, device=device))

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.numel() == 0:
            return x
        if self._backend == "nccl":
            self._wait(self._group.allreduce, [x])
        elif self.size == 2 and x.dtype not in (torch.float16, torch.bfloat16):
            # Two summands: any order gives the same bits, and gloo's own sum costs a third of a gather.
            self._wait(self._group.allreduce, [x])
        else:
            sum_in_rank_order(self._gather(x), x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.size * x.shape[-1]))
        return torch.cat(list(self._gather(x.contiguous())), dim=-1)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        x = x.contiguous()
        if x.numel():
            options = dist.BroadcastOptions()
            options.rootRank = src
            self._wait(self._group.broadcast, [x.view(-1).view(torch.uint8)], options)
        return x

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self._device if self._backend == "nccl" else "cpu"))
        if self._backend == "nccl":
            torch.cuda.synchronize(self._device)

    def abort(self) -> None:
        # Only nccl waits on for ever: gloo's ranks see the connection of a rank that left close.
        if self._backend == "nccl":
            with contextlib.suppress(Exception):
                self._group.abort()

    def close(self) -> None:
        self._group = None

    def _gather(self, x: Tensor) -> Tensor:
        """Contiguous ``x`` → [size, *x.shape], moved as bytes so that every dtype works."""
        out = x.new_empty((self.size, *x.shape))
        self._wait(self._group._allgather_base, out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8))
        return out

    def _wait(self, collective: Any, *args: Any) -> None:
        try:
            collective(*args).wait()
        except RuntimeError as error:
            raise GroupAborted(f"rank {self.rank} left a {self._backend} collective: {error}") from error


class StagedGroup(TpGroup):
    """CUDA tensors over a group of host tensors: for ranks that share one GPU, where nccl refuses to run.

    Each collective waits for the device, passes through pinned memory and copies back.
    """

    def __init__(self, host: TpGroup) -> None:
        self.rank = host.rank
        self.size = host.size
        self._host = host

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(self._host.all_reduce(self._to_host(x)), non_blocking=True)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._host.all_gather(self._to_host(x)).to(x.device)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return x.copy_(self._host.broadcast(self._to_host(x), src), non_blocking=True)

    def barrier(self) -> None:
        torch.cuda.synchronize()
        self._host.barrier()

    def abort(self) -> None:
        self._host.abort()

    def close(self) -> None:
        self._host.close()

    @staticmethod
    def _to_host(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


def choose_backend(config: EngineConfig) -> str:
    """The wire for ``config``: "none" (one rank), "shm", "gloo" or "nccl".

    "auto" takes nccl when every rank has a GPU of its own, otherwise shared memory where its memory order is guaranteed
    (x86-64), otherwise gloo.

    Raises:
        ConfigError: a backend that is unknown or cannot run here, with the reason.
    """
    wanted, size = config.parallel.backend, config.parallel.tp_size
    if wanted not in ("auto", "shm", "gloo", "nccl"):
        raise ConfigError(f"--distributed-backend is {wanted!r}: it must be one of 'auto', 'shm', 'gloo', 'nccl'")
    if size == 1:
        return "none"
    device = torch.device(config.device)
    num_gpus = torch.cuda.device_count() if device.type == "cuda" and device.index is None else 0
    machine = platform.machine().lower()
    is_ordered = machine in ("x86_64", "amd64")
    if wanted == "nccl" and num_gpus < size:
        raise ConfigError(
            f"--distributed-backend is 'nccl' for {size} ranks (--tensor-parallel-size) on --device {config.device!r}: "
            f"it needs {size} GPUs, one for each rank, and has {num_gpus}"
        )
    if wanted == "shm" and not is_ordered:
        raise ConfigError(
            f"--distributed-backend is 'shm' on a {machine or 'unknown'} machine: shared memory relies on x86-64's "
            "store order; take 'gloo'"
        )
    if wanted != "auto":
        return wanted
    if num_gpus >= size:
        return "nccl"
    if is_ordered:
        return "shm"
    logger.warning(
        "ranks talk over gloo: shared memory relies on x86-64's store order, and this machine is %s",
        machine or "unknown",
    )
    return "gloo"


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Where ``rank`` lives: the CPU; the named GPU ("cuda:1"); or, for "cuda", the GPUs in turn."""
    device = torch.device(config.device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", rank % max(1, torch.cuda.device_count()))


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank process needs to join: backend and size, then the memory's descriptor (shm) or the store's port."""

    backend: str
    size: int
    fd: int = -1
    port: int = 0


class Rendezvous:
    """The driver's half of forming a group: it owns the unnamed memory or the store until every rank has joined.

    Attributes:
        spec: to be sent to the other ranks, which call ``join_group``; pass ``spec.fd`` on to them when it is ≥ 0.
    """

    def __init__(self, backend: str, size: int) -> None:
        self._store: Any = None
        if backend == "shm":
            self.spec = GroupSpec(
                backend=backend, size=size, fd=create_shared_memory(SharedMemoryGroup.segment_bytes(size))
            )
        elif backend in ("gloo", "nccl"):
            # The system picks the port, and only this host can reach it.
            listener = socket.create_server(("127.0.0.1", 0))
            self.spec = GroupSpec(backend=backend, size=size, port=listener.getsockname()[1])
            self._store = _open_store(self.spec, listener)
        else:
            self.spec = GroupSpec(backend=backend, size=size)

    def join(self, device: torch.device) -> TpGroup:
        """Rank 0's group."""
        return _join(self.spec, 0, device, self._store)

    def close(self) -> None:
        """Let go of the descriptor (mappings stay) and the store. Idempotent."""
        self._store = None
        if self.spec.fd >= 0:
            os.close(self.spec.fd)
            self.spec = msgspec.structs.replace(self.spec, fd=-1)


def join_group(spec: GroupSpec, rank: int, device: torch.device) -> TpGroup:
    """The group of a rank other than 0, in a process that inherited ``spec.fd`` (which is closed here)."""
    try:
        return _join(spec, rank, device, _open_store(spec, None) if spec.port else None)
    finally:
        if spec.fd >= 0:
            os.close(spec.fd)


def _join(spec: GroupSpec, rank: int, device: torch.device, store: Any) -> TpGroup:
    if spec.backend == "none":
        return NullGroup()
    if spec.backend == "nccl":
        return TorchGroup("nccl", store, rank, spec.size, device)
    host: TpGroup
    if spec.backend == "shm":
        host = SharedMemoryGroup(spec.fd, rank, spec.size)
    else:
        host = TorchGroup("gloo", store, rank, spec.size, torch.device("cpu"))
    return StagedGroup(host) if device.type == "cuda" else host


def _open_store(spec: GroupSpec, listener: socket.socket | None) -> Any:
    return dist.TCPStore(
        "127.0.0.1",
        spec.port,
        spec.size,
        is_master=listener is not None,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
