"""Flags: defaults, limits, and messages that name the flag, the value and the bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from bireme.config import CacheConfig, ParallelConfig, SchedulerConfig
from bireme.engine_args import build_engine_config, masked_token_ranges
from bireme.errors import ConfigError

Write = Callable[..., Path]
TINY: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16, dtype="bfloat16")


@pytest.fixture
def folder(checkpoint: Write) -> Path:
    return checkpoint(**TINY, vocab_size=600)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("no_cuda")
def test_defaults_on_a_machine_without_cuda(folder: Path) -> None:
    config = build_engine_config(folder)
    assert (config.device, config.dtype, config.model.dtype) == ("cpu", "float32", "bfloat16")
    assert config.scheduler == SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_waiting=4096)
    assert config.parallel == ParallelConfig(tp_size=1, backend="auto")
    assert config.cache == CacheConfig(block_size=64, memory_bytes=None, gpu_memory_utilization=0.9)
    assert config.masked_token_ranges == [(512, 600)]
    assert config.generation.temperature == 0.7
    assert config.model_path == str(folder)


@pytest.mark.usefixtures("two_gpus")
def test_defaults_on_a_machine_with_cuda(folder: Path) -> None:
    config = build_engine_config(folder, tensor_parallel_size=2)
    assert (config.device, config.dtype) == ("cuda", "bfloat16")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 8192)


@pytest.mark.usefixtures("two_gpus")
def test_the_cpu_can_be_chosen_beside_cuda(folder: Path) -> None:
    config = build_engine_config(folder, device="cpu", tensor_parallel_size=4, distributed_backend="shm")
    assert (config.device, config.dtype, config.parallel.tp_size) == ("cpu", "float32", 4)


def test_everything_that_is_asked_for_arrives(folder: Path) -> None:
    config = build_engine_config(
        str(folder),
        tensor_parallel_size=2,
        dtype="bfloat16",
        device="cpu",
        max_model_len=128,
        max_num_seqs=3,
        max_num_batched_tokens=65,
        block_size=16,
        kv_cache_memory_bytes=1 << 20,
        gpu_memory_utilization=0.5,
        seed=-7,
        load_format="dummy",
        enforce_eager=True,
        distributed_backend="gloo",
        max_waiting=5,
        show_progress=True,
    )
    assert config.scheduler == SchedulerConfig(
        max_num_seqs=3, max_num_batched_tokens=65, max_model_len=128, max_waiting=5
    )
    assert config.cache == CacheConfig(block_size=16, memory_bytes=1 << 20, gpu_memory_utilization=0.5)
    assert config.parallel == ParallelConfig(tp_size=2, backend="gloo")
    assert (config.dtype, config.seed, config.load_format) == ("bfloat16", -7, "dummy")
    assert config.enforce_eager and config.show_progress


@pytest.mark.parametrize(("seqs", "tokens"), [(4000, 4000), (64, 2048), (1, 2048)])
def test_the_step_budget_grows_with_the_rows_when_it_is_not_given(folder: Path, seqs: int, tokens: int) -> None:
    config = build_engine_config(folder, device="cpu", max_num_seqs=seqs)
    assert config.scheduler.max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 0}, ["--tensor-parallel-size is 0", "at least 1"]),
        ({"tensor_parallel_size": "2"}, ["--tensor-parallel-size is '2'"]),
        ({"tensor_parallel_size": 3}, ["num_key_value_heads is 2", "--tensor-parallel-size"]),
        ({"tensor_parallel_size": 8}, ["num_attention_heads is 4", "8"]),
        ({"dtype": "float16"}, ["--dtype is 'float16'", "bfloat16"]),
        ({"device": "tpu"}, ["--device is 'tpu'", "cpu"]),
        ({"device": "cuda"}, ["--device is cuda", "no CUDA device"]),
        ({"device": "cuda:0"}, ["--device is cuda:0", "no CUDA device"]),
        ({"device": "cuda:x"}, ["--device is 'cuda:x'", "cpu"]),
        ({"max_model_len": 4097}, ["--max-model-len is 4097", "max_position_embeddings is 4096"]),
        ({"max_model_len": 0}, ["--max-model-len is 0", "at least 1"]),
        ({"max_num_seqs": 0}, ["--max-num-seqs is 0"]),
        ({"max_num_seqs": 2.5}, ["--max-num-seqs is 2.5"]),
        ({"max_num_seqs": True}, ["--max-num-seqs is True"]),
        ({"max_num_batched_tokens": 63}, ["--max-num-batched-tokens is 63", "at least 64"]),
        ({"max_num_batched_tokens": -1}, ["--max-num-batched-tokens is -1"]),
        (
            {"max_num_batched_tokens": 100, "max_num_seqs": 101},
            ["--max-num-batched-tokens is 100", "--max-num-seqs (101)"],
        ),
        ({"block_size": 0}, ["--block-size is 0"]),
        ({"block_size": 2048}, ["--block-size is 2048", "1024"]),
        ({"kv_cache_memory_bytes": 0}, ["--kv-cache-memory-bytes is 0"]),
        ({"gpu_memory_utilization": 0.0}, ["--gpu-memory-utilization is 0.0", "(0, 1]"]),
        ({"gpu_memory_utilization": 1.01}, ["--gpu-memory-utilization is 1.01"]),
        ({"gpu_memory_utilization": float("nan")}, ["--gpu-memory-utilization is nan"]),
        ({"seed": 2**63}, ["--seed is 9223372036854775808"]),
        ({"load_format": "gguf"}, ["--load-format is 'gguf'", "dummy"]),
        ({"distributed_backend": "mpi"}, ["--distributed-backend is 'mpi'", "shm"]),
        ({"distributed_backend": "nccl"}, ["--distributed-backend is nccl", "--device cpu"]),
        ({"max_waiting": 0}, ["--max-waiting is 0"]),
    ],
)
@pytest.mark.usefixtures("no_cuda")
def test_a_value_out_of_bounds_is_refused_by_its_flag(folder: Path, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        build_engine_config(folder, **options)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.usefixtures("two_gpus")
def test_more_ranks_than_gpus_are_refused_with_both_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size is 4: torch sees 2 CUDA devices"):
        build_engine_config(folder, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="--distributed-backend is shm"):
        build_engine_config(folder, distributed_backend="shm")


@pytest.mark.usefixtures("two_gpus")
def test_a_checkpoint_in_float16_needs_an_explicit_dtype_on_cuda(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"--dtype is auto and the checkpoint's dtype is float16"):
        build_engine_config(tmp_path)
    assert build_engine_config(tmp_path, dtype="bfloat16").dtype == "bfloat16"
    assert build_engine_config(tmp_path, device="cpu").dtype == "float32"


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder .*absent does not exist"):
        build_engine_config(tmp_path / "absent")


def test_ids_without_a_token_are_masked_in_the_middle_and_at_the_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 1, "b": 2, "c": 6}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert masked_token_ranges(tmp_path, 9) == [(0, 1), (3, 6), (7, 9)]
    assert masked_token_ranges(tmp_path, 5) == [(0, 1), (3, 5)]


@pytest.mark.parametrize(("vocab_size", "expected"), [(512, []), (513, [(512, 513)]), (500, []), (600, [(512, 600)])])
def test_the_masked_tail_ends_with_the_vocabulary(
    folder: Path, vocab_size: int, expected: list[tuple[int, int]]
) -> None:
    assert masked_token_ranges(folder, vocab_size) == expected


def test_nothing_is_masked_without_a_tokenizer(tmp_path: Path) -> None:
    assert masked_token_ranges(tmp_path, 600) == []


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json"):
        masked_token_ranges(tmp_path, 600)
