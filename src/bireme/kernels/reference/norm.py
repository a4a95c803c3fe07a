"""RMS normalisation: float32 inside, one rounding at the end."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``; the check here costs a tenth of the call that changes nothing, and a step makes a hundred."""
    return x if x.dtype is dtype else x.to(dtype)


@functools.lru_cache(maxsize=16)
def scalar(value: float, device: torch.device) -> Tensor:
    """``value`` as a 0-dim float32 tensor. On CPUs a Python number costs every operation a conversion of its own."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x²) + eps)`` over the last dimension of a float32 tensor, that dimension kept (size 1)."""
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(scalar(eps, x.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last dimension.

    Args:
        x: [..., n], any float dtype.
        weight: broadcastable to x's trailing dimensions, float32, the full factor (1 + w for a zero-centred w).
        eps: added to the mean square.

    Returns:
        [..., n] in x's dtype.
    """
    wide = cast(x, torch.float32)
    return cast(torch.mul(wide, inverse_rms(wide, eps)).mul_(weight), x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream (in place) and RMS-normalise the sum.

    Args:
        x: [N, H], from ``linear_partials`` or any block. (Other implementations also take partial sums [S, N, H].)
        residual: [N, H], same dtype; overwritten with the sum, rounded to its dtype.
        weight: [H] float32, the full factor.

    Returns:
        (normalised [N, H], residual).
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual
