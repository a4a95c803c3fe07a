"""``bireme serve``: the HTTP server's life, from its port to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from bireme.config import CacheCapacity, EngineConfig
from bireme.engine_client import EngineClient
from bireme.engine_process import ExecutorFactory, launch_engine
from bireme.errors import ConfigError, EngineDeadError
from bireme.server.app import Service, create_app
from bireme.server.chat import ChatTemplate
from bireme.server.guard import Guard, check_origins, connection_class
from bireme.server.logs import configure
from bireme.server.metrics import Metrics
from bireme.server.settings import ServerSettings
from bireme.server.telemetry import Tracing
from bireme.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FAILED_EXIT_CODE = 1

KEEP_ALIVE_SECONDS = 60
"""An idle connection is kept this long: longer than clients keep theirs, so that none finds its own just closed."""

LAST_WORDS_SECONDS = 1.0
"""What an answer that was ended gets to reach its client."""


class HttpServer(uvicorn.Server):
    """uvicorn, with signals that drain: the first lets running requests finish, a second ends them.

    Attributes:
        was_signalled: a signal told it to go.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.was_signalled = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT while serving. They are not raised again afterwards: a drained server exits 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def leave(self) -> None:
        """Take nothing new; go when what runs has ended, or has had its time."""
        if not self.should_exit:
            self._service.is_leaving = True
            self.should_exit = True
            asyncio.get_running_loop().call_later(self._service.settings.shutdown_grace, self._service.client.end_all)

    def _on_signal(self, number: int) -> None:
        self.was_signalled = True
        if self.should_exit:
            logger.warning("%s again: ending what still runs", signal.Signals(number).name)
            self._service.client.end_all()
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, setattr, self, "force_exit", True)
        else:
            logger.info(
                "%s: no new requests; those that run have %g s to finish",
                signal.Signals(number).name,
                self._service.settings.shutdown_grace,
            )
            self.leave()


def run_server(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    executor_factory: ExecutorFactory | None = None,
    on_ready: Callable[[CacheCapacity, str], None] | None = None,
) -> int:
    """Serve until a signal or the engine's death; return the process's exit code (0 after a signal).

    The port opens while the engine loads, and /health says 503 until it is ready. Checkpoint headers should have been
    verified before, so that what can be known to fail has failed.

    Args:
        on_ready: called once requests are served, with what the ranks hold and the server's address.

    Raises:
        ConfigError: the tokenizer or chat template cannot be used, the address cannot be listened on, settings
            do not go together, or one of them needs a library that is not installed.
        EngineDeadError: the engine could not start; the message is its own.
    """
    check_origins(settings)
    configure(settings.log_format)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    tokenizer = Tokenizer.from_folder(config.model_path)
    template = ChatTemplate.of(tokenizer) if tokenizer.chat_template is not None else None
    with contextlib.ExitStack() as stack:
        tracing = None
        if settings.otlp_traces_endpoint:
            tracing = stack.enter_context(contextlib.closing(Tracing(settings.otlp_traces_endpoint)))
        listener = stack.enter_context(contextlib.closing(_listen(settings)))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        return runner.run(_serve(config, settings, tokenizer, template, tracing, listener, executor_factory, on_ready))


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    tracing: Tracing | None,
    listener: socket.socket,
    executor_factory: ExecutorFactory | None,
    on_ready: Callable[[CacheCapacity, str], None] | None,
) -> int:
    engine = launch_engine(config, executor_factory, drain_seconds=settings.shutdown_grace)
    with contextlib.closing(engine), EngineClient(engine) as client:
        app = create_app(client, tokenizer, template, settings, tracing)
        metrics: Metrics = app.state.service.metrics
        server = HttpServer(
            uvicorn.Config(
                Guard(app, settings, metrics),
                http=connection_class(settings, metrics),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(settings.shutdown_grace + LAST_WORDS_SECONDS),
            ),
            app.state.service,
        )
        loop = asyncio.get_running_loop()
        client.on_death = lambda: loop.call_later(settings.death_notice, server.leave)
        serving = asyncio.create_task(server.serve([listener]))
        announce = asyncio.create_task(_announce(client, server, listener, on_ready))
        await serving
        # An engine that was signalled together with this process leaves in order, and maybe first.
        failure = None if server.was_signalled and client.has_left else client.error
        announce.cancel()
        await client.close()
    if failure is None:
        return 0
    if client.capacity is None:
        raise EngineDeadError(failure)
    logger.error("the engine is dead: %s", failure)
    return FAILED_EXIT_CODE


async def _announce(
    client: EngineClient,
    server: HttpServer,
    listener: socket.socket,
    on_ready: Callable[[CacheCapacity, str], None] | None,
) -> None:
    host, port = listener.getsockname()[:2]
    where = f"http://[{host}]:{port}" if listener.family is socket.AF_INET6 else f"http://{host}:{port}"
    logger.info("listening on %s; the model is loading", where)
    try:
        capacity = await client.wait_ready()
    except EngineDeadError:
        server.leave()
    else:
        gc.collect()
        gc.freeze()  # see engine_process.run_engine
        logger.info("ready: %s", where)
        if on_ready is not None:
            on_ready(capacity, where)


def _listen(settings: ServerSettings) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host} (--host): {error.strerror or error}") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port} ({flag}): {error.strerror or error}"
        ) from error
    return listener
