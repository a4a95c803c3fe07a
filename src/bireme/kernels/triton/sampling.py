"""Drawing tokens on the device: exponential race, top-k, top-p and min-p, without a sort and without a host sync.

Same meaning as ``bireme.sampling`` in plain torch: tokens are ordered by larger logit, then smaller id; masses are
integers, so that sums do not depend on the order of additions; noise is Philox4x32-10 of (seed, position, token id).
So a row's token is the same whatever else is in the batch. ``sampling_few`` and ``sampling_edges`` find what is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.launch import next_power_of_two
from bireme.kernels.triton.sampling_edges import Edges, find_edges
from bireme.kernels.triton.sampling_few import FEW, draw_among_few
from bireme.kernels.triton.sampling_shared import NO_ID, TILE, log_uniform, ordered, row_peak, seed_of, tile_peaks


def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    seed_low: Tensor,
    seed_high: Tensor,
    positions: Tensor,
    *,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    smallest_k: int = 0,
    largest_k: int = 0,
) -> Tensor:
    """Draw one token a row: [n] int64.

    Args:
        logits: [n, V] float32, rows contiguous.
        temperature: [n, 1] float32, above 0.
        seed_low, seed_high: [n, 1] int64, the halves of each row's seed.
        positions: [n] int64 output positions.
        min_p: [n, 1] float32; tokens below min_p × the likeliest's probability are left out.
        top_k: [n, 1] int64 in [1, V]; top_p: [n, 1] float64, inf is off. Both or neither.
        smallest_k, largest_k: host-side bounds of ``top_k``.

    Raises:
        ValueError: a parameter that is not contiguous; kernels find a row's by its number.
    """
    for column in (temperature, seed_low, seed_high, positions, min_p, top_k, top_p):
        if column is not None and not column.is_contiguous():
            raise ValueError(f"drawing tokens: a parameter of strides {column.stride()} is not contiguous")
    num_rows, vocab_size = logits.shape
    edges: Edges | None = None
    if top_k is not None and top_p is not None:
        if largest_k <= FEW:
            return draw_among_few(
                logits, temperature, seed_low, seed_high, positions, min_p, top_k, top_p, min(largest_k, vocab_size)
            )
        edges = find_edges(logits, temperature, top_k, top_p, by_count=smallest_k < vocab_size)
    num_tiles = triton.cdiv(vocab_size, TILE)
    peaks = edges.peaks if edges is not None else tile_peaks(logits)
    scores = torch.empty(num_rows, num_tiles, dtype=torch.float64, device=logits.device)
    ids = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _race_kernel[(num_rows, num_tiles)](
        logits,
        peaks,
        temperature,
        seed_low,
        seed_high,
        positions,
        min_p,
        edges.values if edges is not None else None,
        edges.ties_kept if edges is not None else None,
        edges.tile_ties if edges is not None else None,
        scores,
        ids,
        logits.stride(0),
        vocab_size,
        num_tiles,
        TILES=next_power_of_two(num_tiles),
        BLOCK=TILE,
        num_warps=8,
    )
    _winner_kernel[(num_rows,)](scores, ids, token_ids, num_tiles, TILES=next_power_of_two(num_tiles), num_warps=1)
    return token_ids


@triton.jit
def _race_kernel(
    logits,
    peaks,
    temperature,
    seed_low,
    seed_high,
    positions,
    min_p,
    edge_values,
    ties_kept,
    tile_ties,
    scores,
    winners,
    stride,
    vocab_size,
    num_tiles,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = row_peak(peaks, row, num_tiles, TILES)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, ids < vocab_size, other=float("-inf"))
    weights = tl.exp((x - peak) / tl.load(temperature + row))
    if min_p is not None:
        weights = tl.where(weights >= tl.load(min_p + row), weights, 0.0)
    if edge_values is not None:
        edge = tl.load(edge_values + row)
        keys = ordered(x)
        tiles = tl.arange(0, TILES)
        before = tl.sum(tl.load(tile_ties + row * num_tiles + tiles, tiles < tile, other=0), 0)
        is_tie = (keys == edge).to(tl.int32)
        kept = (keys > edge) | ((is_tie == 1) & (before + tl.cumsum(is_tie, 0) <= tl.load(ties_kept + row)))
        weights = tl.where(kept, weights, 0.0)
    # One counter gives the words of four ids that follow one another.
    counters = (tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    position = tl.load(positions + row).to(tl.uint32) + counters * 0
    zero = counters * 0
    w0, w1, w2, w3 = tl.philox(seed_of(seed_low, seed_high, row), counters, position, zero, zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
    race = log_uniform(words) / weights.to(tl.float64)
    race = tl.where((weights > 0.0) & (ids < vocab_size), race, float("-inf"))
    best = tl.max(race, 0)
    tl.store(scores + row * num_tiles + tile, best)
    tl.store(winners + row * num_tiles + tile, tl.min(tl.where(race == best, ids, NO_ID), 0))


@triton.jit
def _winner_kernel(scores, winners, token_ids, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    race = tl.load(scores + row * num_tiles + tiles, tiles < num_tiles, other=float("-inf"))
    ids = tl.load(winners + row * num_tiles + tiles, tiles < num_tiles, other=NO_ID)
    # A row of NaN has no winner: its first id keeps the token in range.
    winner = tl.min(tl.where(race == tl.max(race, 0), ids, NO_ID), 0)
    tl.store(token_ids + row, tl.where(winner == NO_ID, 0, winner).to(tl.int64))
