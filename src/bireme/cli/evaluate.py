"""``bireme eval``: scores of a model's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.options import (
    POCKET,
    Backend,
    BackendOption,
    CacheBytesOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    EagerOption,
    MaxBatchedTokensOption,
    MaxNumSeqsOption,
    ModelArgument,
    TpOption,
)
from bireme.cli.presentation import clean_errors, take_interrupts

eval_app = typer.Typer(name="eval", help="Score a model's answers.", no_args_is_help=True)


@eval_app.command("pocket")
def eval_pocket(
    model: ModelArgument = POCKET,
    cases: Annotated[
        int, typer.Option("--cases", metavar="N", min=1, help="Cases of each skill, and of each distance of recall.")
    ] = 40,
    skill: Annotated[
        list[str] | None, typer.Option("--skill", metavar="NAME", help="Only this skill; repeat for several.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Other cases, still unseen.")] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", metavar="N", min=1, help="Requests at once.")] = 16,
    stream: Annotated[bool, typer.Option("--stream", help="Ask for streams.")] = False,
    compare_transformers: Annotated[
        bool,
        typer.Option(
            "--compare-transformers",
            help="Generate the same answers with transformers, too, and count those of the same tokens.",
        ),
    ] = False,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            metavar="NAME=PERCENT",
            help="Exit with 1 below this. NAME: overall, each, a skill, a group (recall@6000), agreement. Repeat.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="A server that runs already. Unset: one is started, with the flags of the panels below.",
        ),
    ] = None,
    show: Annotated[int, typer.Option("--show", metavar="N", min=0, help="Wrong answers to print per group.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line, too.")] = False,
    append: Annotated[Path | None, typer.Option("--append", metavar="FILE", help="Append that line to FILE.")] = None,
    tensor_parallel_size: TpOption = 1,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "auto",
    enforce_eager: EagerOption = False,
    distributed_backend: BackendOption = Backend.auto,
    kv_cache_memory_bytes: CacheBytesOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    max_num_batched_tokens: MaxBatchedTokensOption = None,
) -> None:
    """Ask the pocket model unseen cases of each of its skills through the HTTP server, and score the answers.

    [bold]bireme eval pocket --tp 2 --require overall=95 --require each=90[/bold]
    """
    with clean_errors():
        from rich.console import Console

        from bireme.local_server import exit_on_sigterm
        from bireme.pocket.evaluate import Settings, read_requirements, run
        from bireme.pocket.skills import SKILLS

        flags: dict[str, int | str | None] = {
            "--tp": tensor_parallel_size,
            "--dtype": dtype.value,
            "--device": None if device == "auto" else device,
            "--distributed-backend": None if distributed_backend is Backend.auto else distributed_backend.value,
            "--kv-cache-memory-bytes": kv_cache_memory_bytes,
            "--max-num-seqs": max_num_seqs,
            "--max-num-batched-tokens": max_num_batched_tokens,
        }
        given = [part for name, value in flags.items() if value is not None for part in (name, str(value))]
        settings = Settings(
            model=model,
            url=url,
            flags=(*given, *(["--enforce-eager"] if enforce_eager else [])),
            per_group=cases,
            skills=tuple(skill or SKILLS),
            seed=seed,
            concurrency=concurrency,
            stream=stream,
            compare=compare_transformers,
            required=read_requirements(require or []),
            show=show,
            as_json=as_json,
            append=append,
        )
        take_interrupts()
        exit_on_sigterm()
        if code := run(settings, Console()):
            raise typer.Exit(code)
