"""What a step must move or multiply at least, per rank, from the model's sizes alone.

A decode step reads every weight once, except that of the embedding table only single rows are needed (a tied table is
read once, as the lm_head). Each row reads and writes its recurrent state, reads its convolution state and the K and V
of its context. Divided by the memory's read bandwidth that is the shortest possible step.
"""

from __future__ import annotations

import math

from bireme.cache.capacity import DTYPE_BYTES, kv_bytes_per_token
from bireme.checkpoint.names import EMBEDDING
from bireme.checkpoint.shard_spec import rank_shards
from bireme.config import ModelConfig, rank_shape

H200_READ_BYTES_PER_SECOND = 4.52e12
"""What a streaming sum reaches on an H200 (issue 4), not the data sheet's 4.8e12."""


def weight_bytes(model: ModelConfig, tp_size: int, dtype: str) -> int:
    """All weights of rank 0, padding included."""
    return sum(_bytes_by_name(model, tp_size, dtype).values())


def step_weight_bytes(model: ModelConfig, tp_size: int, dtype: str) -> int:
    """Weights of rank 0 that a decode step reads."""
    sizes = _bytes_by_name(model, tp_size, dtype)
    return sum(sizes.values()) - (0 if model.tie_word_embeddings else sizes[EMBEDDING])


def _bytes_by_name(model: ModelConfig, tp_size: int, dtype: str) -> dict[str, int]:
    return {
        shard.parameter.name: math.prod(shard.shape) * (4 if shard.parameter.is_float32 else DTYPE_BYTES[dtype])
        for shard in rank_shards(model, 0, tp_size)
    }


def row_bytes(model: ModelConfig, tp_size: int, dtype: str, context: float) -> float:
    """Bytes that one decode row moves on rank 0 beside the weights: 2 × recurrent + conv + context × KV."""
    local = rank_shape(model, tp_size)
    keys = local.linear_num_key_heads * model.linear_key_head_dim
    values = local.linear_num_value_heads * model.linear_value_head_dim
    recurrent = values * model.linear_key_head_dim * DTYPE_BYTES["float32"]
    conv = (2 * keys + values) * (model.linear_conv_kernel_dim - 1) * DTYPE_BYTES[dtype]
    return model.num_linear_layers * (2 * recurrent + conv) + context * kv_bytes_per_token(model, tp_size, dtype)


def decode_limit_seconds(
    model: ModelConfig, tp_size: int, dtype: str, *, rows: int, context: float, bytes_per_second: float
) -> float:
    """The shortest decode step of ``rows`` rows with ``context`` tokens each."""
    moved = step_weight_bytes(model, tp_size, dtype) + rows * row_bytes(model, tp_size, dtype, context)
    return moved / bytes_per_second


def prefill_flops(model: ModelConfig, lengths: list[int]) -> int:
    """Multiplications and additions of a prefill over all ranks: projections (2 a weight and token), the lm_head for
    one row a prompt, and causal attention (4 · heads · head_dim a query and key). The delta rule is not counted."""
    matrices = sum(
        math.prod(shard.shape)
        for shard in rank_shards(model, 0, 1)
        if shard.parameter.name.startswith("layers.") and len(shard.shape) == 2 and "conv1d" not in shard.parameter.name
    )
    head = 2 * model.vocab_size * model.hidden_size * len(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attention = model.num_full_layers * 4 * model.num_attention_heads * model.head_dim * pairs
    return 2 * matrices * sum(lengths) + head + attention
