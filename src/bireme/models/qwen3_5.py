"""Qwen3.5, the text model: gated delta-rule layers with a full-attention layer every few.

h ← h + mixer(norm(h)); h ← h + mlp(norm(h)). The residual stream is added where the next norm reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from bireme import kernels
from bireme.config import FULL_ATTENTION, ModelConfig, RankShape, rank_shape
from bireme.distributed import TpGroup
from bireme.errors import CheckpointError
from bireme.layers.attention import Attention
from bireme.layers.base import Layer
from bireme.layers.batch import Batch
from bireme.layers.gated_delta_net import GatedDeltaNet
from bireme.layers.linear import LMHead, VocabParallelEmbedding
from bireme.layers.mlp import MLP
from bireme.layers.norm import RMSNorm


class LayerTensors(Protocol):
    """A pool that hands each layer of one kind its two tensors (cache/kv_pool.py, cache/state_pool.py)."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]: ...


class DecoderLayer(Layer):
    """One block: a token mixer (linear or full attention) and an MLP, each behind a norm.

    Args:
        kind: the layer's entry in ``layer_types``.
        index: its index among the layers of its kind, which is its index in their pool.
    """

    def __init__(
        self, kind: str, index: int, model: ModelConfig, local: RankShape, group: TpGroup, *, device: torch.device
    ) -> None:
        super().__init__()
        self.index = index
        self.full_attention: Attention | None = None
        self.linear_attention: GatedDeltaNet | None = None
        if kind == FULL_ATTENTION:
            self.full_attention = Attention(model, local, group, device=device)
            self.adopt(self_attn=self.full_attention)
        else:
            self.linear_attention = GatedDeltaNet(model, local, group, device=device)
            self.adopt(linear_attn=self.linear_attention)
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, device=device)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, device=device)
        self.mlp = MLP(model.hidden_size, local.intermediate_size, group, device=device)
        self.adopt(
            input_layernorm=self.input_layernorm,
            post_attention_layernorm=self.post_attention_layernorm,
            mlp=self.mlp,
        )

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        batch: Batch,
        rotary: tuple[Tensor, Tensor],
        kv: LayerTensors,
        state: LayerTensors,
    ) -> tuple[Tensor, Tensor]:
        """(the last block's output, to be added, or None; residual stream [N, H]) → the same two after this block."""
        if x is None:
            x = self.input_layernorm.forward(residual)
        else:
            x, residual = self.input_layernorm.add_forward(x, residual)
        if self.linear_attention is not None:
            x = self.linear_attention.forward(x, batch, state.layer(self.index))
        else:
            assert self.full_attention is not None
            x = self.full_attention.forward(x, batch, rotary, kv.layer(self.index))
        x, residual = self.post_attention_layernorm.add_forward(x, residual)
        return self.mlp.forward(x), residual


class Qwen3_5ForCausalLM(Layer):
    """One rank's shard of the model.

    Args:
        model: global sizes.
        group: this rank's tensor-parallel group.
        dtype: of activations and matrices (float32 or bfloat16).
        device: where the weights are.
    """

    def __init__(self, model: ModelConfig, group: TpGroup, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        device = torch.device(device)
        local = rank_shape(model, group.size)
        self.config, self.group, self.dtype, self.device = model, group, dtype, device
        self.kernels = kernels.for_device(device)
        self.embed_tokens = VocabParallelEmbedding(local.vocab_size, model.hidden_size, group, device=device)
        exponents = torch.arange(0, model.rotary_dim, 2, dtype=torch.float32, device=device) / model.rotary_dim
        self.rotary_frequencies = 1.0 / model.rope_theta**exponents
        self.layers: list[DecoderLayer] = []
        seen: dict[str, int] = {}
        for kind in model.layer_types:
            index = seen.get(kind, 0)
            seen[kind] = index + 1
            self.layers.append(DecoderLayer(kind, index, model, local, group, device=device))
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, device=device)
        self.lm_head = LMHead(
            local.vocab_size,
            model.hidden_size,
            model.vocab_size,
            group,
            tied=self.embed_tokens if model.tie_word_embeddings else None,
            device=device,
        )
        self.adopt(embed_tokens=self.embed_tokens, norm=self.norm, lm_head=self.lm_head)
        self.adopt(**{f"layers.{number}": layer for number, layer in enumerate(self.layers)})

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take every weight of this rank, by internal name, each exactly once and in any order.

        Raises:
            CheckpointError: a name that the model does not have, a repeated or missing one, or a wrong shape.
        """
        open_slots = {name: (shape, take) for name, shape, take in self.expected()}
        known = set(open_slots)
        for name, tensor in weights:
            if name not in open_slots:
                problem = "came twice" if name in known else "is not part of this model"
                raise CheckpointError(f"loading rank {self.group.rank}'s weights: {name} {problem}")
            shape, take = open_slots.pop(name)
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"loading rank {self.group.rank}'s weights: {name} has shape {list(tensor.shape)}, "
                    f"expected {list(shape)}"
                )
            take(tensor)
        if open_slots:
            raise CheckpointError(
                f"loading rank {self.group.rank}'s weights: {len(open_slots)} missing, "
                f"the first is {next(iter(open_slots))}"
            )

    def forward(self, token_ids: Tensor, batch: Batch, kv: LayerTensors, state: LayerTensors) -> Tensor:
        """Run all rows of a step: [N] int64 → hidden rows [N, H] after the final norm. Advances ``kv`` and ``state``.

        The caller is in inference mode. Every rank of the group runs the same steps in the same order.
        """
        rotary = self.kernels.rotary_cos_sin(batch.positions, self.rotary_frequencies)
        residual = self.embed_tokens.forward(token_ids)
        x: Tensor | None = None
        for layer in self.layers:
            x, residual = layer.forward(x, residual, batch, rotary, kv, state)
        assert x is not None
        return self.norm.add_forward(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """Hidden rows [R, H] → logits [R, V] float32 on rank 0, None on the other ranks (all must call)."""
        return self.lm_head.forward(hidden)
