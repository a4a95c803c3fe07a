"""CUDA graphs of whole steps: a step of few tokens is one launch instead of hundreds.

A graph is captured at start for each of a set of shapes: so many decode rows, so many prefill tokens. A step runs in
the smallest shape that holds it. Rows that are left over are real rows on slot 0 and block 0, so that no kernel needs
to know about them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.executor.prefill_inputs import PrefillInputs, PrefillSizes, pack
from bireme.executor.slot_tables import SlotTables
from bireme.sampling.params import to_device
from bireme.types import StepPlan

DECODE_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Decode rows of the graphs without prefill; the largest also bounds what runs in a graph at all."""

PREFILL_TOKENS = (16, 32, 64, 128, 256, 512)
"""Prompt tokens of the graphs with prefill. Longer chunks keep the device busy for longer than their launches take."""

MIXED_DECODE_ROWS = (0, 16, 64)
"""Decode rows of the graphs with prefill."""

MAX_PREFILL_ROWS = 8
"""Prefill rows that a graph takes."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Rows that a graph runs: ``num_decode`` decode rows and ``num_tokens`` prefill tokens."""

    num_decode: int
    num_tokens: int


def shapes_for(max_decode_rows: int, max_prefill_tokens: int) -> list[Shape]:
    """The shapes to capture, the largest first, so that later ones find their memory in the pool.

    Args:
        max_decode_rows: rows that a step can have.
        max_prefill_tokens: tokens that a chunk can have.
    """
    decode = [rows for rows in DECODE_ROWS if rows < max_decode_rows]
    decode += [rows for rows in DECODE_ROWS if rows >= max_decode_rows][:1]
    tokens = [count for count in PREFILL_TOKENS if count <= max_prefill_tokens]
    mixed = [rows for rows in MIXED_DECODE_ROWS if rows <= decode[-1]]
    shapes = [Shape(rows, 0) for rows in decode] + [Shape(rows, count) for count in tokens for rows in mixed]
    return sorted(shapes, key=lambda shape: -(shape.num_decode + shape.num_tokens))


def smallest_shape(shapes: list[Shape], num_decode: int, num_tokens: int, num_prefill_rows: int) -> Shape | None:
    """The cheapest of ``shapes`` that holds a step, or None: it then runs without a graph."""
    if num_prefill_rows > MAX_PREFILL_ROWS:
        return None
    fitting = [
        shape
        for shape in shapes
        if shape.num_decode >= num_decode
        and shape.num_tokens >= num_tokens
        and (shape.num_tokens > 0) == (num_tokens > 0)
    ]
    return min(fitting, key=lambda shape: shape.num_decode + shape.num_tokens, default=None)


@dataclass(slots=True)
class Forwarded:
    """What a forward leaves for sampling. Tensors of a graph are overwritten by its next replay.

    Attributes:
        hidden: [N, H], all rows of the step after the final norm.
        logits: [R, V] float32 of the rows that sample, decode rows first; None on ranks other than 0, or without rows.
        next_positions: [D] int64, where each decode row's new token goes.
        output_positions: [D] int64, tokens that each decode row's request has put out so far.
        final_slots: slots of the prefill rows that sample come first in it; None without prefill rows.
    """

    hidden: Tensor
    logits: Tensor | None
    next_positions: Tensor
    output_positions: Tensor
    final_slots: Tensor | None

    def borrowed(self) -> Forwarded:
        """The same memory without owning it. The graphs share one pool, and only the last replay's result is ever
        read, so that each may overwrite the others': 512 rows of logits alone are half a gigabyte."""
        return Forwarded(
            hidden=borrow(self.hidden),
            logits=None if self.logits is None else borrow(self.logits),
            next_positions=borrow(self.next_positions),
            output_positions=borrow(self.output_positions),
            final_slots=self.final_slots,
        )


class _DeviceMemory:
    """An address that torch takes for somebody else's memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def borrow(tensor: Tensor) -> Tensor:
    """A tensor over the memory of a contiguous CUDA tensor, which does not keep that memory allocated."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return torch.empty_like(tensor)
    flat = torch.as_tensor(_DeviceMemory(tensor.data_ptr(), num_bytes), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)


Forward = Callable[[Tensor, PrefillInputs | None, int, int], Forwarded]
"""(slots of the decode rows [D], prefill inputs, bound of a chunk's tokens, bound of a context) → result."""


Step = Callable[[], Forwarded]

Recorder = Callable[[Step], Step]
"""A step that runs on fixed buffers → what repeats it (its result is valid until the next repetition of any)."""


def cuda_recorder() -> Recorder:
    """Records into CUDA graphs of one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step) -> Step:
        step()  # compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = step()
        result = result.borrowed()

        def replay() -> Forwarded:
            graph.replay()
            return result

        return replay

    return record


class StepGraphs:
    """Records a step of each shape, and repeats the one that holds a plan.

    Args:
        forward: the step without its sampling, as a function of device tensors only.
        tables: the rank's slot tables.
        shapes: from ``shapes_for``.
    """

    def __init__(self, forward: Forward, tables: SlotTables, shapes: list[Shape]) -> None:
        self._forward = forward
        self._tables = tables
        self._shapes = shapes
        device = tables.device
        self._slots = torch.zeros(max(shape.num_decode for shape in shapes), dtype=torch.int64, device=device)
        sizes = [_sizes(shape) for shape in shapes if shape.num_tokens]
        num_bytes = max((size.num_bytes for size in sizes), default=0)
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._steps: dict[Shape, Step] = {}
        self._rows: tuple[list[int], int] = ([], 0)

    def capture(self, record: Recorder, progress: Callable[[int, int], None]) -> None:
        """Record every shape. All ranks do it in the same order."""
        for number, shape in enumerate(self._shapes):
            self._steps[shape] = record(functools.partial(self._run, shape))
            progress(number + 1, len(self._shapes))

    def find(self, plan: StepPlan) -> Shape | None:
        """The shape that ``plan`` runs in, or None."""
        num_tokens = sum(row.length for row in plan.prefill_rows)
        return smallest_shape(self._shapes, len(plan.decode_slots), num_tokens, len(plan.prefill_rows))

    def replay(self, shape: Shape, plan: StepPlan) -> Forwarded:
        """Run ``plan`` in the graph of ``shape``. Nothing here waits for the device."""
        slots = plan.decode_slots
        if shape.num_decode and self._rows != (slots, shape.num_decode):
            padded = slots + [0] * (shape.num_decode - len(slots))
            self._slots[: shape.num_decode].copy_(to_device(padded, torch.int64, self._slots.device))
            self._rows = (list(slots), shape.num_decode)
        if plan.prefill_rows:
            sizes = _sizes(shape)
            packed = pack(
                plan.prefill_rows,
                self._tables,
                num_decode=len(slots),
                first_token=shape.num_decode,
                sizes=sizes,
            )
            self._buffer[: sizes.num_bytes].copy_(to_device(packed, torch.uint8, self._buffer.device))
        return self._steps[shape]()

    def _run(self, shape: Shape) -> Forwarded:
        prefill = None
        if shape.num_tokens:
            sizes = _sizes(shape)
            prefill = PrefillInputs.of(self._buffer[: sizes.num_bytes], sizes)
        return self._forward(self._slots[: shape.num_decode], prefill, shape.num_tokens, self._tables.num_table_tokens)


def _sizes(shape: Shape) -> PrefillSizes:
    return PrefillSizes.bounded(shape.num_tokens, MAX_PREFILL_ROWS, shape.num_decode)
