"""One query token a row against its paged K and V, split over the context (flash-decoding).

A fixed number of programs, however many tokens the block tables could address, share the spans of all rows and KV
heads, found on the device from ``context_lens``; a small second kernel merges them. Where a span begins depends on its
row's context alone, so a row's result does not depend on its neighbours. No host value is read that a replayed CUDA
graph could have wrong. Softmax, sums and gates are float32; products take operands in the cache's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.attention_shared import LOG2_E, check_powers, precision_of, soften
from bireme.kernels.triton.launch import next_power_of_two, num_sms, pdl

SPAN = 128
"""Keys of a decode span, while a row has at most ``max_splits`` of them; longer contexts have longer spans."""

DECODE_KEYS = 32
"""Keys of a tile in decode: two programs an SM then keep three tiles of K and V each in flight."""

DECODE_STAGES = 4

PROGRAMS_PER_SM = 2

MAX_SPANS = 2048
"""(row, span) pairs whose partial results are kept: bounds the scratch memory of many rows (50 MB with 24 heads)."""


def max_splits(num_rows: int, num_kv_heads: int, max_context: int, device: torch.device) -> int:
    """Spans that a row's context is cut into at most (a power of two).

    Enough to give every program of a one-row step its own, few enough to bound the scratch memory of many rows.
    """
    wanted = max(1, PROGRAMS_PER_SM * num_sms(device) // num_kv_heads)
    wanted = min(wanted, max(4, MAX_SPANS // num_rows))
    return min(next_power_of_two(wanted + 1) // 2, next_power_of_two(triton.cdiv(max_context, SPAN)))


def paged_decode_attention(
    query: Tensor,
    gate: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context: int,
    out: Tensor | None = None,
) -> Tensor:
    """One query token a row against its first ``context_lens`` cached positions, gated. See the reference.

    ``max_context`` only bounds scratch memory and grid: with the same ``max_splits`` results do not depend on it.

    Raises:
        ValueError: head_dim or the block size is not a power of two of at least 16.
    """
    num_rows, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    check_powers(head_dim, block_size)
    group = num_heads // num_kv_heads
    device = query.device
    if out is None:
        out = torch.empty(num_rows, num_heads * head_dim, dtype=query.dtype, device=device)
    splits = max_splits(num_rows, num_kv_heads, max_context, device)
    partial = torch.empty(num_rows, splits, num_heads, head_dim, dtype=torch.float32, device=device)
    weights = torch.empty(num_rows, splits, num_heads, dtype=torch.float32, device=device)
    keys = min(DECODE_KEYS, block_size)
    num_programs = min(num_rows * num_kv_heads * splits, PROGRAMS_PER_SM * num_sms(device))
    _attend_decode_kernel[(num_programs,)](
        query,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        partial,
        weights,
        num_rows,
        query.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        block_tables.stride(0),
        LOG2_E * head_dim**-0.5,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        PADDED_GROUP=max(16, next_power_of_two(group)),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        KEYS=keys,
        SPAN=SPAN,
        MAX_SPLITS=splits,
        PADDED_ROWS=next_power_of_two(num_rows),
        PRECISION=precision_of(query.dtype),
        num_warps=4,
        num_stages=DECODE_STAGES,
        **pdl(device),
    )
    _merge_spans_kernel[(num_rows, num_heads)](
        partial,
        weights,
        context_lens,
        gate,
        out,
        gate.stride(0),
        gate.stride(1),
        out.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        KEYS=keys,
        SPAN=SPAN,
        MAX_SPLITS=splits,
        AT_ONCE=min(16, splits),
        num_warps=4,
        **pdl(device),
    )
    return out


@triton.jit
def _span_of(context, KEYS: tl.constexpr, SPAN: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys of one span of a context: a multiple of KEYS, at least SPAN, so large that MAX_SPLITS spans suffice."""
    return tl.maximum(SPAN, tl.cdiv(tl.cdiv(context, MAX_SPLITS), KEYS) * KEYS)


@triton.jit
def _attend_decode_kernel(
    query,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    partial,
    weights,
    num_rows,
    query_stride,
    cache_block_stride,
    cache_head_stride,
    table_stride,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program: every so-manieth (row, span, KV head). Leaves normalised sums and the log2 of their weights."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.arange(0, PADDED_ROWS)
    contexts = tl.maximum(tl.load(context_lens + rows, rows < num_rows, other=1), 1)
    counts = tl.cdiv(contexts, _span_of(contexts, KEYS, SPAN, MAX_SPLITS))
    counts = tl.where(rows < num_rows, counts, 0)
    upto = tl.cumsum(counts, 0)
    num_spans = tl.sum(counts, 0)
    group = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, HEAD_DIM)
    key = tl.arange(0, KEYS)
    tile = key[:, None] * HEAD_DIM + dim[None, :]
    for item in range(tl.program_id(0), num_spans * NUM_KV_HEADS, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        number = item // NUM_KV_HEADS
        row = tl.sum((upto <= number).to(tl.int32), 0)
        split = number - tl.sum(tl.where(rows == row, upto - counts, 0), 0)
        context = tl.sum(tl.where(rows == row, contexts, 0), 0)
        span = _span_of(context, KEYS, SPAN, MAX_SPLITS)
        begin = split * span
        end = tl.minimum(begin + span, context)
        heads = kv_head * GROUP + group
        in_group = group < GROUP
        q = tl.load(
            query + row.to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM + dim[None, :],
            in_group[:, None],
            other=0.0,
        )
        table = block_tables + row.to(tl.int64) * table_stride
        cache_head = kv_head * cache_head_stride
        peak = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
        total = tl.zeros([PADDED_GROUP], tl.float32)
        acc = tl.zeros([PADDED_GROUP, HEAD_DIM], tl.float32)
        block = tl.load(table + begin // BLOCK_SIZE)
        for first in range(begin, end, KEYS):
            at = block.to(tl.int64) * cache_block_stride + cache_head + first % BLOCK_SIZE * HEAD_DIM
            # A block ahead, so that the next tile's loads need not wait for their address.
            block = tl.load(table + tl.minimum(first + KEYS, end - 1) // BLOCK_SIZE)
            owned = first + key < end
            k = tl.load(k_cache + at + tile, owned[:, None], other=0.0)
            v = tl.load(v_cache + at + tile, owned[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = tl.where(owned[None, :], scores, float("-inf"))
            p, peak, total, shrink = soften(scores, peak, total, scale)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        at = (row * MAX_SPLITS + split) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(partial + at[:, None] * HEAD_DIM + dim[None, :], acc / total[:, None], in_group[:, None])
        tl.store(weights + at, peak + tl.log2(total), in_group)


@triton.jit
def _merge_spans_kernel(
    partial,
    weights,
    context_lens,
    gate,
    out,
    gate_stride,
    gate_head_stride,
    out_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program: one query head of one row, its spans merged in order and gated."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    context = tl.maximum(tl.load(context_lens + row), 1)
    count = tl.cdiv(context, _span_of(context, KEYS, SPAN, MAX_SPLITS))
    first_place = row * MAX_SPLITS * NUM_HEADS + head
    every = tl.arange(0, MAX_SPLITS)
    logs = tl.load(weights + first_place + every * NUM_HEADS, every < count, other=float("-inf"))
    peak = tl.max(logs, 0)
    total = tl.sum(tl.exp2(logs - peak), 0)
    dim = tl.arange(0, HEAD_DIM)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(0, count, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        place = first_place + split * NUM_HEADS
        weight = tl.exp2(tl.load(weights + place, split < count, other=float("-inf")) - peak)
        piece = tl.load(partial + place[:, None] * HEAD_DIM + dim[None, :], (split < count)[:, None], other=0.0)
        acc += tl.sum(piece * weight[:, None], 0)
    g = tl.load(gate + row.to(tl.int64) * gate_stride + head * gate_head_stride + dim).to(tl.float32)
    result = acc / (total * (1.0 + tl.exp2(-1.4426950408889634 * g)))
    tl.store(out + row.to(tl.int64) * out_stride + head * HEAD_DIM + dim, result.to(out.dtype.element_ty))
