"""The gated activation of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.launch import pdl

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = columns < size
    if PDL:
        tl.extra.cuda.gdc_wait()
    source = gate_up + row * 2 * size + columns
    gate = tl.load(source, mask=within, other=0.0)
    up = tl.load(source + size, mask=within, other=0.0)
    wide = gate.to(tl.float32)
    gated = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out + row * size + columns, gated.to(gate.dtype), mask=within)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [N, 2I] contiguous rows gate|up → [N, I], rounded once."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _silu_and_mul_kernel[(num_rows, triton.cdiv(size, BLOCK))](
            gate_up, out, size, BLOCK=BLOCK, num_warps=4, **pdl(gate_up.device)
        )
    return out
