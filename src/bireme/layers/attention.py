"""Gated full attention over the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from bireme import kernels
from bireme.config import ModelConfig, RankShape
from bireme.distributed import TpGroup
from bireme.layers.base import Layer, one_plus
from bireme.layers.batch import Batch
from bireme.layers.linear import ColumnParallelLinear, RowParallelLinear


class Attention(Layer):
    """Queries with output gates, normalised and rotated q and k, grouped heads, causal softmax, sigmoid gate.

    Args:
        model: global sizes.
        local: this rank's head counts.
    """

    q_norm_weight: Tensor
    k_norm_weight: Tensor
    qk_weight: Tensor

    def __init__(self, model: ModelConfig, local: RankShape, group: TpGroup, *, device: torch.device) -> None:
        super().__init__()
        self.num_heads = local.num_attention_heads
        self.num_kv_heads = local.num_key_value_heads
        self.eps = model.rms_norm_eps
        self.kernels = kernels.for_device(device)
        head_dim = model.head_dim
        qkv_size = 2 * (self.num_heads + self.num_kv_heads) * head_dim
        self.qkv_proj = ColumnParallelLinear(model.hidden_size, qkv_size, device=device)
        self.o_proj = RowParallelLinear(self.num_heads * head_dim, model.hidden_size, group, device=device)
        self.qk_weight = torch.empty(self.num_heads + self.num_kv_heads, head_dim, device=device)
        self.declare("q_norm.weight", (head_dim,), self._take_q_norm, "q_norm_weight")
        self.declare("k_norm.weight", (head_dim,), self._take_k_norm, "k_norm_weight")
        self.adopt(qkv_proj=self.qkv_proj, o_proj=self.o_proj)

    def _take_q_norm(self, weight: Tensor) -> Tensor:
        return self.qk_weight[: self.num_heads].copy_(one_plus(weight))

    def _take_k_norm(self, weight: Tensor) -> Tensor:
        return self.qk_weight[self.num_heads :].copy_(one_plus(weight))

    def forward(self, x: Tensor, batch: Batch, rotary: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor]) -> Tensor:
        """[N, H] → [N, H]; the step's K and V are written into ``cache``.

        Args:
            rotary: cosine and sine of the step's positions, each [N, rotary_dim / 2] float32.
            cache: this layer's K and V blocks.
        """
        ops = self.kernels
        k_cache, v_cache = cache
        cos, sin = rotary
        query, gate = ops.qk_norm_rope_write_kv(
            self.qkv_proj.forward(x), self.qk_weight, cos, sin, k_cache, v_cache, batch.kv_indices, self.eps
        )
        split, prefill = batch.num_decode, batch.prefill
        # Rows of both kinds: each kernel fills its part of one buffer.
        out = query.new_empty(query.shape[0], query[0].numel()) if split and prefill is not None else None
        if split:
            attended = ops.paged_decode_attention(
                query[:split],
                gate[:split],
                k_cache,
                v_cache,
                batch.decode_block_tables,
                batch.decode_context_lens,
                batch.max_decode_context,
                None if out is None else out[:split],
            )
        if prefill is not None:
            attended = ops.paged_prefill_attention(
                query[split:],
                gate[split:],
                k_cache,
                v_cache,
                prefill.block_tables,
                prefill.cu_seqlens,
                prefill.row_starts,
                prefill.seq_lens,
                prefill.starts,
                None if out is None else out[split:],
            )
        return self.o_proj.forward(attended if out is None else out)
