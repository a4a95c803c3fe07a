"""Drawing one token of each row by an exponential race: with E = −log(u), the token of the largest weight / E wins.

Token i wins with probability weightᵢ / Σ weights (the minimum of independent exponentials of rate weightᵢ): the same
race as Gumbel-max. A token's u is a function of (seed, output position, token id), so leaving out tokens of weight 0
changes nothing, and ``draw_among`` and ``draw_full`` agree. Equal scores go to the smaller id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bireme.sampling.order import argmax_rows
from bireme.sampling.philox import RoundKeys, log_uniform_at, log_uniform_range

_NO_ID = 1 << 62

CPU_TILE = 1 << 18
"""Tokens (rows × ids) whose noise is made at once on CPU: bounds the temporaries to about 8 MB, near the caches."""

DEVICE_TILE = 1 << 23
"""The same elsewhere: bounds the temporaries to about 0.2 GB."""


def draw_full(weights: Tensor, keys: RoundKeys, positions: Tensor) -> Tensor:
    """Draw with noise for every token id.

    Args:
        weights: [n, V] float32 in [0, 1], not normalised; 0 is never drawn while any weight is positive.
        keys: round keys of the n rows' seeds.
        positions: [n] int64 output positions.

    Returns:
        [n] int64 token ids.
    """
    num_rows, vocab_size = weights.shape
    tile = CPU_TILE if weights.device.type == "cpu" else DEVICE_TILE
    width = max(4, tile // num_rows // 4 * 4)
    token_ids: Tensor | None = None
    best: Tensor | None = None
    for first in range(0, vocab_size, width):
        part = weights[:, first : first + width]
        # log(u) / weight is −E / weight: the largest is the winner, and a weight of 0 gives −inf.
        scores = log_uniform_range(keys, positions, first, part.shape[1]).div_(part)
        winners = argmax_rows(scores)
        if width >= vocab_size:
            return winners
        reached = scores.gather(1, winners.unsqueeze(1)).squeeze(1)
        if token_ids is None or best is None:
            token_ids, best = winners, reached
        else:
            ahead = reached > best  # strictly: the smaller id keeps a tie
            token_ids, best = torch.where(ahead, winners + first, token_ids), torch.where(ahead, reached, best)
    assert token_ids is not None
    return token_ids


def draw_among(token_ids: Tensor, weights: Tensor, keys: RoundKeys, positions: Tensor) -> Tensor:
    """Draw among candidates, ``token_ids`` [n, K] int64 (distinct in a row, most likely first) with ``weights`` [n, K]
    float32: [n] int64. See ``draw_full``."""
    scores = log_uniform_at(keys, positions, token_ids).div_(weights)
    is_best = scores == scores.amax(dim=-1, keepdim=True)
    # A row of NaN has no best; its most likely candidate keeps the id in range.
    return torch.where(is_best.any(dim=-1), torch.where(is_best, token_ids, _NO_ID).amin(dim=-1), token_ids[:, 0])
