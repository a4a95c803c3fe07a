"""``bireme bench step``: steps of any geometry on random weights, against the memory's limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.options import (
    Backend,
    BackendOption,
    BlockSizeOption,
    CacheBytesOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    MaxBatchedTokensOption,
    TpOption,
    UtilizationOption,
)
from bireme.cli.presentation import clean_errors, take_interrupts


def bench_step(
    geometry: Annotated[
        str,
        typer.Option(
            "--geometry",
            metavar="NAMES",
            help="tiny, 0.8b, 2b, 4b, 9b, 27b (27b:8 is its first 8 layers), pocket, a config.json; commas join.",
        ),
    ] = "tiny",
    rows: Annotated[str, typer.Option("--rows", metavar="N,…", help="Decode rows; empty: no decode.")] = "1,4,16",
    context: Annotated[str, typer.Option("--context", metavar="N,…", help="Tokens behind each row.")] = "256",
    prefill: Annotated[
        str, typer.Option("--prefill", metavar="NxT,…", help="N prompts of T tokens at once; empty: none.")
    ] = "1x128",
    loop: Annotated[
        str, typer.Option("--loop", metavar="N,…", help="Rows through the engine's own loop; empty: none.")
    ] = "16",
    loop_context: Annotated[
        int, typer.Option("--loop-context", metavar="N", min=1, help="Prompt tokens of those.")
    ] = 128,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=4, help="Timed decode steps of a round.")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Rounds; medians count.")] = 3,
    temperature: Annotated[float, typer.Option("--temperature", metavar="T", min=0.0, help="0 is greedy.")] = 0.0,
    profile: Annotated[bool, typer.Option("--profile/--no-profile", help="Break steps down by kernels.")] = True,
    bandwidth: Annotated[
        float, typer.Option("--bandwidth", metavar="TB/S", min=1e-6, help="Memory's read bandwidth, for the limits.")
    ] = 4.52,
    graphs: Annotated[bool, typer.Option("--graphs/--eager", help="With captured graphs or without (CUDA).")] = True,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also append the JSON lines to FILE.")] = (
        None
    ),
    tensor_parallel_size: TpOption = 1,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
    distributed_backend: BackendOption = Backend.auto,
    block_size: BlockSizeOption = 64,
    kv_cache_memory_bytes: CacheBytesOption = None,
    gpu_memory_utilization: UtilizationOption = 0.93,
    max_num_batched_tokens: MaxBatchedTokensOption = None,
) -> None:
    """Time of decode steps and prefills with random weights, beside the least that memory allows.

    [bold]bireme bench step --geometry 4b,27b --rows 1,16,64 --context 256,8192 --prefill 1x8192,8x1024[/bold]

    Prints a line and a JSON line for each case: decode, prefill, the engine's loop, memory by rank, start.
    """
    with clean_errors():
        from rich.console import Console

        from bireme.bench import step
        from bireme.bench.geometry import geometry_folder
        from bireme.bench.record import emit, record

        take_interrupts()
        counts = step.parse_counts("--rows", rows)
        contexts = step.parse_counts("--context", context)
        cases = step.Cases(
            decode=[(count, length) for length in contexts for count in counts],
            prefill=step.parse_prefill(prefill),
            loop=[(count, loop_context) for count in step.parse_counts("--loop", loop)],
            steps=steps,
            rounds=rounds,
            with_profile=profile,
            temperature=temperature,
        )
        console = Console(stderr=True)
        for name in geometry.split(","):
            with geometry_folder(name.strip()) as folder:
                config = step.engine_config(
                    str(folder),
                    cases,
                    enforce_eager=not graphs,
                    tensor_parallel_size=tensor_parallel_size,
                    dtype=dtype.value,
                    device=device,
                    distributed_backend=distributed_backend.value,
                    block_size=block_size,
                    kv_cache_memory_bytes=kv_cache_memory_bytes,
                    gpu_memory_utilization=gpu_memory_utilization,
                    max_num_batched_tokens=max_num_batched_tokens,
                )
                common = {
                    "geometry": name.strip(),
                    "tp": tensor_parallel_size,
                    "device": config.device,
                    "dtype": config.dtype,
                    "graphs": graphs and config.device != "cpu",
                    "bandwidth_tb_s": bandwidth,
                }
                console.print(" ".join(f"{key}={value}" for key, value in common.items()), highlight=False)

                def tell(line: dict[str, object], common: dict[str, object] = common) -> None:
                    step.print_line(line, console)
                    emit(record("step", **common, **line), out)

                step.run(config, cases, bandwidth * 1e12, tell)
