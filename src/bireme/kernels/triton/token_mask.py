"""Bit masks of tokens that may be drawn, applied to logits on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Token ids of a program."""


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """−inf, in place, for the tokens of ``rows`` whose bit is 0; the other rows are not touched. One launch.

    Args:
        logits: [R, V] float32, rows contiguous.
        rows: [n] int64, distinct.
        words: [n, ceil(V / 32)] int32, contiguous; bit i % 32 of word i // 32 is token i.
    """
    num_ids = logits.shape[1]
    grid = (triton.cdiv(num_ids, BLOCK), len(rows))
    _mask_tokens[grid](logits, rows, words, num_ids, logits.stride(0), words.stride(0), BLOCK=BLOCK, num_warps=8)


@triton.jit
def _mask_tokens(logits, rows, words, num_ids, row_stride, word_stride, BLOCK: tl.constexpr):
    number = tl.program_id(1)
    row = tl.load(rows + number)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_id = ids < num_ids
    word = tl.load(words + number * word_stride + ids // 32, is_id, other=-1)
    is_refused = is_id & (((word >> (ids % 32)) & 1) == 0)
    tl.store(logits + row * row_stride + ids, float("-inf"), is_refused)
