"""The model's operations in plain torch: what every other implementation is checked against, and what CPUs run.

Rows of a batch are vectorised; the only Python loops run over chunks or key spans of the longest row. Entries of a
cache that a row does not own (padding, a freed slot's or block's leftovers, NaN included) never reach a result.
"""

from bireme.kernels.reference.attention import (
    paged_decode_attention,
    paged_prefill_attention,
    qk_norm_rope_write_kv,
    rotary_cos_sin,
)
from bireme.kernels.reference.gated_delta import gdn_decode, gdn_prefill
from bireme.kernels.reference.linear import (
    embed,
    linear,
    linear_partials,
    pack_linear_weight,
    vocab_logits,
)
from bireme.kernels.reference.mlp import silu_and_mul
from bireme.kernels.reference.norm import add_rms_norm, rms_norm

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
