"""What the HTTP side can be told."""

from __future__ import annotations

import msgspec


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server.

    Attributes:
        served_model_names: names of the model in the API; the first is its own.
        port: 0 takes any free one.
        max_body_bytes: a larger request body is answered 413.
        shutdown_grace: seconds that running requests get to finish after SIGTERM.
        retry_after: seconds that a refused client is told to wait when the queue is full.
        death_notice: seconds between an engine's death and the server's exit, for clients to read what happened.
        access_log: a line per request.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 4 * 1024 * 1024
    shutdown_grace: float = 30.0
    retry_after: int = 1
    death_notice: float = 1.0
    access_log: bool = False
