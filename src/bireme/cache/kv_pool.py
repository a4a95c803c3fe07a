"""The paged KV memory of a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from bireme.config import CacheCapacity, ModelConfig, rank_shape


class KvPool:
    """K and V of every full-attention layer, in blocks; block 0 belongs to padding rows.

    One tensor a kind: [num_full_layers, num_blocks + 1, Hkv, block_size, head_dim], so that a head's block is one
    contiguous tile. A freed block keeps what it held: kernels never read past what a row has written.
    """

    def __init__(
        self, model: ModelConfig, tp_size: int, capacity: CacheCapacity, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (
            model.num_full_layers,
            capacity.num_blocks + 1,
            rank_shape(model, tp_size).num_key_value_heads,
            capacity.block_size,
            model.head_dim,
        )
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = list(zip(self.k.unbind(0), self.v.unbind(0), strict=True))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k, v) of the index-th full-attention layer, each [num_blocks + 1, Hkv, block_size, head_dim]."""
        return self._layers[index]
