"""``bireme generate``: one completion in this process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from bireme.cli.options import (
    OUTPUT_PANEL,
    POCKET,
    SAMPLING_PANEL,
    Backend,
    BackendOption,
    BlockSizeOption,
    CacheBytesOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    EagerOption,
    LoadFormat,
    LoadFormatOption,
    MaxBatchedTokensOption,
    MaxModelLenOption,
    TpOption,
    UtilizationOption,
)
from bireme.cli.presentation import clean_errors, take_interrupts, write
from bireme.errors import BiremeError, ConfigError


def generate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder, or pocket. Left out: pocket; one argument that names no folder is the prompt.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; left out or -, it is read from stdin.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="The prompt is a user's message (chat template), and a thought goes to stderr. Unset: for pocket.",
            show_default=False,
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="enable_thinking of the chat template; implies --chat. Unset: as the template has it.",
            show_default=False,
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--system", metavar="TEXT", help="System message before it; implies --chat.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", metavar="N", min=1, help="Tokens to generate.", rich_help_panel=SAMPLING_PANEL),
    ] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            help="0 is greedy. Unset, like the next four: the checkpoint's default.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", metavar="N", help="0: no limit.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", metavar="P", help="Nucleus mass.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", metavar="P", help="Share of the best token's mass.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option("--repetition-penalty", metavar="X", help="1 is off.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Same seed, same text.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="Stop before this text; repeat.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on past end tokens.", rich_help_panel=SAMPLING_PANEL),
    ] = False,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Print tokens and speed on stderr at the end.", rich_help_panel=OUTPUT_PANEL),
    ] = False,
    tensor_parallel_size: TpOption = 1,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
    load_format: LoadFormatOption = LoadFormat.auto,
    enforce_eager: EagerOption = False,
    distributed_backend: BackendOption = Backend.auto,
    block_size: BlockSizeOption = 64,
    kv_cache_memory_bytes: CacheBytesOption = None,
    gpu_memory_utilization: UtilizationOption = 0.9,
    max_model_len: MaxModelLenOption = None,
    max_num_batched_tokens: MaxBatchedTokensOption = None,
) -> None:
    """Generate text with MODEL in this process, streaming it to the terminal. No server is involved.

    [bold]bireme generate "What is the capital of France?"[/bold]

    [bold]bireme generate ./Qwen3.5-4B "The capital of France is"[/bold]

    [bold]git diff | bireme generate ./Qwen3.5-4B --chat --system "Review this patch."[/bold]
    """
    with clean_errors():
        if sys.stdout is None:
            raise BiremeError("cannot write to stdout: it is closed")
        model, prompt = model_and_prompt(model, prompt)
        if prompt is None or prompt == "-":
            prompt = _read_prompt()
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
        if chat is None:
            chat = model == POCKET
        _generate(
            model,
            prompt,
            messages_of(prompt, system) if chat or thinking is not None or system is not None else None,
            {} if thinking is None else {"enable_thinking": thinking},
            {name: value for name, value in given.items() if value is not None},
            {"max_tokens": max_tokens, "seed": seed, "stop": stop or [], "ignore_eos": ignore_eos},
            stats,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype.value,
            device=device,
            load_format=load_format.value,
            enforce_eager=enforce_eager,
            distributed_backend=distributed_backend.value,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=1,
            max_num_batched_tokens=max_num_batched_tokens,
        )


def model_and_prompt(first: str | None, second: str | None) -> tuple[str, str | None]:
    """The two optional arguments of ``generate``: one that stands alone and names no model is the pocket's prompt."""
    if first is None or second is not None:
        return POCKET if first is None else first, second
    is_path = first.startswith(("/", "./", "../", "~/")) or os.path.isdir(first)
    return (first, None) if first == POCKET or is_path else (POCKET, first)


def _read_prompt() -> str:
    if sys.stdin is None:
        raise ConfigError("there is no PROMPT: stdin is closed")
    try:
        if sys.stdin.isatty():
            typer.echo("bireme: type the prompt, then Ctrl-D", err=True)
        return sys.stdin.read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read PROMPT from stdin: {error}") from error


def messages_of(prompt: str, system: str | None) -> list[dict[str, str]]:
    """The prompt as a conversation of one user message, behind a system message where there is one."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def _generate(
    model: str,
    prompt: str,
    messages: list[dict[str, str]] | None,
    template_variables: dict[str, Any],
    sampling: dict[str, Any],
    limits: dict[str, Any],
    stats: bool,
    **options: Any,
) -> None:
    import msgspec
    import torch  # noqa: F401 - what takes long is imported while Ctrl-C may still end the process on the spot

    from bireme.llm import LLM

    take_interrupts()
    with LLM(model, **options) as llm:
        params = msgspec.structs.replace(llm.get_default_sampling_params(), **sampling, **limits)
        started = time.perf_counter()
        num_tokens = 0
        if messages is not None:
            prompt = llm.render_chat(messages, **template_variables)
        show = _plain_writer() if messages is None else _chat_writer(prompt)
        for piece in llm.stream(prompt, params):
            num_tokens += len(piece.token_ids)
            show(piece.text, piece.finish_reason is not None)
        write("\n")
        if stats:
            seconds = time.perf_counter() - started
            typer.echo(f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s)", err=True)


def _plain_writer() -> Callable[[str, bool], None]:
    """Writes a completion's pieces to stdout."""

    def show(text: str, is_last: bool) -> None:
        write(text)

    return show


def _chat_writer(prompt: str) -> Callable[[str, bool], None]:
    """Writes an answer's pieces: the thought to stderr (dim on a terminal), the rest to stdout."""
    from bireme.server.chat import ReasoningSplitter

    splitter = ReasoningSplitter(prompt)
    has_thought = False

    def show(text: str, is_last: bool) -> None:
        nonlocal has_thought
        pairs = [splitter.push(text), splitter.flush()] if is_last else [splitter.push(text)]
        for thought, content in pairs:
            if thought:
                has_thought = True
                typer.echo(typer.style(thought, dim=True), err=True, nl=False)
            if content and has_thought:
                has_thought = False
                typer.echo("\n", err=True)
            if content:
                write(content)

    return show
