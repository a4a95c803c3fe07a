"""Drawing among few candidates (the largest top-k of the rows is small): they are listed.

The k best tokens lie within the k groups of ids whose best token is best, which two rounds of ranking by counting find
exactly. The rest of top-p, min-p and the draw happens on the list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.launch import next_power_of_two
from bireme.kernels.triton.sampling_shared import NO_ID, log_uniform, mass_of, seed_of

GROUP = 128
"""Token ids of a group in the search for few candidates."""

SUBGROUP = 8

FEW = 64
"""Up to this largest k, candidates are listed."""


def draw_among_few(
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
    first = tl.where(group >= 0, group * GROUP + subs % (GROUP // SUBGROUP) * SUBGROUP, NO_ID - SUBGROUP)
    ids = first[:, None] + tl.arange(0, SUBGROUP)[None, :]
    x = tl.max(_load_ranked(x_row, ids, vocab_size), 1)
    SPAN: tl.constexpr = 32
    rank = tl.zeros([SUBS], dtype=tl.int32)
    for start in range(0, SUBS, SPAN):
        others = start + tl.arange(0, SPAN)
        other_group = tl.load(chosen + row * ROOM + others // (GROUP // SUBGROUP))
        other_first = tl.where(
            other_group >= 0, other_group * GROUP + others % (GROUP // SUBGROUP) * SUBGROUP, NO_ID - SUBGROUP
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
    id = tl.where(members // SUBGROUP < num_subs, base + members % SUBGROUP, NO_ID)
    x = _load_ranked(x_row, id, vocab_size)
    rank = tl.zeros([LIST], dtype=tl.int32)
    for start in range(0, LIST, SPAN):
        others = start + tl.arange(0, SPAN)
        other_base = tl.load(listed + others // SUBGROUP)
        other_id = tl.where(others // SUBGROUP < num_subs, other_base + others % SUBGROUP, NO_ID)
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
    masses = tl.where(has_token, mass_of(x, peak, heat), 0)
    up_to = tl.cumsum(masses, 0)
    target = tl.sum(masses, 0).to(tl.float64) * tl.load(top_p + row)
    kept = has_token & ((up_to - masses).to(tl.float64) < target)
    if min_p is not None:
        kept = kept & (weights >= tl.load(min_p + row))
    counters = (id // 4).to(tl.uint32)
    position = tl.load(positions + row).to(tl.uint32) + counters * 0
    zero = counters * 0
    w0, w1, w2, w3 = tl.philox(seed_of(seed_low, seed_high, row), counters, position, zero, zero)
    lane = id % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    race = tl.where(kept & (weights > 0.0), log_uniform(word) / weights.to(tl.float64), float("-inf"))
    winner = tl.min(tl.where(race == tl.max(race, 0), id, NO_ID), 0)
    # A row of NaN has no winner; its likeliest candidate keeps the token in range.
    fallback = tl.sum(tl.where(place == 0, id, 0), 0)
    tl.store(token_ids + row, tl.where(winner == NO_ID, fallback, winner).to(tl.int64))
