"""Rows of the vocabulary table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.launch import pdl

BLOCK = 1024


@triton.jit
def _embed_kernel(token_ids, weight, out, first_id, num_rows, hidden_size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(token_ids + token) - first_id
    inside = (row >= 0) & (row < num_rows)
    within = columns < hidden_size
    values = tl.load(weight + row * hidden_size + columns, mask=within & inside, other=0.0)
    tl.store(out + token * hidden_size + columns, values, mask=within)


def embed(token_ids: Tensor, weight: Tensor, first_id: int | None) -> Tensor:
    """Rows of a vocabulary table: [N] int64 ids → [N, H].

    Args:
        weight: [V, H], contiguous.
        first_id: None when ``weight`` is the whole table; else the id of the shard's first row. Ids that the shard does
            not hold give zeros, and so do ids that no table has.
    """
    num_tokens, (num_rows, hidden_size) = token_ids.shape[0], weight.shape
    out = torch.empty(num_tokens, hidden_size, dtype=weight.dtype, device=weight.device)
    if num_tokens:
        _embed_kernel[(num_tokens, triton.cdiv(hidden_size, BLOCK))](
            token_ids, weight, out, first_id or 0, num_rows, hidden_size, BLOCK=BLOCK, num_warps=4, **pdl(weight.device)
        )
    return out
