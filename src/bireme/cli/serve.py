"""``bireme serve``: the HTTP server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme import __version__
from bireme.cli.config_file import ConfigOption
from bireme.cli.options import (
    ACCESS_PANEL,
    POCKET,
    SCHEDULER_PANEL,
    SERVER_PANEL,
    TRACES_PANEL,
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
    MaxNumSeqsOption,
    ModelArgument,
    SeedOption,
    TpOption,
    UtilizationOption,
    engine_config,
)
from bireme.cli.presentation import clean_errors, size, take_interrupts
from bireme.errors import ConfigError

if TYPE_CHECKING:
    from bireme.config import CacheCapacity, EngineConfig
    from bireme.server.settings import ServerSettings


class LogFormat(StrEnum):
    text = "text"
    json = "json"


def _server(flag: str, text: str, **options: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=SERVER_PANEL, **options)


def _traces(flag: str, text: str, **options: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=TRACES_PANEL, **options)


def _access(flag: str, text: str, **options: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=ACCESS_PANEL, **options)


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
    max_queue_tokens: Annotated[
        int,
        typer.Option(
            "--max-queue-tokens",
            metavar="N",
            min=0,
            help="Prompt tokens that may wait for their first output token, else 429. 0: no limit.",
            rich_help_panel=SCHEDULER_PANEL,
        ),
    ] = 0,
    max_sequences: Annotated[
        int,
        typer.Option(
            "--max-sequences",
            metavar="N",
            min=1,
            help="Answers that one call may ask for: its prompts times n.",
            rich_help_panel=SCHEDULER_PANEL,
        ),
    ] = 2048,
    host: Annotated[str, _server("--host", "Address to listen on.", metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, _server("--port", "0 takes any free port.", metavar="PORT", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        _server("--served-model-name", "Name in the API; repeat for several. Unset: MODEL as given.", metavar="NAME"),
    ] = None,
    max_body_bytes: Annotated[
        int, _server("--max-body-bytes", "A larger request body is answered 413.", metavar="BYTES", min=1)
    ] = 4 * 1024 * 1024,
    max_header_bytes: Annotated[
        int, _server("--max-header-bytes", "A longer request head is answered 431.", metavar="BYTES", min=256)
    ] = 32 * 1024,
    request_timeout: Annotated[
        float,
        _server("--request-timeout", "Seconds that a call may take in all. 0: no limit.", metavar="SECONDS", min=0.0),
    ] = 0.0,
    sse_keep_alive: Annotated[
        float,
        _server("--sse-keep-alive", "A silent stream gets a comment so often. 0: never.", metavar="SECONDS", min=0.0),
    ] = 15.0,
    shutdown_grace: Annotated[
        float,
        _server(
            "--shutdown-grace",
            "Seconds that running requests get to finish after SIGTERM.",
            metavar="SECONDS",
            min=0.0,
        ),
    ] = 30.0,
    page: Annotated[
        bool, _server("--page/--no-page", "The page at / for people: a chat, and what the engine does.")
    ] = True,
    otlp_traces_endpoint: Annotated[
        str,
        _traces("--otlp-traces-endpoint", "OpenTelemetry collector that gets a span for each call.", metavar="URL"),
    ] = "",
    access_log: Annotated[bool, _traces("--access-log", "A line on stderr for each request.")] = False,
    log_format: Annotated[LogFormat, _traces("--log-format", "Lines for people, or JSON objects.")] = LogFormat.text,
    api_key: Annotated[
        list[str] | None,
        _access("--api-key", "A key that calls must carry; repeat for several. Unset: BIREME_API_KEY.", metavar="KEY"),
    ] = None,
    api_key_file: Annotated[Path | None, _access("--api-key-file", "More keys, one a line.", metavar="FILE")] = None,
    allowed_origins: Annotated[
        list[str] | None,
        _access("--allowed-origins", "Origin whose pages may call (CORS), * for all; repeat.", metavar="ORIGIN"),
    ] = None,
    allowed_methods: Annotated[
        list[str] | None,
        _access("--allowed-methods", "Method that they may use; repeat. Unset: GET and POST.", metavar="METHOD"),
    ] = None,
    allowed_headers: Annotated[
        list[str] | None,
        _access("--allowed-headers", "Header that they may send; repeat. Unset: any.", metavar="HEADER"),
    ] = None,
    allow_credentials: Annotated[bool, _access("--allow-credentials", "They may send cookies.")] = False,
    config: Annotated[Path | None, ConfigOption] = None,
) -> None:
    """Serve MODEL behind an OpenAI-compatible HTTP API. Without MODEL, the small pocket model that is shipped here.

    [bold]bireme serve[/bold]

    [bold]bireme serve ./Qwen3.5-4B --tp 2[/bold]

    [bold]bireme serve --config server.yaml --port 8001[/bold]
    """
    with clean_errors():
        engine = engine_config(
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
        from bireme.server.guard import read_api_keys
        from bireme.server.serve import run_server
        from bireme.server.settings import ServerSettings

        take_interrupts()
        settings = ServerSettings(
            served_model_names=names,
            host=host,
            port=port,
            api_keys=read_api_keys(api_key or [], api_key_file),
            allowed_origins=tuple(allowed_origins or ()),
            allowed_methods=tuple(allowed_methods or ("GET", "POST")),
            allowed_headers=tuple(allowed_headers or ("*",)),
            allow_credentials=allow_credentials,
            max_body_bytes=max_body_bytes,
            max_header_bytes=max_header_bytes,
            max_sequences=max_sequences,
            max_queue_tokens=max_queue_tokens,
            request_timeout=request_timeout,
            sse_keep_alive=sse_keep_alive,
            shutdown_grace=shutdown_grace,
            otlp_traces_endpoint=otlp_traces_endpoint,
            page=page,
            access_log=access_log,
            log_format=log_format.value,
        )

        def announce(capacity: CacheCapacity, url: str) -> None:
            typer.echo(startup_summary(engine, settings, capacity, url), err=True)

        code = run_server(engine, settings, on_ready=announce)
        if code:
            raise typer.Exit(code)


def startup_summary(config: EngineConfig, settings: ServerSettings, capacity: CacheCapacity, url: str) -> str:
    """What runs, and how much of it fits, in lines for a person; bytes are those of one rank."""
    model = config.model
    token_bytes = capacity.bytes_per_block // capacity.block_size
    state = capacity.num_slots * capacity.bytes_per_slot
    blocks = capacity.num_blocks * capacity.bytes_per_block
    on_cuda = config.device.startswith("cuda")
    graphs = "captured steps of few tokens" if on_cuda and not config.enforce_eager else "none"
    num_keys = len(settings.api_keys)
    lines = {
        "model": f"{', '.join(settings.served_model_names)}: {model.model_type} of {config.model_path}",
        "geometry": f"{model.num_linear_layers} linear and {model.num_full_layers} full attention layers, hidden "
        f"{model.hidden_size}, vocabulary {model.vocab_size}; heads: {model.num_attention_heads} query and "
        f"{model.num_key_value_heads} KV of {model.head_dim}, linear {model.linear_num_key_heads} key of "
        f"{model.linear_key_head_dim} and {model.linear_num_value_heads} value of {model.linear_value_head_dim}",
        "runs as": f"{config.dtype} on {config.device}, tensor parallel {config.parallel.tp_size}",
        "graphs": graphs + (" (--enforce-eager)" if on_cuda and config.enforce_eager else "" if on_cuda else " (cpu)"),
        "each rank": f"{size(capacity.weight_bytes)} weights + {size(state)} state + {size(blocks)} KV = "
        f"{size(capacity.weight_bytes + state + blocks)}",
        "state": f"{capacity.num_slots} slots of {size(capacity.bytes_per_slot)}",
        "KV": f"{capacity.num_tokens} tokens of {size(token_bytes)} in {capacity.num_blocks} blocks of "
        f"{capacity.block_size}",
        "limits": f"{capacity.num_slots} requests at once, {config.scheduler.max_waiting} waiting; "
        f"{capacity.max_model_len} tokens each (prompt and output), {config.scheduler.max_num_batched_tokens} a step",
        "API key": f"needed ({num_keys} known)" if num_keys else "none: whoever reaches the address may call",
        "address": f"{url}/v1" + (f" (for people: {url})" if settings.page else ""),
    }
    return "\n".join([f"bireme {__version__} is ready", *(f"  {name:10} {text}" for name, text in lines.items())])
