"""Where the run of kept tokens ends, for any top-k and top-p, without a sort.

The edge is found four bits of the ordered logit at a time, by exact sums above fifteen thresholds (a radix search):
of tokens for top-k, of their mass for top-p. Ties are kept by id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.launch import next_power_of_two
from bireme.kernels.triton.sampling_shared import TILE, mass_of, ordered, row_peak, tile_peaks

LEVELS = 8
"""Passes of four bits that find a 32-bit threshold."""


class Edges:
    """Where each row's run of kept tokens ends.

    Attributes:
        peaks: [n, tiles] float32, the largest logit of each tile.
        values: [n] int64, the ordered logit of the last token kept.
        ties_kept: [n] int64, how many tokens of exactly that value are kept, the smaller ids first.
        tile_ties: [n, tiles] int32, tokens of that value in each tile.
    """

    __slots__ = ("peaks", "ties_kept", "tile_ties", "values")

    def __init__(self, peaks: Tensor, values: Tensor, ties_kept: Tensor, tile_ties: Tensor) -> None:
        self.peaks, self.values, self.ties_kept, self.tile_ties = peaks, values, ties_kept, tile_ties


def find_edges(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, *, by_count: bool) -> Edges:
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    device = logits.device
    peaks = tile_peaks(logits)
    shape = {"TILES": next_power_of_two(num_tiles), "BLOCK": TILE, "num_warps": 8}
    grid = (num_rows, num_tiles)
    # Sums above the thresholds of each level: counts first, masses then.
    sums = torch.zeros(num_rows, 2, LEVELS, 16, dtype=torch.int64, device=device)
    kept = torch.zeros(
        num_rows, 3, dtype=torch.int64, device=device
    )  # the count's edge, ties kept there, mass above it
    target = torch.empty(num_rows, dtype=torch.float64, device=device)
    for level in range(LEVELS if by_count else 0):
        _sum_above_kernel[grid](
            logits, peaks, temperature, top_k, None, sums, logits.stride(0), vocab_size, num_tiles,
            LEVEL=level, LEVELS=LEVELS, OF_MASS=0, **shape,
        )  # fmt: skip
    _kept_mass_kernel[grid](
        logits, peaks, temperature, top_k, sums, kept, logits.stride(0), vocab_size, num_tiles,
        LEVELS=LEVELS, BY_COUNT=by_count, **shape,
    )  # fmt: skip
    _target_kernel[(num_rows,)](
        peaks, temperature, top_k, top_p, sums, kept, target, num_tiles,
        TILES=shape["TILES"], LEVELS=LEVELS, BY_COUNT=by_count, num_warps=1,
    )  # fmt: skip
    for level in range(LEVELS):
        _sum_above_kernel[grid](
            logits, peaks, temperature, None, target, sums, logits.stride(0), vocab_size, num_tiles,
            LEVEL=level, LEVELS=LEVELS, OF_MASS=1, **shape,
        )  # fmt: skip
    values = torch.empty(num_rows, dtype=torch.int64, device=device)
    ties_kept = torch.empty(num_rows, dtype=torch.int64, device=device)
    tile_ties = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    _edge_kernel[grid](
        logits, peaks, temperature, target, sums, kept, values, ties_kept, tile_ties, logits.stride(0), vocab_size,
        num_tiles, LEVELS=LEVELS, BY_COUNT=by_count, **shape,
    )  # fmt: skip
    return Edges(peaks, values, ties_kept, tile_ties)


@triton.jit
def _digit(sums, row, target, LEVEL: tl.constexpr, LEVELS: tl.constexpr, OF_MASS: tl.constexpr):
    """The digit that a level found: the first threshold above which less than ``target`` lies; and that sum."""
    j = tl.arange(0, 16)
    above = tl.load(sums + ((row * 2 + OF_MASS) * LEVELS + LEVEL) * 16 + j)
    # Below the last threshold of the level above, whose sum was under the target: 15 always qualifies.
    fits = (above.to(tl.float64) < target) | (j == 15)
    digit = tl.min(tl.where(fits, j, 15), 0)
    return digit, tl.sum(tl.where(j == digit, above, 0), 0)


@triton.jit
def _prefix(sums, row, target, LEVEL: tl.constexpr, LEVELS: tl.constexpr, OF_MASS: tl.constexpr):
    """The threshold's digits that the levels below LEVEL found: an int64 whose other bits are 0."""
    prefix = tl.full([], 0, tl.int64)
    for level in tl.static_range(LEVEL):
        digit, _ = _digit(sums, row, target, level, LEVELS, OF_MASS)
        prefix = prefix | (digit.to(tl.int64) << (28 - 4 * level))
    return prefix


@triton.jit
def _sum_above_kernel(
    logits,
    peaks,
    temperature,
    top_k,
    targets,
    sums,
    stride,
    vocab_size,
    num_tiles,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    OF_MASS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a tile's count or mass above each threshold (prefix, digit j, ones) to the row's sums of this level."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = tl.load(targets + row) if OF_MASS else tl.load(top_k + row).to(tl.float64)
    prefix = _prefix(sums, row, target, LEVEL, LEVELS, OF_MASS)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, ids < vocab_size, other=float("-inf"))
    keys = tl.where(ids < vocab_size, ordered(x), 0)
    if OF_MASS:
        measure = mass_of(x, row_peak(peaks, row, num_tiles, TILES), tl.load(temperature + row))
    else:
        measure = tl.full([BLOCK], 1, tl.int64)
    SHIFT: tl.constexpr = 28 - 4 * LEVEL
    j = tl.arange(0, 16)
    above = tl.zeros([16], dtype=tl.int64)
    for digit in tl.static_range(16):
        threshold = prefix + ((digit + 1) << SHIFT) - 1
        above = tl.where(j == digit, tl.sum(tl.where(keys > threshold, measure, 0), 0), above)
    tl.atomic_add(sums + ((row * 2 + OF_MASS) * LEVELS + LEVEL) * 16 + j, above, above != 0, sem="relaxed")


@triton.jit
def _count_edge(sums, row, k, LEVELS: tl.constexpr):
    """Value of the k-th token, and how many tokens lie above it."""
    target = k.to(tl.float64)
    prefix = _prefix(sums, row, target, LEVELS - 1, LEVELS, 0)
    digit, above = _digit(sums, row, target, LEVELS - 1, LEVELS, 0)
    return prefix | digit.to(tl.int64), above


@triton.jit
def _value_of(key):
    """The float32 of an ordered key."""
    flipped = (key - 2147483648).to(tl.int32)
    return (flipped ^ ((flipped >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kept_mass_kernel(
    logits,
    peaks,
    temperature,
    top_k,
    sums,
    kept,
    stride,
    vocab_size,
    num_tiles,
    LEVELS: tl.constexpr,
    BY_COUNT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the mass above the count's edge (all of it without one)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, ids < vocab_size, other=float("-inf"))
    measure = mass_of(x, row_peak(peaks, row, num_tiles, TILES), tl.load(temperature + row))
    if BY_COUNT:
        edge, _ = _count_edge(sums, row, tl.load(top_k + row), LEVELS)
        measure = tl.where(ordered(x) > edge, measure, 0)
    tl.atomic_add(kept + row * 3 + 2, tl.sum(measure, 0), sem="relaxed")


@triton.jit
def _target_kernel(
    peaks,
    temperature,
    top_k,
    top_p,
    sums,
    kept,
    targets,
    num_tiles,
    TILES: tl.constexpr,
    LEVELS: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    """Each row's mass that top-p has to reach."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(kept + row * 3 + 2)
    if BY_COUNT:
        k = tl.load(top_k + row)
        edge, above = _count_edge(sums, row, k, LEVELS)
        peak = row_peak(peaks, row, num_tiles, TILES)
        total += (k - above) * mass_of(_value_of(edge), peak, tl.load(temperature + row))
        tl.store(kept + row * 3, edge)
        tl.store(kept + row * 3 + 1, k - above)
    tl.store(targets + row, total.to(tl.float64) * tl.load(top_p + row))


@triton.jit
def _edge_kernel(
    logits,
    peaks,
    temperature,
    targets,
    sums,
    kept,
    values,
    ties_kept,
    tile_ties,
    stride,
    vocab_size,
    num_tiles,
    LEVELS: tl.constexpr,
    BY_COUNT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The nearer of both edges, and its ties: how many are kept, how many lie in this tile."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = tl.load(targets + row)
    prefix = _prefix(sums, row, target, LEVELS - 1, LEVELS, 1)
    digit, above = _digit(sums, row, target, LEVELS - 1, LEVELS, 1)
    edge = prefix | digit.to(tl.int64)
    peak = row_peak(peaks, row, num_tiles, TILES)
    each = mass_of(_value_of(edge), peak, tl.load(temperature + row))
    # The fewest ties with which the target is reached; ties of no mass are all before it or all behind it.
    missing = tl.minimum(target - above.to(tl.float64), 9.0e18)
    ties = tl.where(each > 0, tl.ceil(missing / tl.maximum(each, 1).to(tl.float64)), 2147483647.0).to(tl.int64)
    ties = tl.maximum(ties, 1)
    if BY_COUNT:
        count_edge = tl.load(kept + row * 3)
        count_ties = tl.load(kept + row * 3 + 1)
        ties = tl.where(edge > count_edge, ties, tl.where(edge == count_edge, tl.minimum(ties, count_ties), count_ties))
        edge = tl.maximum(edge, count_edge)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, ids < vocab_size, other=float("-inf"))
    equal = (ordered(x) == edge) & (ids < vocab_size)
    tl.store(tile_ties + row * num_tiles + tile, tl.sum(equal.to(tl.int32), 0))
    if tile == 0:
        tl.store(values + row, edge)
        tl.store(ties_kept + row, ties)
