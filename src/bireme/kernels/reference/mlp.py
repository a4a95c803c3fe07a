"""The gated activation of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [N, 2I] rows gate|up → [N, I]."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up.split_with_sizes((size, size), -1)
    return F.silu(gate).mul_(up)
