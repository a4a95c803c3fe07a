"""Causal attention of packed prompt chunks over the paged KV cache.

A program has a tile of one query head's tokens, found on the device from ``cu_seqlens``, and reads K and V where they
lie in their blocks. Softmax, sums and gates are float32; products take operands in the cache's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bireme.kernels.triton.attention_shared import LOG2_E, check_powers, precision_of, soften
from bireme.kernels.triton.launch import next_power_of_two, pdl


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Queries and keys of a tile of prefill attention, and how it is compiled."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


LONG_TILE = PrefillTile(queries=128, keys=64, num_warps=8, num_stages=2)

SHORT_TILE = PrefillTile(queries=64, keys=64, num_warps=4, num_stages=2)

FLOAT32_TILE = PrefillTile(queries=16, keys=16, num_warps=8, num_stages=1)


def prefill_tile(num_tokens: int, dtype: torch.dtype) -> PrefillTile:
    """The tile for a step's prefill tokens: few tokens fill more SMs with smaller ones."""
    if dtype == torch.float32:
        return FLOAT32_TILE
    return LONG_TILE if num_tokens > 512 else SHORT_TILE


def paged_prefill_attention(
    query: Tensor,
    gate: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    row_starts: Tensor,
    seq_lens: list[int],
    starts: list[int],
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed chunks over their own tokens and all history before them, gated. See the reference.

    ``seq_lens`` only bounds the grid, so upper bounds do (graphs); ``starts`` is not needed.

    Raises:
        ValueError: head_dim or the block size is not a power of two of at least 16.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    check_powers(head_dim, block_size)
    if out is None:
        out = torch.empty(num_tokens, num_heads * head_dim, dtype=query.dtype, device=query.device)
    tile = prefill_tile(num_tokens, query.dtype)
    keys = min(tile.keys, block_size)
    num_rows = len(seq_lens)
    # Each row ends in one tile that is not full at most.
    num_tiles = min(
        sum(triton.cdiv(length, tile.queries) for length in seq_lens), num_tokens // tile.queries + num_rows
    )
    _attend_prefill_kernel[(num_heads, num_tiles)](
        query,
        gate,
        k_cache,
        v_cache,
        _rows_of_keys(k_cache, keys),
        _rows_of_keys(v_cache, keys),
        block_tables,
        cu_seqlens,
        row_starts,
        out,
        num_rows,
        query.stride(0),
        gate.stride(0),
        gate.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        block_tables.stride(0),
        out.stride(0),
        LOG2_E * head_dim**-0.5,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        QUERIES=tile.queries,
        KEYS=keys,
        PADDED_ROWS=next_power_of_two(num_rows),
        PRECISION=precision_of(query.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl(query.device),
    )
    return out


def _rows_of_keys(cache: Tensor, keys: int) -> TensorDescriptor:
    """The cache as a matrix with a row a (block, head, offset), fetched ``keys`` rows at a time by the copy engine."""
    rows = cache.view(-1, cache.shape[-1])
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [keys, cache.shape[-1]])


@triton.jit
def _attend_prefill_kernel(
    query,
    gate,
    k_cache,
    v_cache,
    k_rows,
    v_rows,
    block_tables,
    cu_seqlens,
    row_starts,
    out,
    num_rows,
    query_stride,
    gate_stride,
    gate_head_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
    out_stride,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program: QUERIES tokens of one row in one query head. The last tiles, which see most, come first."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    rows = tl.arange(0, PADDED_ROWS)
    row_begins = tl.load(cu_seqlens + rows, rows < num_rows, other=0)
    row_ends = tl.load(cu_seqlens + rows + 1, rows < num_rows, other=0)
    counts = tl.cdiv(row_ends - row_begins, QUERIES)
    upto = tl.cumsum(counts, 0)
    number = tl.sum(counts, 0) - 1 - tl.program_id(1)
    if number < 0:
        return
    row = tl.sum((upto <= number).to(tl.int32), 0)
    first = (number - tl.sum(tl.where(rows == row, upto - counts, 0), 0)) * QUERIES
    row_begin = tl.load(cu_seqlens + row)
    length = tl.load(cu_seqlens + row + 1) - row_begin
    start = tl.load(row_starts + row)

    dim = tl.arange(0, HEAD_DIM)
    place = first + tl.arange(0, QUERIES)
    in_row = place < length
    token = (row_begin + place).to(tl.int64)
    q = tl.load(query + token[:, None] * query_stride + head * HEAD_DIM + dim[None, :], in_row[:, None], other=0.0)
    last_seen = start + place
    context = start + tl.minimum(first + QUERIES, length)
    seen_by_all = (start + first + 1) // KEYS * KEYS
    kv_head = head // GROUP
    table = block_tables + row.to(tl.int64) * table_stride
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
    # Tiles of keys that every query sees.
    block = tl.load(table)
    for first_key in range(0, seen_by_all, KEYS):
        at = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + first_key % BLOCK_SIZE
        block = tl.load(table + tl.minimum(first_key + KEYS, context - 1) // BLOCK_SIZE)
        scores = tl.dot(q, tl.trans(k_rows.load([at, 0])), input_precision=PRECISION)
        p, peak, total, shrink = soften(scores, peak, total, scale)
        acc = tl.dot(p.to(q.dtype), v_rows.load([at, 0]), acc * shrink[:, None], input_precision=PRECISION)
    # Up to the diagonal. What lies from ``context`` on may be NaN.
    key = tl.arange(0, KEYS)
    tile = key[:, None] * HEAD_DIM + dim[None, :]
    for first_key in range(seen_by_all, context, KEYS):
        at = block.to(tl.int64) * cache_block_stride + kv_head * cache_head_stride + first_key % BLOCK_SIZE * HEAD_DIM
        block = tl.load(table + tl.minimum(first_key + KEYS, context - 1) // BLOCK_SIZE)
        owned = (first_key + key < context)[:, None]
        k = tl.load(k_cache + at + tile, owned, other=0.0)
        v = tl.load(v_cache + at + tile, owned, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(first_key + key[None, :] <= last_seen[:, None], scores, float("-inf"))
        p, peak, total, shrink = soften(scores, peak, total, scale)
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    g = tl.load(
        gate + token[:, None] * gate_stride + head * gate_head_stride + dim[None, :], in_row[:, None], other=0.0
    ).to(tl.float32)
    result = acc / (total[:, None] * (1.0 + tl.exp2(-1.4426950408889634 * g)))
    tl.store(
        out + token[:, None] * out_stride + head * HEAD_DIM + dim[None, :],
        result.to(out.dtype.element_ty),
        in_row[:, None],
    )
