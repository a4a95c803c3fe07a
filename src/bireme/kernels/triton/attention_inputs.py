"""Queries, keys and values on their way to attention: rotary angles, and norms, RoPE and the cache's write in one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.launch import next_power_of_two, pdl


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
