"""Gated DeltaNet, one token a row: everything between the two projections in one launch.

A program owns a row's value head, or a slice of its value dimension where rows are too few to fill the device. It reads
and writes its part of the recurrent state once. Two things need programs to agree: the convolution histories of q and k
are read by all value heads of a key head, so the last of them to have read shifts them; and with slices, the norm needs
the whole head, so the same last program normalises what the slices left in a buffer. Counters are kept by row and key
head, not by slot, so padding rows that share slot 0 count their own programs only; the last program resets its counter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.launch import next_power_of_two, num_sms, pdl

TAPS = 4
"""Taps of the convolution that these kernels are written for."""

_counters: dict[torch.device, list[Tensor]] = {}
"""By device: zeros between launches. The last of a list is the largest; earlier ones may live in captured graphs."""


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _taps(conv_weight, channel, CHANNELS: tl.constexpr):
    return (
        tl.load(conv_weight + channel),
        tl.load(conv_weight + CHANNELS + channel),
        tl.load(conv_weight + 2 * CHANNELS + channel),
        tl.load(conv_weight + 3 * CHANNELS + channel),
    )


@triton.jit
def _window(history, current, channel, CHANNELS: tl.constexpr):
    return (
        tl.load(history + channel),
        tl.load(history + CHANNELS + channel),
        tl.load(history + 2 * CHANNELS + channel),
        tl.load(current + channel),
    )


@triton.jit
def _convolved(x, w):
    total = x[0].to(tl.float32) * w[0] + x[1].to(tl.float32) * w[1]
    total += x[2].to(tl.float32) * w[2]
    total += x[3].to(tl.float32) * w[3]
    return silu(total).to(x[3].dtype).to(tl.float32)


@triton.jit
def _shift(history, x, channel, CHANNELS: tl.constexpr):
    tl.store(history + channel, x[1])
    tl.store(history + CHANNELS + channel, x[2])
    tl.store(history + 2 * CHANNELS + channel, x[3])


@triton.jit
def _delta_rule(old, q, k, v, beta, decay):
    """(state [Dk, n] after the token, what q reads from it [n]); q and k of unit length, v [n]."""
    # What the decayed state holds for k and q; Sᵀq after the update follows from what it held before it.
    held = tl.sum(old * k[:, None], 0) * decay
    read = tl.sum(old * q[:, None], 0) * decay
    delta = beta * (v - held)
    return old * decay + k[:, None] * delta[None, :], read + tl.sum(q * k, 0) * delta


@triton.jit
def _gated_norm(o, z, weight, eps, VALUE_DIM: tl.constexpr):
    # q lacks its factor Dk^-0.5, which scales o as a whole: the caller's eps makes up for it.
    normed = o * tl.rsqrt(tl.sum(o * o, 0) / VALUE_DIM + eps) * weight
    return (silu(z.to(tl.float32)) * normed.to(z.dtype).to(tl.float32)).to(z.dtype)


@triton.jit
def _decode_kernel(
    mixed,
    conv_weight,
    dt_bias,
    neg_exp_a,
    norm_weight,
    recurrent_state,
    conv_state,
    slots,
    out,
    partial,
    counters,
    mixed_stride,
    out_stride,
    eps,
    L2_EPS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    NUM_V_HEADS: tl.constexpr = NUM_K_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * NUM_K_HEADS * KEY_DIM + NUM_V_HEADS * VALUE_DIM
    VALUES: tl.constexpr = NUM_V_HEADS * VALUE_DIM
    BLOCK_V: tl.constexpr = VALUE_DIM // SPLITS
    head = tl.program_id(0) // SPLITS
    first_value = tl.program_id(0) % SPLITS * BLOCK_V
    row = tl.program_id(1).to(tl.int64)
    key_head = head // GROUP
    keys = tl.arange(0, KEY_DIM)
    values = first_value + tl.arange(0, BLOCK_V)
    q_channel = key_head * KEY_DIM + keys
    k_channel = (NUM_K_HEADS + key_head) * KEY_DIM + keys
    v_channel = 2 * NUM_K_HEADS * KEY_DIM + head * VALUE_DIM + values
    q_taps = _taps(conv_weight, q_channel, CHANNELS)
    k_taps = _taps(conv_weight, k_channel, CHANNELS)
    v_taps = _taps(conv_weight, v_channel, CHANNELS)
    bias = tl.load(dt_bias + head)
    rate = tl.load(neg_exp_a + head)
    if PDL:
        tl.extra.cuda.gdc_wait()

    slot = tl.load(slots + row)
    state = recurrent_state + (slot * NUM_V_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state += keys[:, None] * VALUE_DIM + first_value
    LOOPED: tl.constexpr = SLICE < BLOCK_V
    if not LOOPED:
        old = tl.load(state + tl.arange(0, BLOCK_V)[None, :])
    history = conv_state + slot * (3 * CHANNELS)
    current = mixed + row * mixed_stride
    q_window = _window(history, current, q_channel, CHANNELS)
    k_window = _window(history, current, k_channel, CHANNELS)
    v_window = _window(history, current, v_channel, CHANNELS)
    if SPLITS == 1:
        z = tl.load(current + CHANNELS + head * VALUE_DIM + values)
    else:
        members = tl.arange(0, GROUP_BLOCK)
        lanes = tl.arange(0, VALUE_DIM)
        present = (members < GROUP)[:, None] & (lanes >= 0)[None, :]
        in_group = (key_head * GROUP + members)[:, None] * VALUE_DIM + lanes[None, :]
        z = tl.load(current + CHANNELS + in_group, present, 0.0)
    b = tl.load(current + CHANNELS + VALUES + head).to(tl.float32)
    a = tl.load(current + CHANNELS + VALUES + NUM_V_HEADS + head).to(tl.float32)
    beta = 1.0 / (1.0 + tl.exp(-b))
    decay = tl.exp(rate * softplus(a + bias))

    q = _convolved(q_window, q_taps)
    k = _convolved(k_window, k_taps)
    v = _convolved(v_window, v_taps)
    q *= tl.rsqrt(tl.sum(q * q, 0) + L2_EPS)
    k *= tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
    EXPECTED: tl.constexpr = GROUP * SPLITS
    counter = counters + row * NUM_K_HEADS + key_head
    own = partial + (row * NUM_V_HEADS + head) * VALUE_DIM
    if LOOPED:
        tl.store(own + values, v)
    else:
        new, o = _delta_rule(old, q, k, v, beta, decay)
        if SPLITS > 1:
            tl.store(own + values, o)
    # Everything that others may overwrite has been read: say so before the state's stores are under way.
    is_last = True
    if LOOPED or EXPECTED > 1:
        tl.debug_barrier()
    if EXPECTED > 1:
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == EXPECTED - 1
    if LOOPED:
        for start in tl.range(0, BLOCK_V, SLICE, num_stages=STAGES):
            part = start + tl.arange(0, SLICE)
            old = tl.load(state + part[None, :])
            new, o = _delta_rule(old, q, k, tl.load(own + part), beta, decay)
            tl.store(state + part[None, :], new)
            tl.store(own + part, o)
        tl.debug_barrier()
        o = tl.load(own + values)
    else:
        tl.store(state + tl.arange(0, BLOCK_V)[None, :], new)
    _shift(history, v_window, v_channel, CHANNELS)
    if SPLITS == 1:
        gated = _gated_norm(o, z, tl.load(norm_weight + values), eps, VALUE_DIM)
        tl.store(out + row * out_stride + head * VALUE_DIM + values, gated)
    if is_last:
        _shift(history, q_window, q_channel, CHANNELS)
        _shift(history, k_window, k_channel, CHANNELS)
        if EXPECTED > 1:
            tl.store(counter, 0)
        if SPLITS > 1:
            # Others wrote these: not from this multiprocessor's own cache.
            whole = tl.load(partial + row * VALUES + in_group, present, 0.0, cache_modifier=".cg")
            scale = tl.rsqrt(tl.sum(whole * whole, 1) / VALUE_DIM + eps)
            normed = whole * scale[:, None] * tl.load(norm_weight + lanes)[None, :]
            gated = silu(z.to(tl.float32)) * normed.to(z.dtype).to(tl.float32)
            tl.store(out + row * out_stride + in_group, gated.to(z.dtype), present)


L2_EPS = 1e-6
"""Added to the sum of squares when q and k are normalised (the architecture's constant, not the norm's eps)."""


class DecodeShape(NamedTuple):
    """How ``gdn_decode`` is cut.

    Attributes:
        splits: programs that share a value head.
        num_warps: of a program.
        slice: values that a program updates at a time, the next ones being fetched meanwhile; 0: all at once. Only
            where a program has a head of its own.
        stages: slices in flight, the one at work included.
    """

    splits: int
    num_warps: int
    slice: int = 0
    stages: int = 1


def decode_shape(num_programs: int, value_dim: int, device: torch.device) -> DecodeShape:
    """The shape for ``num_programs`` = rows × value heads."""
    splits = 1
    while splits < 4 and num_programs * splits < 2 * num_sms(device) and value_dim // splits > 32:
        splits *= 2
    return DecodeShape(splits, 4) if splits > 1 else DecodeShape(1, 4, slice=min(32, value_dim // 2), stages=3)


def gdn_decode(
    mixed: Tensor,
    conv_weight: Tensor,
    dt_bias: Tensor,
    neg_exp_a: Tensor,
    norm_weight: Tensor,
    recurrent_state: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    slot_range: tuple[int, int] | None,
    in_order: bool,
    eps: float,
    out: Tensor | None = None,
    *,
    shape: DecodeShape | None = None,
) -> Tensor:
    """One token a row, as ``reference.gdn_decode``; several rows may name slot 0, whose contents are then arbitrary.

    Args:
        slot_range, in_order: not needed here: slots are read where they lie.
        shape: instead of ``decode_shape``'s choice.

    Raises:
        ValueError: a convolution of other than 4 taps, head dimensions that are no powers of two, or a shape that is
            no shape.
    """
    num_rows = mixed.shape[0]
    _, num_v_heads, key_dim, value_dim = recurrent_state.shape
    num_k_heads = num_key_heads(conv_weight, recurrent_state)
    splits, num_warps, slice_size, stages = shape or decode_shape(num_rows * num_v_heads, value_dim, mixed.device)
    if slice_size and splits > 1:
        raise ValueError(f"gdn_decode: slices of {slice_size} values need a head of their own, not {splits} splits")
    if out is None:
        out = mixed.new_empty(num_rows, num_v_heads * value_dim)
    group = num_v_heads // num_k_heads
    counters = _zeroed_counters(num_rows * num_k_heads, mixed.device)
    if splits > 1 or slice_size:
        partial = torch.empty(num_rows * num_v_heads * value_dim, dtype=torch.float32, device=mixed.device)
    else:
        partial = norm_weight  # not touched
    _decode_kernel[(num_v_heads * splits, num_rows)](
        mixed,
        conv_weight,
        dt_bias,
        neg_exp_a,
        norm_weight,
        recurrent_state,
        conv_state,
        slots,
        out,
        partial,
        counters,
        mixed.stride(0),
        out.stride(0),
        eps * key_dim,
        L2_EPS=L2_EPS,
        NUM_K_HEADS=num_k_heads,
        GROUP=group,
        GROUP_BLOCK=next_power_of_two(group),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        SPLITS=splits,
        SLICE=slice_size or value_dim // splits,
        STAGES=stages,
        num_warps=num_warps,
        **pdl(mixed.device),
    )
    return out


def num_key_heads(conv_weight: Tensor, recurrent_state: Tensor) -> int:
    """Key heads, from the sizes of the weights; refuses sizes that the kernels are not written for.

    Raises:
        ValueError: see ``gdn_decode``.
    """
    _, num_v_heads, key_dim, value_dim = recurrent_state.shape
    taps, channels = conv_weight.shape
    if taps != TAPS:
        raise ValueError(f"Gated DeltaNet on CUDA: linear_conv_kernel_dim is {taps}, the kernels know {TAPS} only")
    if min(key_dim, value_dim) < 16 or key_dim & (key_dim - 1) or value_dim & (value_dim - 1):
        raise ValueError(
            f"Gated DeltaNet on CUDA: head dimensions are {key_dim} (keys) and {value_dim} (values), "
            "the kernels know powers of two from 16 only"
        )
    return (channels - num_v_heads * value_dim) // (2 * key_dim)


def _zeroed_counters(count: int, device: torch.device) -> Tensor:
    buffers = _counters.setdefault(device, [])
    if not buffers or len(buffers[-1]) < count:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"gdn_decode: {count} counters are first needed within a graph's capture; run it once before"
            )
        buffers.append(torch.zeros(max(1 << 14, next_power_of_two(count)), dtype=torch.int32, device=device))
    return buffers[-1]
