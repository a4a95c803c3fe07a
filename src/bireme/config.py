"""Every size and limit of the engine, as plain immutable structs (no torch). Built once, sent whole to every rank."""

from __future__ import annotations

import msgspec

from bireme.errors import ConfigError

CHUNK_ALIGNMENT = 64
"""Prefill chunks end on multiples of this many tokens (except the last): the chunk length of the delta rule."""

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The text model's sizes, all read from ``config.json``; global (not rank-local) counts."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_linear_layers(self) -> int:
        return self.layer_types.count(LINEAR_ATTENTION)

    @property
    def num_full_layers(self) -> int:
        return self.layer_types.count(FULL_ATTENTION)


class RankShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank owns: rank-local counts. ``vocab_size`` is rounded up, so the last rank may hold padding rows.

    ``kv_replicas`` ranks in a row share each kv head (1 unless tp_size exceeds the kv heads).
    """

    tp_size: int
    num_attention_heads: int
    num_key_value_heads: int
    kv_replicas: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    intermediate_size: int
    vocab_size: int


def rank_shape(model: ModelConfig, tp_size: int) -> RankShape:
    """Split ``model`` over ``tp_size`` ranks.

    Raises:
        ConfigError: a count that does not divide; names the config.json field and both numbers.
    """
    if tp_size < 1:
        raise ConfigError(f"--tensor-parallel-size is {tp_size}: it must be at least 1")

    def divide(field: str) -> int:
        count = getattr(model, field)
        if count % tp_size:
            raise ConfigError(
                f"cannot split the model over {tp_size} ranks: {field} is {count}, which {tp_size} does not divide "
                "(--tensor-parallel-size)"
            )
        return count // tp_size

    kv_heads = model.num_key_value_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ConfigError(
            f"cannot split the model over {tp_size} ranks: num_key_value_heads is {kv_heads}, which neither divides "
            f"into {tp_size} nor is divided by it (--tensor-parallel-size)"
        )
    return RankShape(
        tp_size=tp_size,
        num_attention_heads=divide("num_attention_heads"),
        num_key_value_heads=max(1, kv_heads // tp_size),
        kv_replicas=max(1, tp_size // kv_heads),
        linear_num_key_heads=divide("linear_num_key_heads"),
        linear_num_value_heads=divide("linear_num_value_heads"),
        intermediate_size=divide("intermediate_size"),
        vocab_size=-(-model.vocab_size // tp_size),
    )


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults of ``generation_config.json``; None where the file says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is split. ``backend``: auto, shm (same-host CPU ranks), gloo or nccl."""

    tp_size: int = 1
    backend: str = "auto"


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """State and KV memory. ``memory_bytes`` None: worked out from the device (see cache/capacity.py)."""

    block_size: int = CHUNK_ALIGNMENT
    memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.90


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step and of the queue. ``max_model_len`` None: the model's own limit.

    ``max_waiting`` bounds the queue: a request that would exceed it is refused (429 in the server).
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_waiting: int = 4096


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine and its ranks need to start.

    ``masked_token_ranges``: half-open id ranges that the tokenizer cannot decode; they are never sampled.
    ``load_format`` "dummy" fills weights at random (benchmarks). ``enforce_eager`` is the plain path on CUDA.
    """

    model_path: str
    model: ModelConfig
    generation: GenerationDefaults = GenerationDefaults()
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int = 0
    load_format: str = "auto"
    enforce_eager: bool = False
    masked_token_ranges: list[tuple[int, int]] = []
    show_progress: bool = False


class CacheCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's memory holds, in counts that all ranks agree on. Slot 0 and block 0 (padding) are not counted."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    bytes_per_slot: int
    bytes_per_block: int
    weight_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of KV that fit, over all requests together."""
        return self.num_blocks * self.block_size
