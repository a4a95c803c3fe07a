"""The ``bireme`` command: serve, generate, bench, eval. Anything heavy is imported inside the command that needs it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme import __version__
from bireme.errors import BiremeError, ConfigError, InvalidRequestError
from bireme.openmp import limit_spinning

if TYPE_CHECKING:
    from bireme.config import CacheCapacity, EngineConfig

app = typer.Typer(
    name="bireme",
    help="Serve Qwen3.5-family models: every rank runs one batched forward per step over all ready rows.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(name="bench", help="Measure the engine on this machine.", no_args_is_help=True)
app.add_typer(bench_app)
eval_app = typer.Typer(name="eval", help="Score a model's answers.", no_args_is_help=True)
app.add_typer(eval_app)

POCKET = "pocket"
"""The shipped model's name (``bireme.pocket.NAME``, which help must not import)."""

MODEL_PANEL = "Model"
PARALLEL_PANEL = "Parallelism"
CACHE_PANEL = "State and KV memory"
SCHEDULER_PANEL = "Scheduling"
SERVER_PANEL = "Server"
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


UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's base of all that is wrong with a command line (it may bring a click of its own)."""


def main() -> None:
    """Run the command line: a usage error is one line on stderr, like the package's own errors."""
    limit_spinning()
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        message: str = error.format_message()  # type: ignore[attr-defined]
        if type(error).__name__ != "NoArgsIsHelpError":
            message = f"bireme: error: {' '.join(message.split())}{_value_at_fault(error, message)}"
        typer.echo(message, err=True)
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("bireme: interrupted", err=True)
        code = 130
    sys.exit(code)


def _value_at_fault(error: Exception, message: str) -> str:
    """What was given, where the message of Typer's own check does not say."""
    errors = getattr(error.__cause__, "errors", None)
    value = repr(errors()[0]["input"]) if errors else ""
    return f" (it is {value})" if value and value not in message else ""


def take_interrupts() -> None:
    """From here on there is something to clean up: Ctrl-C becomes KeyboardInterrupt, where it ended the process."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bireme {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@contextlib.contextmanager
def clean_errors() -> Iterator[None]:
    """Turn the package's own errors into one line on stderr and an exit code, and Ctrl-C into a quiet 130.

    2: a flag, configuration or request that cannot be run; 1: something failed. Other exceptions are bugs and pass.
    """
    try:
        yield
    except BiremeError as error:
        message = " ".join(str(error).split())
        typer.echo(f"bireme: error: {message}", err=True)
        raise typer.Exit(2 if isinstance(error, (ConfigError, InvalidRequestError)) else 1) from None
    except KeyboardInterrupt:
        typer.echo("bireme: interrupted", err=True)
        raise typer.Exit(130) from None


@app.command()
def serve(
    model: ModelArgument = POCKET,
    tensor_parallel_size: TpOption = 1,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
    load_format: LoadFormatOption = LoadFormat.auto,
    seed: SeedOption = 0,
    enforce_eager: EagerOption = False,
    distributed_backend: BackendOption = Backend.auto,
    block_size: BlockSizeOption = 64,
    kv_cache_memory_bytes: CacheBytesOption = None,
    gpu_memory_utilization: UtilizationOption = 0.9,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    max_num_batched_tokens: MaxBatchedTokensOption = None,
    max_waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting",
            metavar="N",
            min=1,
            help="Requests that may queue; one more is answered 429.",
            rich_help_panel=SCHEDULER_PANEL,
        ),
    ] = 4096,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.", rich_help_panel=SERVER_PANEL)
    ] = ("127.0.0.1"),
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="PORT", min=0, max=65535, help="0 takes any free port.", rich_help_panel=SERVER_PANEL
        ),
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="Name in the API; repeat for several. Unset: MODEL as given.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    shutdown_grace: Annotated[
        float,
        typer.Option(
            "--shutdown-grace",
            metavar="SECONDS",
            min=0.0,
            help="Seconds that running requests get to finish after SIGTERM.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 30.0,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="A line on stderr for each request.", rich_help_panel=SERVER_PANEL)
    ] = False,
) -> None:
    """Serve MODEL behind an OpenAI-compatible HTTP API. Without MODEL, the small pocket model that is shipped here.

    [bold]bireme serve[/bold]

    [bold]bireme serve ./Qwen3.5-4B --tp 2[/bold]
    """
    with clean_errors():
        config = engine_config(
            model,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype.value,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
            load_format=load_format.value,
            enforce_eager=enforce_eager,
            distributed_backend=distributed_backend.value,
            max_waiting=max_waiting,
        )
        names = tuple(served_model_name or [model])
        if "" in names:
            raise ConfigError('--served-model-name is "": a name must not be empty')
        from bireme.server.serve import run_server
        from bireme.server.settings import ServerSettings

        show_log()
        take_interrupts()
        settings = ServerSettings(
            served_model_names=names, host=host, port=port, shutdown_grace=shutdown_grace, access_log=access_log
        )

        def announce(capacity: CacheCapacity, url: str) -> None:
            typer.echo(startup_summary(config, capacity, names, url), err=True)

        code = run_server(config, settings, on_ready=announce)
        if code:
            raise typer.Exit(code)


def show_log() -> None:
    """The package's own log from INFO up, everybody else's warnings, as lines on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def startup_summary(config: EngineConfig, capacity: CacheCapacity, names: tuple[str, ...], url: str) -> str:
    """What runs, and how much of it fits, in lines for a person; bytes are those of one rank."""
    model = config.model
    token_bytes = capacity.bytes_per_block // capacity.block_size
    state = capacity.num_slots * capacity.bytes_per_slot
    blocks = capacity.num_blocks * capacity.bytes_per_block
    lines = {
        "model": f"{', '.join(names)}: {model.model_type}, {model.num_linear_layers} linear and "
        f"{model.num_full_layers} full attention layers, hidden {model.hidden_size}, vocabulary {model.vocab_size}",
        "runs as": f"{config.dtype} on {config.device}, tensor parallel {config.parallel.tp_size}",
        "each rank": f"{size(capacity.weight_bytes)} weights, {size(state)} state, {size(blocks)} KV",
        "state": f"{capacity.num_slots} slots of {size(capacity.bytes_per_slot)}",
        "KV": f"{capacity.num_tokens} tokens of {size(token_bytes)} in {capacity.num_blocks} blocks of "
        f"{capacity.block_size}",
        "limits": f"{capacity.num_slots} requests at once, {capacity.max_model_len} tokens each "
        f"(prompt and output), {config.scheduler.max_num_batched_tokens} tokens a step",
        "address": f"{url}/v1",
    }
    return "\n".join([f"bireme {__version__} is ready", *(f"  {name:10} {text}" for name, text in lines.items())])


def size(num_bytes: int) -> str:
    """Bytes for a person: three digits and a binary unit."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.3g} {units[0]}"


@app.command()
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
        _write("\n")
        if stats:
            seconds = time.perf_counter() - started
            typer.echo(f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s)", err=True)


def _write(text: str) -> None:
    """Write to stdout at once."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BiremeError(f"cannot write to stdout: {error.strerror or error}") from error


def _plain_writer() -> Callable[[str, bool], None]:
    """Writes a completion's pieces to stdout."""

    def show(text: str, is_last: bool) -> None:
        _write(text)

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
                _write(content)

    return show


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
