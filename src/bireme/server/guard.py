"""What every call passes on its way in: connection limits, its id, CORS, its key; and the access log on its way out."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import logging
import os
import re
import time
import uuid
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from bireme.errors import ConfigError
from bireme.server.logs import current_request_id
from bireme.server.metrics import Metrics
from bireme.server.protocol import ApiError, encode, error_object
from bireme.server.settings import ServerSettings
from bireme.server.wording import clipped

KEYS_VARIABLE = "BIREME_API_KEY"

HEADER_SECONDS = 30.0
"""What a client gets to send the head of a request, and to begin with its first."""

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/version", "/favicon.ico"})
"""Served without a key: what probes, scrapers and a browser's first look need. Pages' files lie below /static/."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:=+/@-]{1,128}")
_EXPOSED_HEADERS = ("x-request-id", "retry-after")

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("bireme.access")


def read_api_keys(keys: list[str], path: Path | None) -> tuple[str, ...]:
    """The keys of the flags, of a file (one a line; empty lines and those that begin with # do not count), or else of
    the environment.

    Raises:
        ConfigError: the file cannot be read or holds none, or a key has characters that no header carries.
    """
    found = list(keys)
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the keys of {path} (--api-key-file): {error}") from error
        listed = [line for line in lines if line and not line.startswith("#")]
        if not listed:
            raise ConfigError(f"{path} (--api-key-file) holds no key")
        found += listed
    if not found and os.environ.get(KEYS_VARIABLE):
        found = [os.environ[KEYS_VARIABLE]]
    for key in found:
        # Not the key itself: what is wrong with it is no reason to print it.
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("an API key (--api-key, --api-key-file) must be printable ASCII without spaces")
    return tuple(found)


def check_origins(settings: ServerSettings) -> None:
    """Raise ConfigError where pages of every origin could call with a visitor's credentials."""
    if settings.allow_credentials and "*" in settings.allowed_origins:
        raise ConfigError("--allow-credentials is given: --allowed-origins must then name origins, and not be *")


class Guard:
    """The application behind its guards.

    Every response carries X-Request-Id: the caller's own if it sent one, else a new one. Where there are keys, a call
    of anything but OPEN_PATHS needs one.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = settings.access_log
        self._digests = [_digest(key.encode()) for key in settings.api_keys]
        self._inner: ASGIApp = self._check_key if self._digests else app
        if settings.allowed_origins:
            self._inner = CORSMiddleware(
                self._inner,
                allow_origins=settings.allowed_origins,
                allow_methods=settings.allowed_methods,
                allow_headers=settings.allowed_headers,
                allow_credentials=settings.allow_credentials,
                expose_headers=_EXPOSED_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        given = _header(scope, b"x-request-id")
        is_sound = given is None or _REQUEST_ID.fullmatch(given)
        request_id = given if given is not None and is_sound else uuid.uuid4().hex
        current_request_id.set(request_id)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            if is_sound:
                await self._inner(scope, receive, send_with_id)
            else:
                text = "the X-Request-Id header must be 1 to 128 letters, digits or _.:=+/@-"
                await self._refuse(send_with_id, ApiError(400, text, param="X-Request-Id", code="invalid_request_id"))
        finally:
            if self._access_log:
                spent = (time.monotonic() - started) * 1000
                line = "%s %s: %d in %.1f ms"
                access_logger.info(line, scope["method"], clipped(ascii(scope["path"])[1:-1]), status, spent)

    async def _check_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith("/static/") or self._knows(_header(scope, b"authorization")):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the call has no valid API key: send Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await self._refuse(send, error)

    def _knows(self, authorization: str | None) -> bool:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = _digest(key.strip().encode("latin-1"))
        # Every key is compared, in full: how long it takes tells nothing about any of them.
        return functools.reduce(lambda known, each: hmac.compare_digest(digest, each) | known, self._digests, False)

    async def _refuse(self, send: Send, error: ApiError) -> None:
        self._metrics.http_errors[error.status] += 1
        body = encode(error_object(error.body))
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        head = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": head})
        await send({"type": "http.response.body", "body": body})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def connection_class(settings: ServerSettings, metrics: Metrics) -> type[HttpToolsProtocol]:
    """The protocol of one connection, with the limits of ``settings``; ``metrics`` counts what it refuses."""
    limits = {"max_header_bytes": settings.max_header_bytes, "metrics": metrics}
    return type("Connection", (_Connection,), limits)


class _Connection(HttpToolsProtocol):
    """uvicorn's, which also bounds the head of a request in length and in time, and refuses in OpenAI's form."""

    max_header_bytes: int
    metrics: Metrics

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_heads = 0
        self._num_head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEADER_SECONDS, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        num_heads, was_in_head = self._num_heads, self._in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_heads > num_heads:
            self._stop_timer()
        elif was_in_head:
            # The parser tells of a header once it is whole, so what it swallows until then is counted here.
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.max_header_bytes:
                self._refuse_head()
            elif self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
                self._head_timer = self.loop.call_later(HEADER_SECONDS, self._on_slow_head)

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_heads += 1
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.max_header_bytes:
            self._refuse_head()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        self._in_head = True
        if not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is no valid HTTP/1.1", "invalid_http")

    def _refuse_head(self) -> None:
        text = f"the request line and headers have more than {self.max_header_bytes} bytes (--max-header-bytes)"
        self._refuse(431, text, "headers_too_large")

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if not self._num_head_bytes:
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(408, f"the head of the request took longer than {HEADER_SECONDS:g} s", "timeout")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, text: str, code: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer is on its way over this connection; another one in it would be read as its part.
            self.transport.close()
            return
        self.metrics.http_errors[status] += 1
        body = encode(error_object(ApiError(status, text, code=code).body))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()
