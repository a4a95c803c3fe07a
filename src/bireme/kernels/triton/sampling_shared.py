"""What the sampling kernels share: the order of logits, masses as integers, noise, and each tile's largest logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Token ids of a program that passes over the vocabulary."""

MASS_SCALE = tl.constexpr(float(1 << 42))

NO_ID = tl.constexpr(0x7FFFFFFF)

HALF = tl.constexpr(2.0**-33)

WORD = tl.constexpr(2.0**-32)


@triton.jit
def ordered(x):
    """A float32's bits as an int64 in [0, 2³²) that compares as the float does (−0 equals 0)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.int64) + 2147483648


@triton.jit
def log_uniform(word):
    """log((w + ½) / 2³²) of a 32-bit word, float64."""
    return tl.log(word.to(tl.uint32, bitcast=True).to(tl.float64) * WORD + HALF)


@triton.jit
def row_peak(peaks, row, num_tiles, TILES: tl.constexpr):
    tiles = tl.arange(0, TILES)
    return tl.max(tl.load(peaks + row * num_tiles + tiles, tiles < num_tiles, other=float("-inf")), 0)


@triton.jit
def mass_of(x, peak, temperature):
    return (tl.exp((x - peak) / temperature) * MASS_SCALE).to(tl.int64)


@triton.jit
def seed_of(seed_low, seed_high, row):
    return tl.load(seed_low + row).to(tl.uint64) | (tl.load(seed_high + row).to(tl.uint64) << 32)


@triton.jit
def _peaks_kernel(logits, peaks, stride, vocab_size, num_tiles, BLOCK: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, ids < vocab_size, other=float("-inf"))
    tl.store(peaks + row * num_tiles + tile, tl.max(x, 0))


def tile_peaks(logits: Tensor) -> Tensor:
    """The largest logit of each tile: [n, tiles] float32."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    peaks = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    _peaks_kernel[(num_rows, num_tiles)](
        logits, peaks, logits.stride(0), vocab_size, num_tiles, BLOCK=TILE, num_warps=8
    )
    return peaks
