"""Gated full attention over a paged KV cache, for any number of query heads a KV head.

Cache layout: [num_blocks, Hkv, block_size, D], so that one head's block is one contiguous tile. The query heads that
share a KV head are treated as further query positions: K and V are read once a group and never repeated.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bireme.kernels.reference.norm import cast, inverse_rms, scalar

QUERY_TILE = 64
"""Prompt tokens that share one pass over the keys."""

SPAN_PAIRS = 1 << 17
"""(tile, key position) pairs held at once; bounds the gathered K and V of a step."""


def rotary_cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles: [N] int64, [rotary_dim / 2] float32 → two [N, rotary_dim / 2] float32.

    For text all three multimodal position rows are equal, so this is plain RoPE (arXiv 2104.09864).
    """
    angles = torch.mul(positions.unsqueeze(1), frequencies)
    return angles.cos(), angles.sin_()


def qk_norm_rope_write_kv(
    qkv: Tensor,
    qk_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Split the fused projection, normalise and rotate queries and keys, store K and V.

    Args:
        qkv: [N, 2·Hq·D + 2·Hkv·D]: per query head D query then D gate values; then keys; then values.
        qk_weight: [Hq + Hkv, D] float32, the norm factors (1 + w) of each query head, then of each KV head.
        cos, sin: [N, rotary_dim / 2] float32; the first rotary_dim dimensions rotate (rotate-half).
        k_cache, v_cache: [num_blocks, Hkv, block_size, D], written in place.
        kv_indices: [N] int64, block · block_size + offset.

    Returns:
        (queries [N, Hq, D], gates [N, Hq, D], a view of ``qkv``).
    """
    num_tokens = qkv.shape[0]
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    num_heads = qk_weight.shape[0] - num_kv_heads
    heads = qkv.view(num_tokens, -1, head_dim)
    query_and_gate = heads[:, : 2 * num_heads].view(num_tokens, num_heads, 2, head_dim)
    keys_from = 2 * num_heads
    keys, values = heads[:, keys_from : keys_from + num_kv_heads], heads[:, keys_from + num_kv_heads :]

    qk = cast(torch.cat((query_and_gate.select(2, 0), keys), 1), torch.float32)
    qk = torch.mul(qk, inverse_rms(qk, eps)).mul_(qk_weight)
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = qk[..., :half], qk[..., half : 2 * half]
    rotated_first = torch.mul(first, cos).addcmul_(second, sin, value=-1.0)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated_first)
    qk = cast(qk, qkv.dtype)

    blocks = kv_indices // block_size
    offsets = kv_indices % block_size
    # [num_blocks, block_size, Hkv, D] views: the two index tensors then pick whole [Hkv, D] entries.
    k_cache.transpose(1, 2).index_put_((blocks, offsets), qk[:, num_heads:])
    v_cache.transpose(1, 2).index_put_((blocks, offsets), values)
    return qk[:, :num_heads], query_and_gate.select(2, 1)


def paged_decode_attention(
    query: Tensor,
    gate: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context: int,
    out: Tensor | None = None,
) -> Tensor:
    """One query token a row against its first ``context_lens`` cached positions, times ``sigmoid(gate)``.

    Args:
        query, gate: [R, Hq, D].
        k_cache, v_cache: [num_blocks, Hkv, block_size, D].
        block_tables: [R, max_blocks] int32; entries past a row's context may be anything valid.
        context_lens: [R] int32, this token included. 0 (padding) counts as 1.
        max_context: a host-side bound of ``context_lens``.
        out: [R, Hq·D], where the result goes, or None.

    Returns:
        [R, Hq·D] in the query's dtype.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[1]
    grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    visible = context_lens.clamp(min=1).view(num_rows, 1, 1, 1)
    result = _attend(grouped, k_cache, v_cache, block_tables, visible, visible, max_context, None)
    return _gated(result.view(num_rows, num_heads, head_dim), gate, out)


def paged_prefill_attention(
    query: Tensor,
    gate: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    row_starts: Tensor,
    seq_lens: list[int],
    starts: list[int],
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed chunks over their own tokens and all history before them, times ``sigmoid(gate)``.

    Args:
        query, gate: [T, Hq, D], the rows' chunks one after another.
        k_cache, v_cache: [num_blocks, Hkv, block_size, D]; the chunks' own K and V are already in.
        block_tables: [P, max_blocks] int32.
        cu_seqlens: [P + 1] int32, offsets of the rows: ``seq_lens`` for kernels that read it on the device.
        row_starts: [P] int32: ``starts`` for kernels that read it on the device.
        seq_lens: tokens of each row's chunk.
        starts: each row's tokens before its chunk.
        out: [T, Hq·D], where the result goes, or None.

    Returns:
        [T, Hq·D] in the query's dtype.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    tiles = _query_tiles(tuple(seq_lens), tuple(starts), query.device)
    padded = query.new_zeros(len(tiles.contexts) * QUERY_TILE, num_heads, head_dim)
    padded.index_copy_(0, tiles.places, query)
    # [tiles, 64, Hkv, g, D] → [tiles, Hkv, g · 64, D]
    folded = padded.view(-1, QUERY_TILE, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(-1, num_kv_heads, group * QUERY_TILE, head_dim)
    visible = tiles.visible.repeat(1, group).view(-1, 1, group * QUERY_TILE, 1)
    limits = tiles.limits.view(-1, 1, 1, 1)
    tables = block_tables.index_select(0, tiles.rows)
    result = _attend(folded, k_cache, v_cache, tables, visible, limits, tiles.contexts[0], tiles)
    result = result.view(-1, num_kv_heads, group, QUERY_TILE, head_dim).permute(0, 3, 1, 2, 4)
    return _gated(result.reshape(-1, num_heads, head_dim).index_select(0, tiles.places), gate, out)


def _gated(x: Tensor, gate: Tensor, out: Tensor | None) -> Tensor:
    """``x * sigmoid(gate)`` for two [N, H, D] tensors (x is overwritten) → [N, H·D], which is ``out`` if given."""
    weights = torch.sigmoid(gate)
    if out is None:
        return x.mul_(weights).flatten(1)
    torch.mul(x, weights, out=out.view(x.shape))
    return out


class _QueryTiles:
    """Chunks cut into tiles of 64 queries, longest context first: the tiles that a key span concerns are a prefix.

    Attributes:
        places: [T] int64, each packed token's place among the tiles' query positions.
        rows: [tiles] int64, the prefill row that a tile belongs to.
        visible: [tiles, 64] int32, keys that each query sees (1 at padding positions).
        limits: [tiles] int32, keys that the tile's last query sees.
        contexts: ``limits`` on the host.
        histories: on the host, keys that every query of the tile sees.
    """

    __slots__ = ("contexts", "histories", "limits", "places", "rows", "visible")

    def __init__(self, seq_lens: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> None:
        cuts = [
            (start + first, min(QUERY_TILE, length - first), row, first)
            for row, (length, start) in enumerate(zip(seq_lens, starts, strict=True))
            for first in range(0, length, QUERY_TILE)
        ]
        order = sorted(range(len(cuts)), key=lambda tile: -(cuts[tile][0] + cuts[tile][1]))
        rank_of = {tile: rank for rank, tile in enumerate(order)}
        histories = torch.tensor([cuts[tile][0] for tile in order])
        lengths = torch.tensor([cuts[tile][1] for tile in order])
        steps = torch.arange(QUERY_TILE)
        self.places = torch.cat([steps[: cut[1]] + rank_of[tile] * QUERY_TILE for tile, cut in enumerate(cuts)]).to(
            device
        )
        self.rows = torch.tensor([cuts[tile][2] for tile in order]).to(device)
        visible = torch.where(steps < lengths[:, None], histories[:, None] + steps + 1, 1)
        self.visible = visible.to(torch.int32).to(device)
        self.limits = (histories + lengths).to(torch.int32).to(device)
        self.contexts: list[int] = (histories + lengths).tolist()
        self.histories: list[int] = (histories + 1).tolist()


@functools.lru_cache(maxsize=4)
def _query_tiles(seq_lens: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> _QueryTiles:
    """Every full-attention layer of a step asks for the same tiles."""
    return _QueryTiles(seq_lens, starts, device)


def _attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    visible: Tensor,
    limits: Tensor,
    max_context: int,
    tiles: _QueryTiles | None,
) -> Tensor:
    """Softmax attention of query tiles over spans of their blocks, merged span by span (online softmax).

    Args:
        query: [C, Hkv, M, D].
        tables: [C, max_blocks] int32.
        visible: keys that each query sees: [C, 1, M, 1] or [C, 1, 1, 1], at least 1.
        limits: [C, 1, 1, 1], cached positions that the tile's row owns.
        max_context: the largest of ``limits``.
        tiles: with it, spans skip the tiles whose context ends before them, and skip masks where all keys are seen.

    Returns:
        [C, Hkv, M, D] in the query's dtype.
    """
    num_tiles, num_kv_heads, num_queries, head_dim = query.shape
    block_size = k_cache.shape[2]
    flat_query = torch.mul(cast(query, torch.float32), scalar(head_dim**-0.5, query.device))
    flat_query = flat_query.reshape(num_tiles * num_kv_heads, num_queries, head_dim)
    flat_k = k_cache.view(-1, block_size, head_dim)
    flat_v = v_cache.view(-1, block_size, head_dim)
    heads = _counting(0, num_kv_heads, tables.device).unsqueeze(1)
    head_tables = torch.add(heads, tables.unsqueeze(1), alpha=num_kv_heads)  # [C, Hkv, max_blocks]

    num_blocks = -(-max_context // block_size)
    span_blocks = max(1, SPAN_PAIRS // (num_tiles * block_size))
    if tiles is not None:
        span_blocks = min(span_blocks, max(1, 4 * QUERY_TILE // block_size))
    peak = total = acc = None
    for first in range(0, num_blocks, span_blocks):
        last = min(first + span_blocks, num_blocks)
        begin, end = first * block_size, last * block_size
        active = num_tiles if tiles is None else _count_above(tiles.contexts, begin)
        entries = head_tables[:active, :, first:last].reshape(-1)
        batch = active * num_kv_heads
        keys = cast(flat_k.index_select(0, entries), torch.float32).view(batch, end - begin, head_dim)
        values = cast(flat_v.index_select(0, entries), torch.float32).view(batch, end - begin, head_dim)
        scores = torch.bmm(flat_query[:batch], keys.transpose(1, 2))
        if tiles is None or min(tiles.histories[:active]) < end:
            at = _counting(begin, end, limits.device)
            owned = (at.unsqueeze(1) < limits[:active]).to(torch.int32).neg_()
            # Bits are cleared, not multiplied by zero: what lies past a row's context may be NaN.
            values.view(active, num_kv_heads, -1, head_dim).view(torch.int32).bitwise_and_(owned)
            scores.view(active, num_kv_heads, num_queries, -1).masked_fill_(at >= visible[:active], float("-inf"))
        if num_blocks <= span_blocks:
            return cast(torch.bmm(scores.softmax(-1), values).view(query.shape), query.dtype)
        span_peak = scores.amax(-1, keepdim=True)
        if peak is None or total is None or acc is None:
            peak = span_peak
            scores = scores.sub_(peak).exp_()
            total = scores.sum(-1, keepdim=True)
            acc = torch.bmm(scores, values)
            continue
        new_peak = torch.maximum(peak[:batch], span_peak)
        shrink = peak[:batch].sub(new_peak).exp_()
        scores = scores.sub_(new_peak).exp_()
        total[:batch].mul_(shrink).add_(scores.sum(-1, keepdim=True))
        acc[:batch].mul_(shrink).baddbmm_(scores, values)
        peak[:batch] = new_peak
    assert acc is not None and total is not None
    return cast(acc.div_(total).view(query.shape), query.dtype)


@functools.lru_cache(maxsize=64)
def _counting(begin: int, end: int, device: torch.device) -> Tensor:
    """[end − begin] int32: begin, begin + 1, … (the same few in every layer of many steps)."""
    return torch.arange(begin, end, dtype=torch.int32, device=device)


def _count_above(descending: list[int], bound: int) -> int:
    """How many leading entries of a descending list exceed ``bound``."""
    return next((index for index, value in enumerate(descending) if value <= bound), len(descending))
