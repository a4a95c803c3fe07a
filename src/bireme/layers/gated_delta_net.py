"""Gated DeltaNet: linear attention with a matrix state a head."""

from __future__ import annotations

import torch
from torch import Tensor

from bireme import kernels
from bireme.config import ModelConfig, RankShape
from bireme.distributed import TpGroup
from bireme.layers.base import Layer, in_float32
from bireme.layers.batch import Batch
from bireme.layers.linear import ColumnParallelLinear, RowParallelLinear


class GatedDeltaNet(Layer):
    """One fused input projection (rows q|k|v|z|b|a), convolution and delta rule over state slots, output projection.

    Args:
        model: global sizes.
        local: this rank's head counts.
    """

    conv_weight: Tensor
    dt_bias: Tensor
    neg_exp_a: Tensor
    norm_weight: Tensor

    def __init__(self, model: ModelConfig, local: RankShape, group: TpGroup, *, device: torch.device) -> None:
        super().__init__()
        num_v_heads = local.linear_num_value_heads
        keys = local.linear_num_key_heads * model.linear_key_head_dim
        values = num_v_heads * model.linear_value_head_dim
        channels = 2 * keys + values
        self.eps = model.rms_norm_eps
        self.values = values
        self.kernels = kernels.for_device(device)
        self.in_proj = ColumnParallelLinear(model.hidden_size, channels + values + 2 * num_v_heads, device=device)
        self.out_proj = RowParallelLinear(values, model.hidden_size, group, device=device)
        self.declare(
            "conv1d.weight",
            (channels, model.linear_conv_kernel_dim),
            lambda weight: weight.float().t().contiguous(),
            "conv_weight",
        )
        self.declare("dt_bias", (num_v_heads,), in_float32, "dt_bias")
        self.declare("A_log", (num_v_heads,), lambda a_log: a_log.float().exp().neg(), "neg_exp_a")
        # The gated norm's weight is plain, unlike every other norm's.
        self.declare("norm.weight", (model.linear_value_head_dim,), in_float32, "norm_weight")
        self.adopt(in_proj=self.in_proj, out_proj=self.out_proj)

    def forward(self, x: Tensor, batch: Batch, state: tuple[Tensor, Tensor]) -> Tensor:
        """[N, H] → [N, H]; the rows' slots in ``state`` (recurrent, conv) are advanced in place."""
        ops = self.kernels
        recurrent, conv = state
        mixed = self.in_proj.forward(x)
        weights = (self.conv_weight, self.dt_bias, self.neg_exp_a, self.norm_weight)
        split, prefill = batch.num_decode, batch.prefill
        # Both row kinds write into one buffer; with one kind only, the kernel's own result is that buffer.
        mixes = split > 0 and prefill is not None
        out = mixed.new_empty(len(mixed), self.values) if mixes else None
        if split:
            decoded = ops.gdn_decode(
                mixed[:split],
                *weights,
                recurrent,
                conv,
                batch.decode_slots,
                batch.decode_slot_range,
                batch.decode_in_order,
                self.eps,
                None if out is None else out[:split],
            )
            if prefill is None:
                return self.out_proj.forward(decoded)
        assert prefill is not None
        prefilled = ops.gdn_prefill(
            mixed[split:],
            *weights,
            recurrent,
            conv,
            prefill.slots,
            prefill.cu_seqlens,
            prefill.row_starts,
            prefill.chunks,
            prefill.seq_lens,
            prefill.starts,
            self.eps,
            None if out is None else out[split:],
        )
        return self.out_proj.forward(prefilled if out is None else out)
