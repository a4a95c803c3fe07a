"""Gated full attention over the paged KV cache on CUDA.

Decode splits every row's context into spans of keys (flash-decoding). A fixed number of programs, however many tokens
the block tables could address, share the spans of all rows and KV heads, found on the device from ``context_lens``; a
small second kernel merges them. Where a span begins depends on its row's context alone, so a row's result does not
depend on its neighbours. Prefill gives a program a tile of one query head's tokens, found on the device from
``cu_seqlens``. Neither reads a host value that a replayed CUDA graph could have wrong.

Softmax, sums and gates are float32; products take operands in the cache's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bireme.kernels.triton.launch import next_power_of_two, num_sms, pdl

SPAN = 128
"""Keys of a decode span, while a row has at most ``max_splits`` of them; longer contexts have longer spans."""

DECODE_KEYS = 32
"""Keys of a tile in decode: two programs an SM then keep three tiles of K and V each in flight."""

DECODE_STAGES = 4

PROGRAMS_PER_SM = 2

MAX_SPANS = 2048
"""(row, span) pairs whose partial results are kept: bounds the scratch memory of many rows (50 MB with 24 heads)."""

LOG2_E = 1.4426950408889634


def rotary_cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles: [N] int64, [rotary_dim / 2] float32 → two of [N, rotary_dim / 2]."""
    num_tokens, half = positions.shape[0], frequencies.shape[0]
    cos_sin = torch.empty(2, num_tokens, half, dtype=torch.float32, device=positions.device)
    total = num_tokens * half
    block = 256
    _rotary_kernel[(triton.cdiv(total, block),)](
        positions, frequencies, cos_sin, total, half, BLOCK=block, num_warps=2, **pdl(positions.device)
    )
    return cos_sin[0], cos_sin[1]


def qk_norm_rope_write_kv(
    qkv: Tensor,
    qk_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Split the fused projection, normalise and rotate queries and keys, store K and V. See the reference.

    Returns:
        (queries [N, Hq, D] contiguous, gates [N, Hq, D], a view of ``qkv``).
    """
    num_tokens = qkv.shape[0]
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    num_heads = qk_weight.shape[0] - num_kv_heads
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    # Few tokens: one a program, for the shortest wait. Many: enough loads in flight for each thread.
    tokens = 1 if num_tokens <= 64 else 8
    _qk_norm_rope_kernel[(triton.cdiv(num_tokens, tokens), num_heads + num_kv_heads)](
        qkv,
        qk_weight,
        cos,
        sin,
        k_cache,
        v_cache,
        kv_indices,
        query,
        num_tokens,
        num_heads,
        num_kv_heads,
        qkv.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        eps,
        HALF=cos.shape[-1],
        HEAD_DIM=head_dim,
        PADDED_DIM=next_power_of_two(head_dim),
        BLOCK_SIZE=block_size,
        TOKENS=tokens,
        num_warps=1 if tokens == 1 else 4,
        **pdl(qkv.device),
    )
    gate = qkv[:, : 2 * num_heads * head_dim].view(num_tokens, num_heads, 2, head_dim).select(2, 1)
    return query, gate


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
    _check_powers(head_dim, block_size)
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
        PRECISION=_precision(query.dtype),
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
    _check_powers(head_dim, block_size)
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
        PRECISION=_precision(query.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl(query.device),
    )
    return out


def _rows_of_keys(cache: Tensor, keys: int) -> TensorDescriptor:
    """The cache as a matrix with a row a (block, head, offset), fetched ``keys`` rows at a time by the copy engine."""
    rows = cache.view(-1, cache.shape[-1])
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [keys, cache.shape[-1]])


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


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _check_powers(head_dim: int, block_size: int) -> None:
    for name, value in (("head_dim", head_dim), ("a KV block size", block_size)):
        if value < 16 or value & (value - 1):
            raise ValueError(f"attention kernels for CUDA need {name} that is a power of two from 16 up, got {value}")


@triton.jit
def _rotary_kernel(positions, frequencies, cos_sin, total, half, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    position = tl.load(positions + at // half, inside, other=0).to(tl.float32)
    angle = position * tl.load(frequencies + at % half, inside, other=0.0)
    tl.store(cos_sin + at, tl.cos(angle), inside)
    tl.store(cos_sin + total + at, tl.sin(angle), inside)


@triton.jit
def _qk_norm_rope_kernel(
    qkv,
    qk_weight,
    cos,
    sin,
    k_cache,
    v_cache,
    kv_indices,
    query,
    num_tokens,
    num_heads,
    num_kv_heads,
    qkv_stride,
    cache_block_stride,
    cache_head_stride,
    eps,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program: TOKENS tokens of one query head, or of one KV head with its values."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    is_query = head < num_heads
    dim = tl.arange(0, PADDED_DIM)
    in_head = dim < HEAD_DIM
    rotates = dim < 2 * HALF
    # The dimension that dim turns into, and with which sign its partner enters.
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    weight = tl.load(qk_weight + head * HEAD_DIM + dim, in_head, other=0.0)
    partner_weight = tl.load(qk_weight + head * HEAD_DIM + partner, rotates, other=0.0)
    partner_weight = tl.where(dim < HALF, -partner_weight, partner_weight)
    if PDL:
        tl.extra.cuda.gdc_wait()

    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_step = token < num_tokens
    inside = in_step[:, None] & in_head[None, :]
    turning = in_step[:, None] & rotates[None, :]
    # Per query head a query and a gate; behind them keys, then values.
    column = tl.where(is_query, 2 * head, num_heads + head) * HEAD_DIM
    row = qkv + token.to(tl.int64)[:, None] * qkv_stride
    x = tl.load(row + column + dim[None, :], inside, other=0.0).to(tl.float32)
    y = tl.load(row + column + partner[None, :], turning, other=0.0).to(tl.float32)
    angle = token[:, None] * HALF + (dim % HALF)[None, :]
    c = tl.load(cos + angle, turning, other=1.0)
    s = tl.load(sin + angle, turning, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) * (1.0 / HEAD_DIM) + eps)[:, None]
    rotated = x * scale * weight[None, :] * c + y * scale * partner_weight[None, :] * s
    rotated = rotated.to(query.dtype.element_ty)
    if is_query:
        at = (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(query + at, rotated, inside)
    else:
        values = tl.load(row + column + num_kv_heads * HEAD_DIM + dim[None, :], inside)
        index = tl.load(kv_indices + token, in_step, other=0)
        place = index // BLOCK_SIZE * cache_block_stride + index % BLOCK_SIZE * HEAD_DIM
        at = (place + (head - num_heads) * cache_head_stride)[:, None] + dim[None, :]
        tl.store(k_cache + at, rotated, inside)
        tl.store(v_cache + at, values, inside)


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
            p, peak, total, shrink = _soften(scores, peak, total, scale)
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
        p, peak, total, shrink = _soften(scores, peak, total, scale)
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
        p, peak, total, shrink = _soften(scores, peak, total, scale)
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


@triton.jit
def _soften(scores, peak, total, scale):
    """One step of online softmax, base 2: (weights of the tile, new peak, new total, factor of what was summed)."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    shrink = tl.exp2(peak - new_peak)
    p = tl.exp2(scores * scale - new_peak[:, None])
    return p, new_peak, total * shrink + tl.sum(p, 1), shrink
