"""Options that several commands share, and the configuration they amount to."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bireme.config import EngineConfig

POCKET = "pocket"
"""The shipped model's name (``bireme.pocket.NAME``, which help must not import)."""

MODEL_PANEL = "Model"
PARALLEL_PANEL = "Parallelism"
CACHE_PANEL = "State and KV memory"
SCHEDULER_PANEL = "Scheduling"
SERVER_PANEL = "Server"
ACCESS_PANEL = "Access"
TRACES_PANEL = "Logs and traces"
SAMPLING_PANEL = "Sampling"
OUTPUT_PANEL = "Output"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class LoadFormat(StrEnum):
    auto = "auto"
    safetensors = "safetensors"
    dummy = "dummy"


class Backend(StrEnum):
    auto = "auto"
    shm = "shm"
    gloo = "gloo"
    nccl = "nccl"


def _check_share(value: float) -> float:
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{value} is not in (0, 1]")
    return value


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Checkpoint folder (config.json, safetensors, tokenizer.json), or pocket: the small model shipped here.",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        help="Weights and activations. auto: the checkpoint's on cuda, float32 on cpu.",
        rich_help_panel=MODEL_PANEL,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="auto (cuda where there is one, else cpu), cpu, cuda, or one GPU for all ranks: cuda:0, cuda:1, …",
        rich_help_panel=MODEL_PANEL,
    ),
]
LoadFormatOption = Annotated[
    LoadFormat,
    typer.Option(
        "--load-format",
        help="dummy fills the weights at random and reads no tensor (benchmarks).",
        rich_help_panel=MODEL_PANEL,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of requests that bring none, and of dummy weights.",
        rich_help_panel=MODEL_PANEL,
    ),
]
EagerOption = Annotated[
    bool,
    typer.Option("--enforce-eager", help="Run without captured graphs (CUDA only).", rich_help_panel=MODEL_PANEL),
]
TpOption = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        "--tp",
        metavar="N",
        min=1,
        help="Ranks that share each layer; every rank above 0 is a process of its own.",
        rich_help_panel=PARALLEL_PANEL,
    ),
]
BackendOption = Annotated[
    Backend,
    typer.Option(
        "--distributed-backend",
        metavar="NAME",
        help="How ranks exchange hidden rows: shm, gloo, nccl or auto (nccl on cuda, else shared memory).",
        rich_help_panel=PARALLEL_PANEL,
    ),
]
BlockSizeOption = Annotated[
    int,
    typer.Option("--block-size", metavar="N", min=1, help="Tokens in a KV block.", rich_help_panel=CACHE_PANEL),
]
CacheBytesOption = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-memory-bytes",
        metavar="BYTES",
        min=1,
        help="Bytes of state and KV on each rank, instead of what the device allows.",
        rich_help_panel=CACHE_PANEL,
    ),
]
UtilizationOption = Annotated[
    float,
    typer.Option(
        "--gpu-memory-utilization",
        metavar="SHARE",
        callback=_check_share,
        help="Share of the device's memory that weights, state and KV may take together.",
        rich_help_panel=CACHE_PANEL,
    ),
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        metavar="N",
        min=1,
        help="Prompt and output tokens of one request, together. Unset: the model's own limit.",
        rich_help_panel=SCHEDULER_PANEL,
    ),
]
MaxNumSeqsOption = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs",
        metavar="N",
        min=1,
        help="Requests that run at once (each holds a state slot). Unset: 256 on cuda, 64 on cpu.",
        rich_help_panel=SCHEDULER_PANEL,
    ),
]
MaxBatchedTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        metavar="N",
        min=1,
        help="Tokens of one step, decode rows and prefill chunks together. Unset: 8192 on cuda, 2048 on cpu.",
        rich_help_panel=SCHEDULER_PANEL,
    ),
]


def engine_config(model: str, *, load_format: str, **options: Any) -> EngineConfig:
    """The engine's configuration from flags, with the checkpoint's headers checked before any process starts."""
    from bireme.checkpoint.headers import verify_checkpoint
    from bireme.engine_args import build_engine_config
    from bireme.pocket import resolve

    folder = resolve(model)
    config = build_engine_config(folder, load_format=load_format, show_progress=sys.stderr.isatty(), **options)
    if load_format != "dummy":
        verify_checkpoint(folder, config.model)
    return config
