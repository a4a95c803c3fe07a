"""``bireme bench serve``: a server under bursts of streamed completions."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.options import (
    Backend,
    BackendOption,
    CacheBytesOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    EagerOption,
    MaxBatchedTokensOption,
    MaxNumSeqsOption,
    TpOption,
)
from bireme.cli.presentation import clean_errors, take_interrupts


def bench_serve(
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="A server that runs already, of any make. Unset: one is started."),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", metavar="NAME", help="Its model. Unset: the first it lists.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="What to serve: a checkpoint folder, or pocket.")
    ] = None,
    geometry: Annotated[
        str | None,
        typer.Option("--geometry", metavar="NAME", help="Serve random weights instead: tiny, 4b, 9b, 27b, …"),
    ] = None,
    concurrency: Annotated[str, typer.Option("--concurrency", metavar="N,…", help="Requests at once.")] = "1,4,16,64",
    prompt_tokens: Annotated[str, typer.Option("--prompt-tokens", metavar="N,…", help="Prompt lengths.")] = "128,1024",
    output_tokens: Annotated[int, typer.Option("--output-tokens", metavar="N", min=2, help="Tokens of answers.")] = 256,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Bursts of each case.")] = 2,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Ask for full-length answers (Bireme, vLLM); others are then failures.",
        ),
    ] = True,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1.0, help="Of a burst.")] = 600.0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also append the JSON lines to FILE.")] = (
        None
    ),
    tensor_parallel_size: TpOption = 1,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
    enforce_eager: EagerOption = False,
    distributed_backend: BackendOption = Backend.auto,
    kv_cache_memory_bytes: CacheBytesOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    max_num_batched_tokens: MaxBatchedTokensOption = None,
) -> None:
    """Streamed completions over HTTP: time to first token, time between tokens, tokens/s, failures.

    [bold]bireme bench serve --geometry 27b --concurrency 16[/bold]

    [bold]bireme bench serve --url http://127.0.0.1:8000 --concurrency 1,16 --prompt-tokens 128[/bold]

    Exits with 1 if any request failed.
    """
    with clean_errors():
        from rich.console import Console

        from bireme.bench import serve
        from bireme.bench.geometry import geometry_folder
        from bireme.bench.record import emit, record
        from bireme.bench.step import parse_counts
        from bireme.errors import ConfigError
        from bireme.local_server import exit_on_sigterm, running_server

        if sum(given is not None for given in (url, model, geometry)) > 1:
            raise ConfigError("--url, --model and --geometry say where the answers come from: give one of them")
        counts, lengths = parse_counts("--concurrency", concurrency), parse_counts("--prompt-tokens", prompt_tokens)
        take_interrupts()
        exit_on_sigterm()
        console = Console(stderr=True)
        common: dict[str, object] = {"url": url} if url else {"model": geometry or model or "tiny"}
        failures = 0
        with ExitStack() as stack:
            if url is None:
                flags: list[str] = []
                values: dict[str, object] = {
                    "--tp": tensor_parallel_size,
                    "--dtype": dtype.value,
                    "--device": device,
                    "--distributed-backend": distributed_backend.value,
                    "--kv-cache-memory-bytes": kv_cache_memory_bytes,
                    "--max-num-seqs": max_num_seqs,
                    "--max-num-batched-tokens": max_num_batched_tokens,
                    "--max-model-len": None if model else max(lengths) + output_tokens,
                }
                for name, value in values.items():
                    flags += [] if value is None else [name, str(value)]
                flags += ["--enforce-eager"] if enforce_eager else []
                folder: str | Path = model or stack.enter_context(geometry_folder(geometry or "tiny", tokenizer=True))
                flags += [] if model else ["--load-format", "dummy"]
                begun = time.perf_counter()
                server = stack.enter_context(running_server(folder, *flags))
                ready = round(time.perf_counter() - begun, 2)
                url = server.url
                common |= {"tp": tensor_parallel_size, "eager": enforce_eager}
                console.print(f"healthy {ready} s after its process was started", highlight=False)
                emit(record("serve", **common, kind="start", ready_s=ready), out)
            client = serve.Client(url, served_model, ignore_eos=ignore_eos, timeout=timeout)
            for length in lengths:
                for count in counts:
                    line = client.measure(serve.Case(count, length, output_tokens, rounds))
                    failures += line["failures"]
                    console.print(serve.describe(line), highlight=False, markup=False, soft_wrap=True)
                    emit(record("serve", **common, **line), out)
        if failures:
            raise typer.Exit(1)
