"""One step's rows as tensors: the only context that layers receive, passed as an argument."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PrefillBatch:
    """The prefill rows of a step, packed one after another behind the decode rows.

    Kernels for CUDA read the tensors only, so that a graph of them serves any rows that fit: a row may then have no
    token, and the tokens that pad the step belong to a last row on slot 0. ``seq_lens`` and ``starts`` are the same
    numbers on the host, for kernels that loop there.

    Attributes:
        slots: [P] int64 state slots.
        block_tables: [P, max_blocks] int32.
        cu_seqlens: [P + 1] int32, offsets of the rows within the packed prefill tokens.
        row_starts: [P] int32, tokens of each row computed before this chunk (0: state starts from zero).
        chunks: [C, 4] int32, the rows cut into pieces of 64 tokens: (row, first packed token, number of tokens, tokens
            of the row before it). An entry without tokens is padding.
        seq_lens: tokens of each row.
        starts: ``row_starts`` on the host.
    """

    slots: Tensor
    block_tables: Tensor
    cu_seqlens: Tensor
    row_starts: Tensor
    chunks: Tensor
    seq_lens: list[int]
    starts: list[int]


@dataclass(slots=True)
class Batch:
    """All rows of a step. Token order: one token per decode row, then the packed prefill tokens; N in all.

    Attributes:
        positions: [N] int64, each token's position in its sequence.
        kv_indices: [N] int64, ``block_id * block_size + offset`` where the token's K and V are written.
        num_decode: D, the number of decode rows.
        decode_slots: [D] int64 state slots.
        decode_block_tables: [D, max_blocks] int32.
        decode_context_lens: [D] int32, tokens attended to, this one included.
        max_decode_context: a host-side bound of ``decode_context_lens`` (0 without decode rows).
        decode_slot_range: (lowest, highest + 1) of ``decode_slots`` when reading every slot in between is cheaper than
            gathering these (up to 1.5 times as many); a kernel may then take a view of the state. Else None.
        decode_in_order: with a range: ``decode_slots`` is exactly that range, ascending.
        prefill: the prefill rows, or None.
    """

    positions: Tensor
    kv_indices: Tensor
    num_decode: int
    decode_slots: Tensor
    decode_block_tables: Tensor
    decode_context_lens: Tensor
    max_decode_context: int
    decode_slot_range: tuple[int, int] | None = None
    decode_in_order: bool = True
    prefill: PrefillBatch | None = None
