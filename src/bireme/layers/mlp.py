"""The SwiGLU feed-forward block."""

from __future__ import annotations

import torch
from torch import Tensor

from bireme import kernels
from bireme.distributed import TpGroup
from bireme.layers.base import Layer
from bireme.layers.linear import ColumnParallelLinear, RowParallelLinear


class MLP(Layer):
    """``down(silu(gate(x)) · up(x))``; ``intermediate_size`` is rank-local."""

    def __init__(self, hidden_size: int, intermediate_size: int, group: TpGroup, *, device: torch.device) -> None:
        super().__init__()
        self.kernels = kernels.for_device(device)
        self.gate_up_proj = ColumnParallelLinear(hidden_size, 2 * intermediate_size, device=device)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group, device=device)
        self.adopt(gate_up_proj=self.gate_up_proj, down_proj=self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] → [N, H] for the next norm to add (``RowParallelLinear``)."""
        return self.down_proj.forward(self.kernels.silu_and_mul(self.gate_up_proj.forward(x)))
