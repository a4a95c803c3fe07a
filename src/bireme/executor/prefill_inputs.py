"""The prefill rows of a plan as device tensors: laid out on the host with numpy, sent in one copy.

One buffer holds all of a step's integers, so that a step costs one transfer, and so that a graph can own a buffer of
fixed sizes and be given other rows by overwriting it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bireme.config import CHUNK_ALIGNMENT
from bireme.executor.slot_tables import SlotTables
from bireme.layers.batch import PrefillBatch
from bireme.types import PrefillRow


@dataclass(frozen=True, slots=True)
class PrefillSizes:
    """How much room a buffer has.

    Attributes:
        num_tokens: packed prompt tokens.
        num_rows: prefill rows, the one of padding tokens included.
        num_chunks: pieces of up to 64 tokens.
        num_sampled: hidden rows that the lm_head reads.
    """

    num_tokens: int
    num_rows: int
    num_chunks: int
    num_sampled: int

    @classmethod
    def exact(cls, rows: list[PrefillRow], num_decode: int) -> PrefillSizes:
        """Room for these rows and no padding."""
        return cls(
            num_tokens=sum(row.length for row in rows),
            num_rows=len(rows),
            num_chunks=sum(_num_chunks(row.length) for row in rows),
            num_sampled=num_decode + sum(row.is_last for row in rows),
        )

    @classmethod
    def bounded(cls, num_tokens: int, num_rows: int, num_decode: int) -> PrefillSizes:
        """Room for any ``num_rows`` prefill rows of ``num_tokens`` tokens together, and the tokens that pad them."""
        return cls(
            num_tokens=num_tokens,
            num_rows=num_rows + 1,
            num_chunks=num_tokens // CHUNK_ALIGNMENT + num_rows + 1,
            num_sampled=num_decode + num_rows,
        )

    @property
    def fields(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Every array in the buffer, 8-byte integers first: name → (dtype, shape)."""
        return {
            "token_ids": ("int64", (self.num_tokens,)),
            "positions": ("int64", (self.num_tokens,)),
            "kv_indices": ("int64", (self.num_tokens,)),
            "slots": ("int64", (self.num_rows,)),
            "final_slots": ("int64", (self.num_rows,)),
            "sampled": ("int64", (self.num_sampled,)),
            "cu_seqlens": ("int32", (self.num_rows + 1,)),
            "row_starts": ("int32", (self.num_rows,)),
            "chunks": ("int32", (self.num_chunks, 4)),
        }

    @property
    def num_bytes(self) -> int:
        """Of the buffer; a multiple of 8."""
        used = sum(_field_bytes(dtype, shape) for dtype, shape in self.fields.values())
        return -(-used // 8) * 8


@dataclass(slots=True)
class PrefillInputs:
    """Views into a step's buffer.

    Attributes:
        token_ids, positions, kv_indices: [T] int64 of the packed tokens.
        slots: [P] int64 of the rows.
        final_slots: [P] int64, the slots of the rows that sample, then zeros.
        sampled: [R] int64, which of the step's hidden rows the lm_head reads: decode rows, then the last tokens of the
            rows that sample, then (padding) row 0.
        cu_seqlens, row_starts, chunks: see ``PrefillBatch``.
    """

    token_ids: Tensor
    positions: Tensor
    kv_indices: Tensor
    slots: Tensor
    final_slots: Tensor
    sampled: Tensor
    cu_seqlens: Tensor
    row_starts: Tensor
    chunks: Tensor

    @classmethod
    def of(cls, buffer: Tensor, sizes: PrefillSizes) -> PrefillInputs:
        """The arrays inside ``buffer`` ([sizes.num_bytes] uint8)."""
        views: dict[str, Tensor] = {}
        offset = 0
        for name, (dtype, shape) in sizes.fields.items():
            end = offset + _field_bytes(dtype, shape)
            views[name] = buffer[offset:end].view(getattr(torch, dtype)).view(shape)
            offset = end
        return cls(**views)

    def batch(self, block_tables: Tensor, seq_lens: list[int], starts: list[int]) -> PrefillBatch:
        """What the layers receive."""
        return PrefillBatch(
            slots=self.slots,
            block_tables=block_tables,
            cu_seqlens=self.cu_seqlens,
            row_starts=self.row_starts,
            chunks=self.chunks,
            seq_lens=seq_lens,
            starts=starts,
        )


def pack(
    rows: list[PrefillRow], tables: SlotTables, *, num_decode: int, first_token: int, sizes: PrefillSizes
) -> np.ndarray:
    """Write the rows into a new host buffer laid out by ``sizes``.

    Tokens beyond the rows' own become a last row on slot 0, whose K and V go to block 0.

    Args:
        num_decode: decode rows of the plan.
        first_token: where the packed tokens begin among the step's rows: ``num_decode``, or more where decode rows are
            padded.

    Returns:
        [sizes.num_bytes] uint8.
    """
    buffer = np.zeros(sizes.num_bytes, dtype=np.uint8)
    arrays: dict[str, np.ndarray] = {}
    offset = 0
    for name, (dtype, shape) in sizes.fields.items():
        end = offset + _field_bytes(dtype, shape)
        arrays[name] = buffer[offset:end].view(dtype).reshape(shape)
        offset = end

    lengths = [row.length for row in rows]
    num_padding = sizes.num_tokens - sum(lengths)
    everything = rows if not num_padding else [*rows, PrefillRow(0, 0, num_padding, False)]
    cu_seqlens = arrays["cu_seqlens"]
    chunks = arrays["chunks"]
    begin = num_chunks = 0
    for index, row in enumerate(everything):
        end = begin + row.length
        packed = slice(begin, end)
        positions = np.arange(row.start, row.start + row.length)
        arrays["positions"][packed] = positions
        blocks, offsets = np.divmod(positions, tables.block_size)
        if index < len(rows):
            arrays["token_ids"][packed] = tables.prompts[row.slot][row.start : row.start + row.length]
            arrays["kv_indices"][packed] = tables.host_block_table[row.slot, blocks] * tables.block_size + offsets
        else:
            arrays["kv_indices"][packed] = offsets
        arrays["slots"][index] = row.slot
        arrays["row_starts"][index] = row.start
        cu_seqlens[index + 1] = end
        pieces = chunks[num_chunks : num_chunks + _num_chunks(row.length)]
        firsts = np.arange(len(pieces)) * CHUNK_ALIGNMENT
        pieces[:, 0] = index
        pieces[:, 1] = begin + firsts
        pieces[:, 2] = np.minimum(row.length - firsts, CHUNK_ALIGNMENT)
        pieces[:, 3] = row.start + firsts
        begin, num_chunks = end, num_chunks + len(pieces)
    cu_seqlens[len(everything) + 1 :] = begin

    finals = [index for index, row in enumerate(rows) if row.is_last]
    arrays["final_slots"][: len(finals)] = [rows[index].slot for index in finals]
    sampled = arrays["sampled"]
    sampled[:num_decode] = np.arange(num_decode)
    sampled[num_decode : num_decode + len(finals)] = [first_token + cu_seqlens[index + 1] - 1 for index in finals]
    return buffer


def _num_chunks(num_tokens: int) -> int:
    return -(-num_tokens // CHUNK_ALIGNMENT)


def _field_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * int(np.prod(shape))
