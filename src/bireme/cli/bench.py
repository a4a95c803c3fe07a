"""``bireme bench``: measurements of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.bench_serve import bench_serve
from bireme.cli.bench_step import bench_step
from bireme.cli.options import (
    Backend,
    BackendOption,
    CacheBytesOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    EagerOption,
    LoadFormat,
    LoadFormatOption,
    TpOption,
    engine_config,
)
from bireme.cli.presentation import clean_errors, take_interrupts

bench_app = typer.Typer(name="bench", help="Measure the engine on this machine.", no_args_is_help=True)
bench_app.command("step")(bench_step)
bench_app.command("serve")(bench_serve)


@bench_app.command("decode")
def bench_decode(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint folder, or pocket. Left out: a tiny random model."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Concurrent completions.")] = 16,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=2, help="Tokens of each completion.")] = 256,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", metavar="N", min=1, help="Prompt length.")] = 16,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Alternating rounds; medians count.")] = 3,
    append: Annotated[
        Path | None, typer.Option("--append", metavar="FILE", help="Also append the JSON line to FILE.")
    ] = None,
    tensor_parallel_size: TpOption = 1,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
    load_format: LoadFormatOption = LoadFormat.auto,
    enforce_eager: EagerOption = False,
    distributed_backend: BackendOption = Backend.auto,
    kv_cache_memory_bytes: CacheBytesOption = None,
) -> None:
    """Decode throughput: batched steps against one-row plans, and a single request against a bare loop.

    Prints a table, then one JSON line with commit, machine, model and flags.
    """
    with clean_errors():
        from rich.console import Console

        from bireme.bench import decode
        from bireme.bench.record import emit, record

        take_interrupts()
        with decode.model_folder(model) as (folder, builtin):
            config = engine_config(
                folder,
                tensor_parallel_size=tensor_parallel_size,
                dtype=dtype.value,
                device=device,
                load_format=load_format.value,
                enforce_eager=enforce_eager,
                distributed_backend=distributed_backend.value,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                max_model_len=prompt_tokens + tokens,
                max_num_seqs=rows,
            )
            figures = decode.run(
                config, builtin=builtin, rows=rows, num_tokens=tokens, prompt_tokens=prompt_tokens, rounds=rounds
            )
        title = f"{rows} × {tokens} tokens, TP{tensor_parallel_size}, {config.dtype}, {config.device}"
        decode.print_table(figures, title, Console())
        emit(record("decode", **figures), append)
