"""What the attention kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def precision_of(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def check_powers(head_dim: int, block_size: int) -> None:
    for name, value in (("head_dim", head_dim), ("a KV block size", block_size)):
        if value < 16 or value & (value - 1):
            raise ValueError(f"attention kernels for CUDA need {name} that is a power of two from 16 up, got {value}")


@triton.jit
def soften(scores, peak, total, scale):
    """One step of online softmax, base 2: (weights of the tile, new peak, new total, factor of what was summed)."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    shrink = tl.exp2(peak - new_peak)
    p = tl.exp2(scores * scale - new_peak[:, None])
    return p, new_peak, total * shrink + tl.sum(p, 1), shrink
