"""RMS norms, and the residual add in front of them: one launch each, float32 inside.

``add_rms_norm`` also ends a product that was split along its inputs: the partial sums, float32, are added in their
order, so that the result is the same in every run and for every number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.launch import next_power_of_two, pdl


@triton.jit
def _normalise(wide, weight, size, eps):
    return wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps) * weight


@triton.jit
def _rms_norm_kernel(x, weight, out, size, weight_rows, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    within = columns < size
    factor = tl.load(weight + row % weight_rows * size + columns, mask=within, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    wide = tl.load(x + row * size + columns, mask=within, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, _normalise(wide, factor, size, eps), mask=within)


@triton.jit
def sum_parts(parts, offsets, within, part_stride, PARTS: tl.constexpr):
    """``parts[0] + parts[1] + …`` at ``offsets``, from left to right, float32."""
    total = tl.load(parts + offsets, mask=within, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * part_stride + offsets, mask=within, other=0.0)
    return total


@triton.jit
def _add_rms_norm_kernel(
    parts,
    residual,
    weight,
    out,
    size,
    part_stride,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    within = columns < size
    factor = tl.load(weight + columns, mask=within, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    offsets = row * size + columns
    dtype = residual.dtype.element_ty
    stream = tl.load(residual + offsets, mask=within, other=0.0)
    # The product is rounded before it is added, and the sum is rounded again: what two separate operations give.
    x = sum_parts(parts, offsets, within, part_stride, PARTS).to(dtype)
    stream = (stream.to(tl.float32) + x.to(tl.float32)).to(dtype)
    tl.store(residual + offsets, stream, mask=within)
    tl.store(out + offsets, _normalise(stream.to(tl.float32), factor, size, eps), mask=within)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last dimension.

    Args:
        x: [..., n], contiguous, any float dtype.
        weight: the trailing dimensions of x (so [n], or [heads, n]), float32, the full factor.
        eps: added to the mean square.

    Returns:
        [..., n] in x's dtype.
    """
    size = x.shape[-1]
    num_rows = x.numel() // size
    out = torch.empty_like(x)
    if num_rows:
        block = next_power_of_two(size)
        _rms_norm_kernel[(num_rows,)](
            x, weight, out, size, weight.numel() // size, eps, BLOCK=block, num_warps=_warps(block), **pdl(x.device)
        )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream (in place) and RMS-normalise the sum.

    Args:
        x: [N, H] in the residual's dtype, or partial sums from ``linear_partials``, [S, N, H] float32.
        residual: [N, H] contiguous; overwritten with the sum, rounded to its dtype.
        weight: [H] float32, the full factor.

    Returns:
        (normalised [N, H], residual).
    """
    num_rows, size = residual.shape
    out = torch.empty_like(residual)
    if num_rows:
        block = next_power_of_two(size)
        _add_rms_norm_kernel[(num_rows,)](
            x,
            residual,
            weight,
            out,
            size,
            num_rows * size,
            eps,
            PARTS=x.shape[0] if x.dim() == 3 else 1,
            BLOCK=block,
            num_warps=_warps(block),
            **pdl(x.device),
        )
    return out, residual
