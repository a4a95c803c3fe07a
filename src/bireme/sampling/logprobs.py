"""Log-probabilities of the model's own distribution: float32 log-softmax of raw logits, before any processor.

A token's rank is its 1-based place in the order (larger logit first, then smaller id), so ``top_ids[rank - 1]`` is the
token itself wherever rank ≤ k, also among equals. (vLLM counts every token that is at least as likely: the same number
where nothing ties.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bireme.sampling.order import largest, order_keys
from bireme.sampling.processors import MASS_SCALE, mass
from bireme.types import TokenLogprobs

TILE = 1 << 23
"""Logits (rows × ids) scored at once: bounds the temporaries to about 0.2 GB."""


def score(logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
    """Pack what ``unpack`` reads, in one tensor, so that it goes to the host in one transfer.

    Args:
        logits: [n, V] float32, raw.
        token_ids: [n] int64, the chosen tokens.
        count: how many of the largest to list (at most V are).

    Returns:
        [n, 3 + 2·min(count, V)] float64, which holds ids and float32 values exactly: the token, its log-probability,
        its rank, the largest ones' ids, their log-probabilities.
    """
    rows = max(1, TILE // logits.shape[1])
    parts = zip(logits.split(rows), token_ids.split(rows), strict=True)
    tables = [_score(part, ids.unsqueeze(1), min(count, logits.shape[1])) for part, ids in parts]
    return tables[0] if len(tables) == 1 else torch.cat(tables)


def _score(logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
    peak = logits.amax(dim=-1, keepdim=True)
    total = mass((logits - peak).exp_()).sum(dim=-1, keepdim=True)
    log_total = (total.to(torch.float64) / MASS_SCALE).log_().to(torch.float32)
    keys = order_keys(logits)
    rank = (keys > keys.gather(1, token_ids)).sum(dim=-1, keepdim=True) + 1
    ids = token_ids if count == 0 else torch.cat([token_ids, largest(keys, count)], dim=1)
    values = logits.gather(1, ids) - peak - log_total
    return torch.cat(
        [part.to(torch.float64) for part in (token_ids, values[:, :1], rank, ids[:, 1:], values[:, 1:])], 1
    )


def unpack(table: Tensor, counts: Iterable[int]) -> list[TokenLogprobs]:
    """The rows of ``score``'s table as objects; row i lists the ``counts[i]`` largest, or all V where V is less."""
    width = (table.shape[1] - 3) // 2
    return [
        TokenLogprobs(
            token_id=int(row[0]),
            logprob=row[1],
            rank=int(row[2]),
            top_ids=[int(token_id) for token_id in row[3 : 3 + min(count, width)]],
            top_logprobs=row[3 + width : 3 + width + min(count, width)],
        )
        for row, count in zip(table.tolist(), counts, strict=True)
    ]


def prompt_logprobs(logits: Tensor, target_ids: Tensor, k: int) -> list[TokenLogprobs]:
    """Score the prompt tokens that follow each position.

    Args:
        logits: [n, V] float32, raw, of n prompt positions.
        target_ids: [n] int64, the token after each of them, on the same device.
        k: how many of the largest to list, in [0, 20].
    """
    if not len(logits):
        return []
    return unpack(score(logits, target_ids, k), [k] * len(logits))
