"""What the HTTP side can be told."""

from __future__ import annotations

import msgspec


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server.

    Attributes:
        served_model_names: names of the model in the API; the first is its own.
        port: 0 takes any free one.
        api_keys: a call must carry one of them as its bearer token; none: everybody may call.
        allowed_origins: origins whose pages may call (CORS), ``*`` for all; none: no page but the server's own.
        allowed_methods: methods that those pages may use.
        allowed_headers: headers that they may send, ``*`` for all.
        allow_credentials: they may send cookies and the like (not with origin ``*``).
        max_body_bytes: a larger request body is answered 413.
        max_header_bytes: a longer request line with its headers is answered 431.
        max_sequences: answers that one call may ask for (its prompts times n); more are answered 400.
        max_queue_tokens: prompt tokens that may wait for their first output token; a call that would exceed them is
            answered 429, unless nothing waits. 0: no limit.
        request_timeout: seconds that a call may take from its arrival to its last byte; 0: no limit.
        sse_keep_alive: a stream that has nothing to say for so many seconds gets a comment line; 0: never.
        shutdown_grace: seconds that running requests get to finish after SIGTERM.
        retry_after: seconds that a refused client is told to wait when the queue is full.
        death_notice: seconds between an engine's death and the server's exit, for clients to read what happened.
        otlp_traces_endpoint: a collector's address, which gets a span for each generating call; empty: none.
        page: serve the page at ``/``.
        access_log: a line per request.
        log_format: ``text`` or ``json``.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("GET", "POST")
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int = 4 * 1024 * 1024
    max_header_bytes: int = 32 * 1024
    max_sequences: int = 2048
    max_queue_tokens: int = 0
    request_timeout: float = 0.0
    sse_keep_alive: float = 15.0
    shutdown_grace: float = 30.0
    retry_after: int = 1
    death_notice: float = 1.0
    otlp_traces_endpoint: str = ""
    page: bool = True
    access_log: bool = False
    log_format: str = "text"
