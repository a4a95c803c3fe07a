"""Gated DeltaNet over packed prompt chunks, in the chunked form, in four launches.

1. ``_convolve_kernel``, per 64-token chunk and head: q, k and v.
2. ``_invert_kernel``, per chunk and value head: gates, and what makes a chunk's writes of its values. With
   A[i, j] = β_i·exp(t_i − t_j)·k_i·k_j below the diagonal (t: log decay since the chunk's start) that is
   T = (I + A)⁻¹·diag(β).
3. ``_scan_kernel``, per row, value head and slice of the value dimension, chunk after chunk: δ = T·(v − exp(t)·k·S),
   S ← exp(t_last)·S + Σ_j exp(t_last − t_j)·k_j·δ_jᵀ. It keeps S in float32 and leaves each chunk's S (rounded) and δ.
   (Others compute T·v and T·k per chunk beforehand, which shortens the scan by one small product; writing and reading
   them costs more than that here.)
4. ``_output_kernel``, per chunk and value head: o_i = exp(t_i)·Sᵀq_i + Σ_{j ≤ i} exp(t_i − t_j)·(q_i·k_j)·δ_j, then the
   gated norm.

Products run on tensor cores with operands in the activation dtype and float32 sums. q and k enter them as the
convolution left them; their lengths, decays and β are float32 factors applied outside, or to a float32 matrix that is
rounded once. Grids follow from tensor sizes; which chunks exist is read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.gated_delta_decode import L2_EPS, TAPS, num_key_heads, silu, softplus
from bireme.kernels.triton.launch import pdl

CHUNK = 64
"""Tokens of a chunk, as the entries of ``chunks`` are cut."""


@triton.jit
def _convolved(
    mixed,
    conv_weight,
    history,
    channels,
    rows,
    real,
    follows,
    resumed,
    mixed_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """[rows, channels] of a chunk, rounded as the activations are.

    mixed: at the chunk's first token; follows: earlier tokens of the row lie before it; resumed: they are in history.
    """
    total = tl.zeros((rows.shape[0], channels.shape[0]), tl.float32)
    for tap in tl.static_range(TAPS):
        source = rows + (tap - TAPS + 1)
        present = real & ((source >= 0) | follows)
        x = tl.load(mixed + source[:, None] * mixed_stride + channels[None, :], present[:, None], 0.0)
        total += x.to(tl.float32) * tl.load(conv_weight + tap * CHANNELS + channels)[None, :]
    if resumed:
        for tap in tl.static_range(TAPS - 1):
            source = rows + tap
            present = real & (source < TAPS - 1)
            x = tl.load(history + source[:, None] * CHANNELS + channels[None, :], present[:, None], 0.0)
            total += x.to(tl.float32) * tl.load(conv_weight + tap * CHANNELS + channels)[None, :]
    return silu(total).to(mixed.dtype.element_ty)


@triton.jit
def _convolve_kernel(
    mixed,
    conv_weight,
    conv_state,
    slots,
    row_starts,
    chunks,
    qkv,
    inverse_lengths,
    mixed_stride,
    L2_EPS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    TAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    CHANNELS: tl.constexpr = (2 * KEY_DIM + GROUP * VALUE_DIM) * NUM_K_HEADS
    head = tl.program_id(0)
    chunk = chunks + tl.program_id(1) * 4
    row = tl.load(chunk)
    first = tl.load(chunk + 1).to(tl.int64)
    num_tokens = tl.load(chunk + 2)
    before = tl.load(chunk + 3)
    if num_tokens == 0:
        return
    follows = before > tl.load(row_starts + row)
    resumed = (before > 0) & (follows == 0)
    history = conv_state + tl.load(slots + row) * ((TAPS - 1) * CHANNELS)
    mixed += first * mixed_stride
    rows = tl.arange(0, CHUNK)
    real = rows < num_tokens
    tokens = first + rows
    if head < 2 * NUM_K_HEADS:
        channels = head * KEY_DIM + tl.arange(0, KEY_DIM)
        x = _convolved(
            mixed, conv_weight, history, channels, rows, real, follows, resumed, mixed_stride, CHANNELS, TAPS
        )
        tl.store(qkv + tokens[:, None] * CHANNELS + channels[None, :], x, real[:, None])
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) + L2_EPS)
        tl.store(inverse_lengths + tokens * (2 * NUM_K_HEADS) + head, scale, real)
    else:
        channels = 2 * NUM_K_HEADS * KEY_DIM + (head - 2 * NUM_K_HEADS) * VALUE_DIM + tl.arange(0, VALUE_DIM)
        x = _convolved(
            mixed, conv_weight, history, channels, rows, real, follows, resumed, mixed_stride, CHANNELS, TAPS
        )
        tl.store(qkv + tokens[:, None] * CHANNELS + channels[None, :], x, real[:, None])


@triton.jit
def _quarters(x, SIZE: tl.constexpr):
    """[…, 2·SIZE, 2·SIZE], one matrix or two, → its top left, bottom left and bottom right quarters."""
    if len(x.shape) == 2:
        x = tl.permute(tl.reshape(x, (2, SIZE, 2, SIZE)), (1, 3, 0, 2))
    else:
        x = tl.permute(tl.reshape(x, (2, 2, SIZE, 2, SIZE)), (0, 2, 4, 1, 3))
    left, right = tl.split(x)
    top_left, bottom_left = tl.split(left)
    _, bottom_right = tl.split(right)
    return top_left, bottom_left, bottom_right


@triton.jit
def _merged(first, second, between, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of [[P, 0], [L, Q]], [[P⁻¹, 0], [−Q⁻¹·L·P⁻¹, Q⁻¹]], from P⁻¹, Q⁻¹ and L: one matrix or two."""
    corner = -tl.dot(second, tl.dot(between, first, input_precision=PRECISION), input_precision=PRECISION)
    quarters = tl.join(tl.join(first, corner), tl.join(tl.zeros_like(first), second))
    if len(first.shape) == 2:
        return tl.reshape(tl.permute(quarters, (2, 0, 3, 1)), (2 * SIZE, 2 * SIZE))
    else:
        return tl.reshape(tl.permute(quarters, (0, 3, 1, 4, 2)), (2, 2 * SIZE, 2 * SIZE))


@triton.jit
def _inverted(system, PRECISION: tl.constexpr):
    """(I + A)⁻¹ of A [64, 64], strictly lower triangular.

    Four diagonal blocks of 16 side by side (a warp each), in them by doubling; then pairs are merged, twice. Doubling
    with products of whole 64 × 64 matrices takes twenty times the work, most of it with zeros.
    """
    first, between, second = _quarters(system, 32)
    pair = tl.permute(tl.join(first, second), (2, 0, 1))
    first, within, second = _quarters(pair, 16)
    blocks = tl.reshape(tl.permute(tl.join(first, second), (0, 3, 1, 2)), (4, 16, 16))
    rows = tl.arange(0, 16)
    apart = (rows[:, None] ^ rows[None, :])[None, :, :]
    inverse = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, blocks, 0.0)
    for level in tl.static_range(1, 4):
        joins = (apart >> level) == 1  # the same block of 2^(level + 1) tokens, different halves
        corner = tl.dot(tl.where(joins, blocks, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, corner, input_precision=PRECISION)
    first, second = tl.split(tl.permute(tl.reshape(inverse, (2, 2, 16, 16)), (0, 2, 3, 1)))
    pair = _merged(first, second, within, 16, PRECISION)
    first, second = tl.split(tl.permute(pair, (1, 2, 0)))
    return _merged(first, second, between, 32, PRECISION)


@triton.jit
def _invert_kernel(
    mixed,
    dt_bias,
    neg_exp_a,
    chunks,
    qkv,
    inverse_lengths,
    decays,
    writers,
    mixed_stride,
    part_stride,
    NUM_K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    NUM_V_HEADS: tl.constexpr = NUM_K_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * NUM_K_HEADS * KEY_DIM + NUM_V_HEADS * VALUE_DIM
    GATES: tl.constexpr = CHANNELS + NUM_V_HEADS * VALUE_DIM
    head = tl.program_id(0)
    key_head = head // GROUP
    chunk = chunks + tl.program_id(1) * 4
    first = tl.load(chunk + 1).to(tl.int64)
    num_tokens = tl.load(chunk + 2)
    if num_tokens == 0:
        return
    rows = tl.arange(0, CHUNK)
    keys = tl.arange(0, KEY_DIM)
    real = rows < num_tokens
    mixed += first * mixed_stride + GATES + head
    b = tl.load(mixed + rows * mixed_stride, real, 0.0).to(tl.float32)
    a = tl.load(mixed + rows * mixed_stride + NUM_V_HEADS, real, 0.0).to(tl.float32)
    qkv += first * CHANNELS + (NUM_K_HEADS + key_head) * KEY_DIM
    k = tl.load(qkv + rows[:, None] * CHANNELS + keys[None, :], real[:, None], 0.0)
    inverse_lengths += first * (2 * NUM_K_HEADS) + NUM_K_HEADS + key_head
    k_scale = tl.load(inverse_lengths + rows * (2 * NUM_K_HEADS), real, 0.0)
    beta = tl.where(real, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    rate = tl.load(neg_exp_a + head) * softplus(a + tl.load(dt_bias + head))
    decay = tl.cumsum(tl.where(real, rate, 0.0), 0)
    tl.store(decays + first * NUM_V_HEADS + head + rows * NUM_V_HEADS, decay, real)

    overlaps = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    below = rows[:, None] > rows[None, :]
    between = tl.exp(tl.where(below, decay[:, None] - decay[None, :], 0.0))
    system = tl.where(below, overlaps * between * (beta * k_scale)[:, None] * k_scale[None, :], 0.0)
    inverse = _inverted(system, PRECISION) * beta[None, :]
    # Where tokens repeat, rows of the inverse nearly cancel, and one rounding would show: what it drops is kept too.
    writers += (first * NUM_V_HEADS + head) * CHUNK
    at = rows[:, None] * (NUM_V_HEADS * CHUNK) + rows[None, :]
    high = inverse.to(k.dtype)
    tl.store(writers + at, high, real[:, None])
    if PARTS > 1:
        tl.store(writers + part_stride + at, (inverse - high.to(tl.float32)).to(k.dtype), real[:, None])


@triton.jit
def _next_history(
    mixed, history, channels, length, resumed, mixed_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr, tap
):
    """The ``tap``-th input of the history that a row of ``length`` tokens leaves (mixed: at its first token)."""
    source = length - (TAPS - 1) + tap
    x = tl.load(mixed + source.to(tl.int64) * mixed_stride + channels, (channels >= 0) & (source >= 0), 0.0)
    kept = (channels >= 0) & (source < 0) & resumed
    return tl.where(source < 0, tl.load(history + (length + tap) * CHANNELS + channels, kept, 0.0), x)


@triton.jit
def _advance_history(
    mixed, history, channels, length, resumed, mixed_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    """Only one program may do it for a channel."""
    x0 = _next_history(mixed, history, channels, length, resumed, mixed_stride, CHANNELS, TAPS, 0)
    x1 = _next_history(mixed, history, channels, length, resumed, mixed_stride, CHANNELS, TAPS, 1)
    x2 = _next_history(mixed, history, channels, length, resumed, mixed_stride, CHANNELS, TAPS, 2)
    tl.store(history + channels, x0)
    tl.store(history + CHANNELS + channels, x1)
    tl.store(history + 2 * CHANNELS + channels, x2)


@triton.jit
def _scan_kernel(
    mixed,
    recurrent_state,
    conv_state,
    slots,
    cu_seqlens,
    row_starts,
    qkv,
    inverse_lengths,
    decays,
    writers,
    deltas,
    states,
    mixed_stride,
    part_stride,
    NUM_K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    NUM_V_HEADS: tl.constexpr = NUM_K_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * NUM_K_HEADS * KEY_DIM + NUM_V_HEADS * VALUE_DIM
    TILES: tl.constexpr = VALUE_DIM // BLOCK_V
    head = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    key_head = head // GROUP
    row = tl.program_id(1)
    begin = tl.load(cu_seqlens + row)
    length = tl.load(cu_seqlens + row + 1) - begin
    if length <= 0:
        return
    slot = tl.load(slots + row)
    resumed = tl.load(row_starts + row) > 0
    keys = tl.arange(0, KEY_DIM)
    values = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = tl.arange(0, CHUNK)
    k_channels = (NUM_K_HEADS + key_head) * KEY_DIM + keys
    v_channels = 2 * NUM_K_HEADS * KEY_DIM + head * VALUE_DIM + values
    in_head = keys[:, None] * VALUE_DIM + values[None, :]
    home = recurrent_state + (slot * NUM_V_HEADS + head) * (KEY_DIM * VALUE_DIM) + in_head
    state = tl.load(home, (in_head >= 0) & resumed, 0.0)
    # Chunks of a row have entries of their own and follow each other: rows never overlap, whatever their lengths.
    states += ((begin // CHUNK + row).to(tl.int64) * NUM_V_HEADS + head) * (KEY_DIM * VALUE_DIM)

    for index in tl.range(0, tl.cdiv(length, CHUNK), num_stages=STAGES):
        left = length - index * CHUNK
        real = rows < left
        tokens = begin.to(tl.int64) + (index * CHUNK + rows)
        at = tokens * NUM_V_HEADS + head
        at_key = tokens * (2 * NUM_K_HEADS) + NUM_K_HEADS + key_head
        k = tl.load(qkv + tokens[:, None] * CHANNELS + k_channels[None, :], real[:, None], 0.0)
        v = tl.load(qkv + tokens[:, None] * CHANNELS + v_channels[None, :], real[:, None], 0.0)
        writer = writers + at[:, None] * CHUNK + rows[None, :]
        high = tl.load(writer, real[:, None], 0.0)
        decay = tl.load(decays + at, real, 0.0)
        scale = tl.load(inverse_lengths + at_key, real, 0.0)
        last = tl.load(decays + (begin + index * CHUNK + tl.minimum(left, CHUNK) - 1) * NUM_V_HEADS + head)

        rounded = state.to(k.dtype)
        tl.store(states + in_head, rounded)
        held = tl.dot(k, rounded, input_precision=PRECISION) * (tl.exp(decay) * scale)[:, None]
        change = (v.to(tl.float32) - held).to(k.dtype)
        delta = tl.dot(high, change, input_precision=PRECISION)
        if PARTS > 1:
            low = tl.load(writer + part_stride, real[:, None], 0.0)
            delta = tl.dot(low, change, delta, input_precision=PRECISION)
        tl.store(deltas + at[:, None] * VALUE_DIM + values[None, :], delta.to(k.dtype), real[:, None])
        delta *= tl.where(real, tl.exp(last - decay) * scale, 0.0)[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(k), delta.to(k.dtype), input_precision=PRECISION)
        states += NUM_V_HEADS * KEY_DIM * VALUE_DIM

    tl.store(home, state)
    mixed += begin.to(tl.int64) * mixed_stride
    history = conv_state + slot * ((TAPS - 1) * CHANNELS)
    _advance_history(mixed, history, v_channels, length, resumed, mixed_stride, CHANNELS, TAPS)
    if (head % GROUP == 0) & (tile == 0):
        q_channels = key_head * KEY_DIM + keys
        _advance_history(mixed, history, q_channels, length, resumed, mixed_stride, CHANNELS, TAPS)
        _advance_history(mixed, history, k_channels, length, resumed, mixed_stride, CHANNELS, TAPS)


@triton.jit
def _output_kernel(
    mixed,
    norm_weight,
    row_starts,
    chunks,
    qkv,
    inverse_lengths,
    decays,
    deltas,
    states,
    out,
    mixed_stride,
    out_stride,
    eps,
    NUM_K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    NUM_V_HEADS: tl.constexpr = NUM_K_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * NUM_K_HEADS * KEY_DIM + NUM_V_HEADS * VALUE_DIM
    head = tl.program_id(0)
    key_head = head // GROUP
    chunk = chunks + tl.program_id(1) * 4
    num_tokens = tl.load(chunk + 2)
    if num_tokens == 0:
        return
    row = tl.load(chunk)
    first = tl.load(chunk + 1)
    offset = tl.load(chunk + 3) - tl.load(row_starts + row)
    entry = ((first - offset) // CHUNK + row + offset // CHUNK).to(tl.int64)

    rows = tl.arange(0, CHUNK)
    keys = tl.arange(0, KEY_DIM)
    values = tl.arange(0, VALUE_DIM)
    real = rows < num_tokens
    tokens = first.to(tl.int64) + rows
    at = tokens * NUM_V_HEADS + head
    at_q = tokens * (2 * NUM_K_HEADS) + key_head
    at_k = at_q + NUM_K_HEADS
    qkv += tokens[:, None] * CHANNELS + keys[None, :]
    q = tl.load(qkv + key_head * KEY_DIM, real[:, None], 0.0)
    k = tl.load(qkv + (NUM_K_HEADS + key_head) * KEY_DIM, real[:, None], 0.0)
    states += (entry * NUM_V_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state = tl.load(states + keys[:, None] * VALUE_DIM + values[None, :])
    delta = tl.load(deltas + at[:, None] * VALUE_DIM + values[None, :], real[:, None], 0.0)
    decay = tl.load(decays + at, real, 0.0)
    q_scale = tl.load(inverse_lengths + at_q, real, 0.0)
    k_scale = tl.load(inverse_lengths + at_k, real, 0.0)
    z = tl.load(
        mixed + tokens[:, None] * mixed_stride + CHANNELS + head * VALUE_DIM + values[None, :], real[:, None], 0.0
    )

    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * q_scale[:, None] * k_scale[None, :]
    seen = (rows[:, None] >= rows[None, :]) & real[:, None]
    scores = tl.where(seen, scores * tl.exp(tl.where(seen, decay[:, None] - decay[None, :], 0.0)), 0.0)
    o = tl.dot(q, state, input_precision=PRECISION) * (tl.exp(decay) * q_scale)[:, None]
    o += tl.dot(scores.to(q.dtype), delta, input_precision=PRECISION)
    normed = o * tl.rsqrt(tl.sum(o * o, 1) / VALUE_DIM + eps)[:, None] * tl.load(norm_weight + values)[None, :]
    gated = silu(z.to(tl.float32)) * normed.to(z.dtype).to(tl.float32)
    tl.store(out + tokens[:, None] * out_stride + head * VALUE_DIM + values[None, :], gated.to(z.dtype), real[:, None])


def gdn_prefill(
    mixed: Tensor,
    conv_weight: Tensor,
    dt_bias: Tensor,
    neg_exp_a: Tensor,
    norm_weight: Tensor,
    recurrent_state: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    row_starts: Tensor,
    chunks: Tensor,
    seq_lens: list[int],
    starts: list[int],
    eps: float,
    out: Tensor | None = None,
    *,
    convolve_warps: int = 8,
    invert_warps: int = 4,
    invert_registers: int | None = None,
    precision: str | None = None,
    block_v: int = 32,
    scan_warps: int = 4,
    scan_stages: int = 2,
    output_warps: int = 4,
) -> Tensor:
    """Packed chunks of prompts, as ``reference.gdn_prefill``; rows without tokens leave their slots alone.

    Args:
        chunks: [C, 4] int32, in any order; entries without tokens are skipped. Tokens in no chunk get no output.
        seq_lens, starts: not needed here: the tensors say it.
        precision: of products of float32 numbers (default: tf32, or tf32x3 where activations are float32). With
            activations in bfloat16 only those that invert I + A are; one pass is as exact as three there, measured
            (``bench/gated_delta.py``), for what they give is rounded to bfloat16 anyway.
        block_v: slice of the value dimension that a program scans.

    Raises:
        ValueError: see ``gdn_decode``.
    """
    num_tokens = mixed.shape[0]
    num_chunks, num_rows = chunks.shape[0], slots.shape[0]
    _, num_v_heads, key_dim, value_dim = recurrent_state.shape
    num_k_heads = num_key_heads(conv_weight, recurrent_state)
    group = num_v_heads // num_k_heads
    if precision is None:
        precision = "tf32x3" if mixed.dtype is torch.float32 else "tf32"
    if out is None:
        out = mixed.new_empty(num_tokens, num_v_heads * value_dim)
    block_v = min(block_v, value_dim)
    geometry = {"NUM_K_HEADS": num_k_heads, "GROUP": group, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "CHUNK": CHUNK}
    dependent = pdl(mixed.device)
    stride = mixed.stride(0)

    qkv = mixed.new_empty(num_tokens, conv_weight.shape[1])
    parts = 1 if mixed.dtype is torch.float32 else 2
    writers = mixed.new_empty(parts, num_tokens, num_v_heads, CHUNK)
    deltas = mixed.new_empty(num_tokens, num_v_heads, value_dim)
    # A row's entries begin at ``first token // 64 + row``.
    states = mixed.new_empty(num_tokens // CHUNK + num_rows + 1, num_v_heads, key_dim, value_dim)
    inverse_lengths = torch.empty(num_tokens, 2, num_k_heads, dtype=torch.float32, device=mixed.device)
    decays = torch.empty(num_tokens, num_v_heads, dtype=torch.float32, device=mixed.device)

    _convolve_kernel[(2 * num_k_heads + num_v_heads, num_chunks)](
        mixed,
        conv_weight,
        conv_state,
        slots,
        row_starts,
        chunks,
        qkv,
        inverse_lengths,
        stride,
        L2_EPS=L2_EPS,
        TAPS=TAPS,
        num_warps=convolve_warps,
        **geometry,
        **dependent,
    )
    _invert_kernel[(num_v_heads, num_chunks)](
        mixed,
        dt_bias,
        neg_exp_a,
        chunks,
        qkv,
        inverse_lengths,
        decays,
        writers,
        stride,
        writers.stride(0),
        PARTS=parts,
        PRECISION=precision,
        num_warps=invert_warps,
        num_stages=1,
        maxnreg=invert_registers,
        **geometry,
        **dependent,
    )
    _scan_kernel[(num_v_heads * (value_dim // block_v), num_rows)](
        mixed,
        recurrent_state,
        conv_state,
        slots,
        cu_seqlens,
        row_starts,
        qkv,
        inverse_lengths,
        decays,
        writers,
        deltas,
        states,
        stride,
        writers.stride(0),
        TAPS=TAPS,
        BLOCK_V=block_v,
        STAGES=scan_stages,
        PARTS=parts,
        PRECISION=precision,
        num_warps=scan_warps,
        **geometry,
        **dependent,
    )
    _output_kernel[(num_v_heads, num_chunks)](
        mixed,
        norm_weight,
        row_starts,
        chunks,
        qkv,
        inverse_lengths,
        decays,
        deltas,
        states,
        out,
        stride,
        out.stride(0),
        eps * key_dim,
        PRECISION=precision,
        num_warps=output_warps,
        **geometry,
        **dependent,
    )
    return out
