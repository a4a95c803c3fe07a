"""Flags → EngineConfig: every default filled in and every limit checked before a weight is read or a rank started."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bireme.cache.capacity import check_memory_flag
from bireme.checkpoint.hf_config import load_generation_defaults, load_model_config
from bireme.config import (
    CHUNK_ALIGNMENT,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    rank_shape,
)
from bireme.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
BACKENDS = ("auto", "shm", "gloo", "nccl")
MAX_BLOCK_SIZE = 1024


def build_engine_config(
    model_path: str | Path,
    *,
    tensor_parallel_size: int = 1,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int = CHUNK_ALIGNMENT,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
    seed: int = 0,
    load_format: str = "auto",
    enforce_eager: bool = False,
    distributed_backend: str = "auto",
    max_waiting: int = 4096,
    show_progress: bool = False,
) -> EngineConfig:
    """Read a checkpoint folder's config, check everything that was asked for against it, and fill in the defaults.

    The safetensors files are not looked at: that is ``verify_checkpoint``'s part.

    Args:
        dtype: "auto" is the checkpoint's on CUDA and float32 on the CPU.
        device: "auto" is CUDA where torch sees a device.
        max_model_len: tokens of prompt and output together; None is the model's max_position_embeddings.
        max_num_seqs: requests that run at once; None is 256 on CUDA, 64 on the CPU.
        max_num_batched_tokens: tokens of one step; None is 8192 on CUDA, 2048 on the CPU (at least max_num_seqs).
        kv_cache_memory_bytes: bytes per rank for KV and states; None is worked out from the device.

    Raises:
        ConfigError: names the flag (or the config.json field), the value and the bound.
    """
    model = load_model_config(model_path)
    _integer("--tensor-parallel-size", tensor_parallel_size, 1)
    rank_shape(model, tensor_parallel_size)
    device = _device(device, tensor_parallel_size)
    on_cuda = device != "cpu"
    _choice("--distributed-backend", distributed_backend, BACKENDS)
    if distributed_backend == ("shm" if on_cuda else "nccl"):
        raise ConfigError(f"--distributed-backend is {distributed_backend}: it cannot serve --device {device}")
    if max_model_len is not None:
        _integer("--max-model-len", max_model_len, 1)
        if max_model_len > model.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len is {max_model_len}: the model's max_position_embeddings is "
                f"{model.max_position_embeddings}, and no longer sequence can be served"
            )
    _integer("--block-size", block_size, 1, MAX_BLOCK_SIZE)
    if kv_cache_memory_bytes is not None:
        _integer("--kv-cache-memory-bytes", kv_cache_memory_bytes, 1)
    if (
        isinstance(gpu_memory_utilization, bool)
        or not isinstance(gpu_memory_utilization, (int, float))
        or not math.isfinite(gpu_memory_utilization)
        or not 0 < gpu_memory_utilization <= 1
    ):
        raise ConfigError(f"--gpu-memory-utilization is {gpu_memory_utilization!r}: it must be a number in (0, 1]")
    _integer("--seed", seed, -(2**63), 2**63 - 1)
    _choice("--load-format", load_format, LOAD_FORMATS)
    _integer("--max-waiting", max_waiting, 1)
    scheduler = _scheduler_config(on_cuda, max_model_len, max_num_seqs, max_num_batched_tokens, max_waiting)
    dtype = _dtype(dtype, model, on_cuda)
    generation = load_generation_defaults(model_path)
    masked = masked_token_ranges(model_path, model.vocab_size)
    config = EngineConfig(
        model_path=str(model_path),
        model=model,
        generation=generation,
        parallel=ParallelConfig(tp_size=tensor_parallel_size, backend=distributed_backend),
        cache=CacheConfig(
            block_size=block_size,
            memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=float(gpu_memory_utilization),
        ),
        scheduler=scheduler,
        dtype=dtype,
        device=device,
        seed=seed,
        load_format=load_format,
        enforce_eager=enforce_eager,
        masked_token_ranges=masked,
        show_progress=show_progress,
    )
    check_memory_flag(config)
    return config


def masked_token_ranges(model_path: str | Path, vocab_size: int) -> list[tuple[int, int]]:
    """Half-open ranges of the ids in [0, vocab_size) that ``model_path/tokenizer.json`` has no token for, ascending.

    Empty when there is no tokenizer.

    Raises:
        ConfigError: a tokenizer.json that cannot be read.
    """
    path = Path(model_path) / "tokenizer.json"
    if not path.exists():
        return []
    from tokenizers import Tokenizer

    try:
        known = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError(f"cannot read {path}: {error}") from error
    ranges: list[tuple[int, int]] = []
    expected = 0
    for token_id in sorted({token_id for token_id in known if token_id < vocab_size} | {vocab_size}):
        if token_id > expected:
            ranges.append((expected, token_id))
        expected = token_id + 1
    return ranges


def _scheduler_config(
    on_cuda: bool,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_waiting: int,
) -> SchedulerConfig:
    if max_num_seqs is None:
        default = 256 if on_cuda else 64
        max_num_seqs = default if max_num_batched_tokens is None else min(default, max(1, max_num_batched_tokens))
    _integer("--max-num-seqs", max_num_seqs, 1)
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(8192 if on_cuda else 2048, max_num_seqs)
    _integer("--max-num-batched-tokens", max_num_batched_tokens, 1)
    if max_num_batched_tokens < CHUNK_ALIGNMENT:
        raise ConfigError(
            f"--max-num-batched-tokens is {max_num_batched_tokens}: it must be at least {CHUNK_ALIGNMENT}, the "
            "tokens of one prefill chunk"
        )
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {max_num_batched_tokens}: it must be at least --max-num-seqs "
            f"({max_num_seqs}), for every running request decodes a token a step"
        )
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
    )


def _device(device: str, tp_size: int) -> str:
    one_gpu = device.removeprefix("cuda:") if device.startswith("cuda:") else ""
    if not one_gpu.isdecimal():
        _choice("--device", device, DEVICES)
    if device == "cpu":
        return device
    import torch

    available = torch.cuda.is_available()
    if device.startswith("cuda") and not available:
        raise ConfigError(f"--device is {device}: torch sees no CUDA device (use --device cpu)")
    num_gpus = torch.cuda.device_count()
    if one_gpu:
        if int(one_gpu) >= num_gpus:
            raise ConfigError(f"--device is {device}: torch sees {num_gpus} CUDA devices, from cuda:0 on")
        return device
    if not available:
        return "cpu"
    if tp_size > num_gpus:
        raise ConfigError(
            f"--tensor-parallel-size is {tp_size}: torch sees {num_gpus} CUDA devices, and every rank needs one (ranks "
            "share a GPU that is named: --device cuda:0)"
        )
    return "cuda"


def _dtype(dtype: str, model: ModelConfig, on_cuda: bool) -> str:
    _choice("--dtype", dtype, DTYPES)
    if dtype != "auto":
        return dtype
    if not on_cuda:
        return "float32"
    if model.dtype not in DTYPES:
        raise ConfigError(
            f"--dtype is auto and the checkpoint's dtype is {model.dtype}, which is not supported: pass --dtype "
            "bfloat16 or --dtype float32"
        )
    return model.dtype


def _choice(flag: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{flag} is {value!r}: it must be one of {', '.join(choices)}")


def _integer(flag: str, value: Any, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{flag} is {value!r}: it must be an integer {bound}")
