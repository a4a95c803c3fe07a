"""The model's operations as Triton kernels for CUDA, under the names and signatures of ``kernels.reference``."""

from bireme.kernels.triton.attention_decode import paged_decode_attention
from bireme.kernels.triton.attention_inputs import qk_norm_rope_write_kv, rotary_cos_sin
from bireme.kernels.triton.attention_prefill import paged_prefill_attention
from bireme.kernels.triton.embedding import embed
from bireme.kernels.triton.gated_delta_decode import gdn_decode
from bireme.kernels.triton.gated_delta_prefill import gdn_prefill
from bireme.kernels.triton.linear import (
    linear,
    linear_partials,
    pack_linear_weight,
    vocab_logits,
)
from bireme.kernels.triton.mlp import silu_and_mul
from bireme.kernels.triton.norm import add_rms_norm, rms_norm

__all__ = [
    "add_rms_norm",
    "embed",
    "gdn_decode",
    "gdn_prefill",
    "linear",
    "linear_partials",
    "pack_linear_weight",
    "paged_decode_attention",
    "paged_prefill_attention",
    "qk_norm_rope_write_kv",
    "rms_norm",
    "rotary_cos_sin",
    "silu_and_mul",
    "vocab_logits",
]
