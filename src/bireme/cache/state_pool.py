"""The recurrent and convolution state of a rank, by state slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bireme.config import CacheCapacity, ModelConfig, rank_shape


class StatePool:
    """State of every linear-attention layer, by slot; slot 0 belongs to padding rows.

    recurrent: [num_linear_layers, num_slots + 1, Hv, Dk, Dv] float32; conv: [num_linear_layers, num_slots + 1,
    kernel − 1, 2·Kd + Vd] in the activation dtype, the last inputs of the convolution, oldest first.
    """

    def __init__(
        self, model: ModelConfig, tp_size: int, capacity: CacheCapacity, dtype: torch.dtype, device: torch.device
    ) -> None:
        local = rank_shape(model, tp_size)
        slots = (model.num_linear_layers, capacity.num_slots + 1)
        key_dim, value_dim = model.linear_key_head_dim, model.linear_value_head_dim
        channels = 2 * local.linear_num_key_heads * key_dim + local.linear_num_value_heads * value_dim
        self.recurrent = torch.zeros(
            (*slots, local.linear_num_value_heads, key_dim, value_dim), dtype=torch.float32, device=device
        )
        self.conv = torch.zeros((*slots, model.linear_conv_kernel_dim - 1, channels), dtype=dtype, device=device)
        self._layers = list(zip(self.recurrent.unbind(0), self.conv.unbind(0), strict=True))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(recurrent, conv) of the index-th linear-attention layer, over all slots."""
        return self._layers[index]

    def clear(self, slots: Sequence[int]) -> None:
        """Zero every layer's state of ``slots``. (A prefill row with start 0 does not need it: it reads nothing.)"""
        chosen = torch.tensor(slots, dtype=torch.int64, device=self.conv.device)
        self.recurrent.index_fill_(1, chosen, 0.0)
        self.conv.index_fill_(1, chosen, 0.0)
