"""Drawing tokens on the device: exponential race, top-k, top-p and min-p, without a sort and without a host sync.

Same meaning as ``bireme.sampling`` in plain torch: tokens are ordered by larger logit, then smaller id; masses are
integers, so that sums do not depend on the order of additions; noise is Philox4x32-10 of (seed, position, token id).
So a row's token is the same whatever else is in the batch.

Two ways to the candidates. Few (``largest_k`` ≤ 64): the k best tokens lie within the k groups of ids whose best token
is best, which two rounds of ranking by counting find exactly. Many: the edge of the run of best tokens is found four
bits of the ordered logit at a time, by exact sums above fifteen thresholds (a radix search), ties by id at last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.launch import next_power_of_two

TILE = 4096
"""Token ids of a program that passes over the vocabulary."""

GROUP = 128
"""Token ids of a group in the search for few candidates."""

SUBGROUP = 8

FEW = 64
"""Up to this largest k, candidates are listed."""

LEVELS = 8
"""Passes of four bits that find a 32-bit threshold."""

MASS_SCALE = tl.constexpr(float(1 << 42))
_NO_ID = tl.constexpr(0x7FFFFFFF)
_HALF = tl.constexpr(2.0**-33)
_WORD = tl.constexpr(2.0**-32)


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
    edges: _Edges | None = None
    if top_k is not None and top_p is not None:
        if largest_k <= FEW:
            return _draw_among_few(
                logits, temperature, seed_low, seed_high, positions, min_p, top_k, top_p, min(largest_k, vocab_size)
            )
        edges = _find_edges(logits, temperature, top_k, top_p, by_count=smallest_k < vocab_size)
    num_tiles = triton.cdiv(vocab_size, TILE)
    peaks = edges.peaks if edges is not None else _tile_peaks(logits)
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


# What the kernels share.


@triton.jit
def _ordered(x):
    """A float32's bits as an int64 in [0, 2³²) that compares as the float does (−0 equals 0)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.int64) + 2147483648


@triton.jit
def _log_uniform(word):
    """log((w + ½) / 2³²) of a 32-bit word, float64."""
    return tl.log(word.to(tl.uint32, bitcast=True).to(tl.float64) * _WORD + _HALF)


@triton.jit
def _row_peak(peaks, row, num_tiles, TILES: tl.constexpr):
    tiles = tl.arange(0, TILES)
    return tl.max(tl.load(peaks + row * num_tiles + tiles, tiles < num_tiles, other=float("-inf")), 0)


@triton.jit
def _mass(x, peak, temperature):
    return (tl.exp((x - peak) / temperature) * MASS_SCALE).to(tl.int64)


@triton.jit
def _seed(seed_low, seed_high, row):
    return tl.load(seed_low + row).to(tl.uint64) | (tl.load(seed_high + row).to(tl.uint64) << 32)


@triton.jit
def _peaks_kernel(logits, peaks, stride, vocab_size, num_tiles, BLOCK: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, ids < vocab_size, other=float("-inf"))
    tl.store(peaks + row * num_tiles + tile, tl.max(x, 0))


def _tile_peaks(logits: Tensor) -> Tensor:
    """The largest logit of each tile: [n, tiles] float32."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    peaks = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    _peaks_kernel[(num_rows, num_tiles)](
        logits, peaks, logits.stride(0), vocab_size, num_tiles, BLOCK=TILE, num_warps=8
    )
    return peaks


# The race over the vocabulary.


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
    peak = _row_peak(peaks, row, num_tiles, TILES)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, ids < vocab_size, other=float("-inf"))
    weights = tl.exp((x - peak) / tl.load(temperature + row))
    if min_p is not None:
        weights = tl.where(weights >= tl.load(min_p + row), weights, 0.0)
    if edge_values is not None:
        edge = tl.load(edge_values + row)
        keys = _ordered(x)
        tiles = tl.arange(0, TILES)
        before = tl.sum(tl.load(tile_ties + row * num_tiles + tiles, tiles < tile, other=0), 0)
        is_tie = (keys == edge).to(tl.int32)
        kept = (keys > edge) | ((is_tie == 1) & (before + tl.cumsum(is_tie, 0) <= tl.load(ties_kept + row)))
        weights = tl.where(kept, weights, 0.0)
    # One counter gives the words of four ids that follow one another.
    counters = (tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    position = tl.load(positions + row).to(tl.uint32) + counters * 0
    zero = counters * 0
    w0, w1, w2, w3 = tl.philox(_seed(seed_low, seed_high, row), counters, position, zero, zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
    race = _log_uniform(words) / weights.to(tl.float64)
    race = tl.where((weights > 0.0) & (ids < vocab_size), race, float("-inf"))
    best = tl.max(race, 0)
    tl.store(scores + row * num_tiles + tile, best)
    tl.store(winners + row * num_tiles + tile, tl.min(tl.where(race == best, ids, _NO_ID), 0))


@triton.jit
def _winner_kernel(scores, winners, token_ids, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    race = tl.load(scores + row * num_tiles + tiles, tiles < num_tiles, other=float("-inf"))
    ids = tl.load(winners + row * num_tiles + tiles, tiles < num_tiles, other=_NO_ID)
    # A row of NaN has no winner: its first id keeps the token in range.
    winner = tl.min(tl.where(race == tl.max(race, 0), ids, _NO_ID), 0)
    tl.store(token_ids + row, tl.where(winner == _NO_ID, 0, winner).to(tl.int64))


# Few candidates.


def _draw_among_few(
    logits: Tensor,
    temperature: Tensor,
    seed_low: Tensor,
    seed_high: Tensor,
    positions: Tensor,
    min_p: Tensor | None,
    top_k: Tensor,
    top_p: Tensor,
    largest_k: int,
) -> Tensor:
    num_rows, vocab_size = logits.shape
    num_groups = triton.cdiv(vocab_size, GROUP)
    room = max(16, next_power_of_two(largest_k))
    device = logits.device
    group_peaks = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
    chosen = torch.full((num_rows, room), -1, dtype=torch.int32, device=device)
    candidates = torch.empty(num_rows, 2, room * SUBGROUP, dtype=torch.int32, device=device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    per_program = 32
    _group_peaks_kernel[(num_rows, triton.cdiv(num_groups, per_program))](
        logits, group_peaks, logits.stride(0), vocab_size, num_groups, GROUPS=per_program, GROUP=GROUP, num_warps=4
    )
    ranked = 64
    _rank_groups_kernel[(num_rows, triton.cdiv(num_groups, ranked))](
        group_peaks, chosen, num_groups, largest_k, ROOM=room, BLOCK=ranked, SPAN=128, num_warps=4
    )
    _few_kernel[(num_rows,)](
        logits,
        chosen,
        candidates,
        temperature,
        seed_low,
        seed_high,
        positions,
        min_p,
        top_k,
        top_p,
        token_ids,
        logits.stride(0),
        vocab_size,
        ROOM=room,
        GROUP=GROUP,
        SUBGROUP=SUBGROUP,
        num_warps=8,
    )
    return token_ids


@triton.jit
def _load_ranked(x_row, ids, limit):
    """Logits to be ranked by counting; NaN, which would compare as equal to all and leave places unfilled, as −inf."""
    x = tl.load(x_row + ids, ids < limit, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _group_peaks_kernel(logits, peaks, stride, vocab_size, num_groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _load_ranked(logits + row * stride, ids, vocab_size)
    tl.store(peaks + row * num_groups + groups, tl.max(x, 1), groups < num_groups)


@triton.jit
def _rank_groups_kernel(
    peaks, chosen, num_groups: tl.constexpr, count, ROOM: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr
):
    """The groups whose best token is among the ``count`` best of such tokens, in order."""
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(peaks + row * num_groups + mine, mine < num_groups, other=float("-inf"))
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, num_groups, SPAN):
        others = first + tl.arange(0, SPAN)
        y = tl.load(peaks + row * num_groups + others, others < num_groups, other=float("-inf"))
        ahead = (y[None, :] > x[:, None]) | ((y[None, :] == x[:, None]) & (others[None, :] < mine[:, None]))
        rank += tl.sum((ahead & (others < num_groups)[None, :]).to(tl.int32), 1)
    tl.store(chosen + row * ROOM + rank, mine, (rank < count) & (mine < num_groups))


@triton.jit
def _few_kernel(
    logits,
    chosen,
    candidates,
    temperature,
    seed_low,
    seed_high,
    positions,
    min_p,
    top_k,
    top_p,
    token_ids,
    stride,
    vocab_size,
    ROOM: tl.constexpr,
    GROUP: tl.constexpr,
    SUBGROUP: tl.constexpr,
):
    """From the chosen groups to the best subgroups, from these to the best tokens in order, from these to one."""
    row = tl.program_id(0).to(tl.int64)
    SUBS: tl.constexpr = ROOM * GROUP // SUBGROUP
    LIST: tl.constexpr = ROOM * SUBGROUP
    x_row = logits + row * stride
    listed = candidates + row * 2 * LIST
    k = tl.load(top_k + row)

    subs = tl.arange(0, SUBS)
    group = tl.load(chosen + row * ROOM + subs // (GROUP // SUBGROUP))
    first = tl.where(group >= 0, group * GROUP + subs % (GROUP // SUBGROUP) * SUBGROUP, _NO_ID - SUBGROUP)
    ids = first[:, None] + tl.arange(0, SUBGROUP)[None, :]
    x = tl.max(_load_ranked(x_row, ids, vocab_size), 1)
    SPAN: tl.constexpr = 32
    rank = tl.zeros([SUBS], dtype=tl.int32)
    for start in range(0, SUBS, SPAN):
        others = start + tl.arange(0, SPAN)
        other_group = tl.load(chosen + row * ROOM + others // (GROUP // SUBGROUP))
        other_first = tl.where(
            other_group >= 0, other_group * GROUP + others % (GROUP // SUBGROUP) * SUBGROUP, _NO_ID - SUBGROUP
        )
        other_ids = other_first[:, None] + tl.arange(0, SUBGROUP)[None, :]
        y = tl.max(_load_ranked(x_row, other_ids, vocab_size), 1)
        ahead = (y[None, :] > x[:, None]) | ((y[None, :] == x[:, None]) & (other_first[None, :] < first[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(listed + rank, first, (rank < ROOM) & (group >= 0))
    tl.debug_barrier()

    num_groups = tl.sum((tl.load(chosen + row * ROOM + tl.arange(0, ROOM)) >= 0).to(tl.int32), 0)
    num_subs = tl.minimum(num_groups * (GROUP // SUBGROUP), ROOM)
    members = tl.arange(0, LIST)
    base = tl.load(listed + members // SUBGROUP)
    id = tl.where(members // SUBGROUP < num_subs, base + members % SUBGROUP, _NO_ID)
    x = _load_ranked(x_row, id, vocab_size)
    rank = tl.zeros([LIST], dtype=tl.int32)
    for start in range(0, LIST, SPAN):
        others = start + tl.arange(0, SPAN)
        other_base = tl.load(listed + others // SUBGROUP)
        other_id = tl.where(others // SUBGROUP < num_subs, other_base + others % SUBGROUP, _NO_ID)
        y = _load_ranked(x_row, other_id, vocab_size)
        ahead = (y[None, :] > x[:, None]) | ((y[None, :] == x[:, None]) & (other_id[None, :] < id[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(listed + LIST + rank, id, (rank < ROOM) & (id < vocab_size))
    tl.debug_barrier()

    place = tl.arange(0, ROOM)
    has_token = place < tl.minimum(k, tl.minimum(num_subs * SUBGROUP, vocab_size))
    id = tl.load(listed + LIST + place, has_token, other=0)
    x = tl.load(x_row + id, has_token, other=float("-inf"))
    peak = tl.max(x, 0)
    heat = tl.load(temperature + row)
    weights = tl.exp((x - peak) / heat)
    masses = tl.where(has_token, _mass(x, peak, heat), 0)
    up_to = tl.cumsum(masses, 0)
    target = tl.sum(masses, 0).to(tl.float64) * tl.load(top_p + row)
    kept = has_token & ((up_to - masses).to(tl.float64) < target)
    if min_p is not None:
        kept = kept & (weights >= tl.load(min_p + row))
    counters = (id // 4).to(tl.uint32)
    position = tl.load(positions + row).to(tl.uint32) + counters * 0
    zero = counters * 0
    w0, w1, w2, w3 = tl.philox(_seed(seed_low, seed_high, row), counters, position, zero, zero)
    lane = id % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    race = tl.where(kept & (weights > 0.0), _log_uniform(word) / weights.to(tl.float64), float("-inf"))
    winner = tl.min(tl.where(race == tl.max(race, 0), id, _NO_ID), 0)
    # A row of NaN has no winner; its likeliest candidate keeps the token in range.
    fallback = tl.sum(tl.where(place == 0, id, 0), 0)
    tl.store(token_ids + row, tl.where(winner == _NO_ID, fallback, winner).to(tl.int64))


# Many candidates.


class _Edges:
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


def _find_edges(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, *, by_count: bool) -> _Edges:
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    device = logits.device
    peaks = _tile_peaks(logits)
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
    return _Edges(peaks, values, ties_kept, tile_ties)


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
    keys = tl.where(ids < vocab_size, _ordered(x), 0)
    if OF_MASS:
        measure = _mass(x, _row_peak(peaks, row, num_tiles, TILES), tl.load(temperature + row))
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
    measure = _mass(x, _row_peak(peaks, row, num_tiles, TILES), tl.load(temperature + row))
    if BY_COUNT:
        edge, _ = _count_edge(sums, row, tl.load(top_k + row), LEVELS)
        measure = tl.where(_ordered(x) > edge, measure, 0)
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
        peak = _row_peak(peaks, row, num_tiles, TILES)
        total += (k - above) * _mass(_value_of(edge), peak, tl.load(temperature + row))
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
    peak = _row_peak(peaks, row, num_tiles, TILES)
    each = _mass(_value_of(edge), peak, tl.load(temperature + row))
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
    equal = (_ordered(x) == edge) & (ids < vocab_size)
    tl.store(tile_ties + row * num_tiles + tile, tl.sum(equal.to(tl.int32), 0))
    if tile == 0:
        tl.store(values + row, edge)
        tl.store(ties_kept + row, ties)
