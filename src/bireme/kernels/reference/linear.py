"""Matrix products with weights, and the two ends of the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 8
"""Up to this many rows, ``x @ Wᵀ`` with a row-major W is the faster vocabulary product on CPUs."""


def pack_linear_weight(weight: Tensor) -> Tensor:
    """A checkpoint's [out, in] weight in the layout that ``linear`` reads: [in, out], contiguous.

    With 9 to 63 rows, a CPU's float32 product with a transposed right-hand side was 4 to 6 times slower.
    """
    return weight.t().contiguous()


def linear(x: Tensor, packed: Tensor) -> Tensor:
    """[N, in] times a weight from ``pack_linear_weight`` → [N, out]."""
    return torch.mm(x, packed)


linear_partials = linear
"""``linear`` for a result that goes to ``add_rms_norm``, which other implementations may leave as partial sums."""


def embed(token_ids: Tensor, weight: Tensor, first_id: int | None) -> Tensor:
    """Rows of a vocabulary table: [N] int64 ids → [N, H].

    Args:
        first_id: None when ``weight`` is the whole table; else the id of the shard's first row, and ids that the shard
            does not hold give zeros.
    """
    if first_id is None:
        return F.embedding(token_ids, weight)
    rows = weight.shape[0]
    local = token_ids - first_id
    outside = (local < 0) | (local >= rows)
    return F.embedding(local.clamp_(0, rows - 1), weight).masked_fill_(outside.unsqueeze(-1), 0.0)


def vocab_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[R, H] times a row-major vocabulary shard [V, H] (it may be the embedding's) → [R, V] float32."""
    if hidden.shape[0] <= FEW_ROWS:
        return F.linear(hidden, weight).float()
    return torch.mm(weight, hidden.t()).t().contiguous().float()
