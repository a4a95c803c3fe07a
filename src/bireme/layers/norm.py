"""RMS norms of the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from bireme import kernels
from bireme.layers.base import Layer, one_plus


class RMSNorm(Layer):
    """RMS norm with a zero-centred weight: the factor is 1 + w, folded once at load.

    Args:
        size: of the normalised (last) dimension.
        eps: added to the mean square.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, *, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels.for_device(device)
        self.declare("weight", (size,), one_plus)

    def forward(self, x: Tensor) -> Tensor:
        """[N, size] → [N, size], same dtype."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add a block's output (``RowParallelLinear``) to the residual stream, in place: (normalised sum, residual)."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
