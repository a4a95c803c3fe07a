"""Logits processors and candidate filters: tensors in, tensors out, every one of them elementwise or exact per row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bireme.sampling.order import largest, order_keys

PROMPT_FLAG = 1 << 30
"""Set in a penalty count when the token occurs in the prompt; the bits below count its occurrences in the output."""

MASS_SCALE = float(1 << 42)
"""Weights in [0, 1] become integers of 2⁻⁴² before they are summed: integer sums are exact, so they depend neither on
the order in which a device adds them nor on the batch. 2²¹ tokens fit an int64; a term loses less than 2.3e-13."""

SHORT_LIST = 512
"""On CPU, top-p without top-k first looks whether so many candidates hold the mass, before it sorts the vocabulary."""


def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    repetition: Tensor | None,
    frequency: Tensor | None,
    presence: Tensor | None,
) -> Tensor:
    """Repetition, then frequency, then presence penalty, in vLLM's meaning; None where no row uses one.

    Repetition (tokens of prompt and output): a positive logit is divided by it, another one multiplied. Frequency and
    presence (output tokens only): minus frequency × occurrences, minus presence where there is any.

    Args:
        logits: [n, V] float32.
        counts: [n, V] int32, see PROMPT_FLAG.
        repetition: [n, 1] float32; likewise ``frequency`` and ``presence``.

    Returns:
        [n, V] float32.
    """
    # Selection by exact products with 0 and 1: torch.where costs ten times as much on CPU.
    if repetition is not None:
        seen = counts.clamp(max=1).to(torch.float32)
        factor = (seen * repetition).add_(1.0 - seen)
        logits = (logits.clamp(min=0.0) / factor).add_(logits.clamp(max=0.0).mul_(factor))
    if frequency is not None or presence is not None:
        generated = (counts & (PROMPT_FLAG - 1)).to(torch.float32)
        if frequency is not None:
            logits = logits - generated * frequency
        if presence is not None:
            logits = logits - generated.clamp_(max=1.0).mul_(presence)
    return logits


def suppress(logits: Tensor, suppressed: Tensor, output_positions: Tensor, min_tokens: Tensor) -> Tensor:
    """−inf for ``suppressed`` ids ([n, V] bool) of rows whose position ([n, 1]) is below ``min_tokens`` ([n, 1])."""
    return logits.masked_fill(suppressed & (output_positions < min_tokens), -torch.inf)


def apply_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """−inf, in place, for the tokens of ``rows`` whose bit is 0.

    Args:
        logits: [R, V] float32, contiguous.
        rows: [n] int64, distinct.
        words: [n, ceil(V / 32)] int32; bit i % 32 of word i // 32 is token i.
    """
    if logits.is_cuda:
        from bireme.kernels.triton.token_mask import mask_tokens

        mask_tokens(logits, rows, words)
        return
    refused = np.unpackbits(~words.numpy().view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    values = logits.numpy()
    for row, is_refused in zip(rows.tolist(), refused.view(bool), strict=True):
        np.copyto(values[row], -np.inf, where=is_refused)


def weights_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((logit − the row's largest) / temperature): [n, V] float32, the largest is exactly 1."""
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature).exp_()


def mass(weights: Tensor) -> Tensor:
    """The weights as int64 multiples of 1 / MASS_SCALE (rounded down)."""
    return (weights * MASS_SCALE).to(torch.int64)


def top_k_top_p(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, largest_k: int
) -> tuple[Tensor, Tensor]:
    """The candidates that top-k and then top-p leave.

    top-k keeps exactly k tokens of the order (see ``order``: smaller ids win ties at the edge). top-p keeps, among
    those and with their masses rescaled to 1, the shortest run of the order whose mass reaches p; the token that
    reaches it is in. So at least one token stays.

    Args:
        logits: [n, V] float32.
        temperature: [n, 1] float32.
        top_k: [n, 1] int64 in [1, V]; V is off.
        top_p: [n, 1] float64; inf is off.
        largest_k: a host-side bound of ``top_k``, at most V.

    Returns:
        token ids [n, K] int64 in order, and weights [n, K] float32, 0 for those that were filtered out; K ≤ largest_k.
    """
    keys = order_keys(logits)
    if logits.device.type != "cpu":
        ids, weights, kept, _ = _candidates(keys, logits, temperature, top_k, top_p, largest_k, None)
        return ids, weights.mul_(kept)
    complete = False
    if largest_k > 4 * SHORT_LIST:
        total = mass(weights_of(logits, temperature)).sum(dim=-1, keepdim=True)
        ids, weights, kept, is_complete = _candidates(keys, logits, temperature, top_k, top_p, SHORT_LIST, total)
        complete = bool(is_complete.all())
    if not complete:
        ids, weights, kept, _ = _candidates(keys, logits, temperature, top_k, top_p, largest_k, None)
    # There is no device to wait for, so look at how many candidates are left and carry only those.
    count = max(1, int(kept.sum(dim=-1).max()))
    return ids[:, :count], weights[:, :count].mul_(kept[:, :count])


def _candidates(
    keys: Tensor, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, count: int, total: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, weights and what is kept of the first ``count`` tokens, [n, count]; and whether that is all, [n, 1] bool.

    ``total`` is the mass of each whole row, needed where ``count`` does not cover every row's top_k.
    """
    ids = largest(keys, count)
    weights = weights_of(logits.gather(1, ids), temperature)
    within_k = torch.arange(count, device=ids.device) < top_k
    masses = mass(weights).mul_(within_k)
    mass_up_to = masses.cumsum(dim=-1)
    listed = mass_up_to[:, -1:]
    covers_k = top_k <= count
    if total is not None:
        total = torch.where(covers_k, listed, total)
    target = (listed if total is None else total).to(torch.float64) * top_p
    is_complete = covers_k | ((top_k == logits.shape[1]) & (listed.to(torch.float64) >= target))
    kept = within_k & ((mass_up_to - masses).to(torch.float64) < target)
    return ids, weights, kept, is_complete


def min_p_filter(weights: Tensor, min_p: Tensor) -> Tensor:
    """Weights below ``min_p`` ([n, 1] float32) × the largest (which is 1) become 0, in place."""
    return weights.mul_(weights >= min_p)
