"""Counter-based noise: Philox4x32-10, and the log-uniform numbers of a (seed, output position, token id).

Philox4x32-10 is from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with the
constants of its Random123 library. It is a bijection of a 128-bit counter under a 64-bit key, so a number is looked up
rather than drawn from a stream: nothing a row gets can depend on who else is in the batch.

Layout: key = the seed's low and high 32 bits; counter = (token id // 4, output position, 0, 0); token id % 4 picks one
of the four 32-bit words that come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

WORDS = 4
ROUNDS = 10
MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Array = TypeVar("Array", Tensor, np.ndarray)
RoundKeys = Sequence[tuple[Array, Array]]


def key_schedule(low: Tensor, high: Tensor) -> RoundKeys:
    """The ten round keys of each row.

    Args:
        low: [R] int64, the seeds' low 32 bits.
        high: [R] int64, the seeds' high 32 bits.

    Returns:
        ten pairs of [R, 1] int64; numpy arrays for CPU tensors (see ``philox4x32``), else tensors on the same device.
    """
    rounds = torch.arange(ROUNDS, device=low.device).view(ROUNDS, 1, 1)
    halves = [((word.unsqueeze(1) + rounds * step) & MASK) for word, step in zip((low, high), _KEY_STEPS, strict=True)]
    if low.device.type == "cpu":
        return list(zip(*(half.numpy() for half in halves), strict=True))
    return list(zip(*(half.unbind(0) for half in halves), strict=True))


def philox4x32(counter: tuple[Array, Array, Array, Array], keys: RoundKeys) -> tuple[Array, Array, Array, Array]:
    """Ten rounds of Philox4x32 on every counter at once.

    Works on tensors and on numpy arrays alike, because both have wrapping int64 products; numpy's smaller cost an
    operation makes it the better one on CPU.

    Args:
        counter: four int64 arrays of values in [0, 2³²), of shapes that broadcast together and with the keys.
        keys: from ``key_schedule``.

    Returns:
        four int64 arrays of values in [0, 2³²), of the common shape.
    """
    c0, c1, c2, c3 = counter
    m0, m1 = _MULTIPLIERS
    for number, (k0, k1) in enumerate(keys):
        # c1 and c3 keep whole 64-bit products: their upper halves go with the mask of the round that uses them.
        product0, product1 = c0 * m0, c2 * m1
        if number < 3:  # until every operand's shape has reached both words, they still grow
            c0 = ((product1 >> 32) ^ c1 ^ k0) & MASK
            c2 = ((product0 >> 32) ^ c3 ^ k1) & MASK
        else:
            c0 = product1 >> 32
            c0 ^= c1
            c0 ^= k0
            c0 &= MASK
            c2 = product0 >> 32
            c2 ^= c3
            c2 ^= k1
            c2 &= MASK
        c1, c3 = product1, product0
    return c0, c1 & MASK, c2, c3 & MASK


def log_uniform_range(keys: RoundKeys, positions: Tensor, first: int, count: int) -> Tensor:
    """log(u) for the token ids [first, first + count) of every row; ``first`` is a multiple of 4.

    Args:
        keys: from ``key_schedule``, for R rows.
        positions: [R] int64 output positions.

    Returns:
        [R, count] float64, each log((w + ½) / 2³²) of its 32-bit word w: finite and below 0.
    """
    blocks = torch.arange(first // WORDS, -(-(first + count) // WORDS), device=positions.device)
    words = _words(keys, positions, blocks)
    noise = torch.empty(len(positions), len(blocks), WORDS, dtype=torch.float64, device=positions.device)
    for lane, word in enumerate(words):
        noise[..., lane] = word
    return _log_uniform(noise.view(len(positions), -1))[:, :count]


def log_uniform_at(keys: RoundKeys, positions: Tensor, token_ids: Tensor) -> Tensor:
    """log(u) for chosen token ids ([R, K] int64), the numbers that ``log_uniform_range`` gives them: [R, K] float64."""
    words = torch.stack(_words(keys, positions, token_ids >> 2), dim=-1)
    return _log_uniform(words.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1).to(torch.float64))


def _words(keys: RoundKeys, positions: Tensor, blocks: Tensor) -> list[Tensor]:
    """The four words of every block; ``blocks`` is [n] (the same for all rows) or [R, n]."""
    rows = (positions & MASK).unsqueeze(1)
    zero = torch.zeros(1, dtype=torch.int64, device=positions.device)
    if positions.device.type == "cpu":
        arrays = philox4x32((blocks.numpy(), rows.numpy(), zero.numpy(), zero.numpy()), keys)
        return [torch.from_numpy(word) for word in arrays]
    return list(philox4x32((blocks, rows, zero, zero), keys))


def _log_uniform(words: Tensor) -> Tensor:
    """log((w + ½) / 2³²) of float64 words, in place."""
    # Float64 holds (w + ½) / 2³² exactly for every w, near 0 and near 1 alike, so neither end is rounded to 0 or 1.
    return words.mul_(2.0**-32).add_(2.0**-33).log_()
