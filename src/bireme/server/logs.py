"""The log's form: lines for people or JSON objects for programs, each with the id of the call that it is about."""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar

import msgspec

FORMATS = ("text", "json")

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")
"""The X-Request-Id of the call that the running task serves; empty outside of one."""

_encode = msgspec.json.Encoder().encode


class TextFormatter(logging.Formatter):
    """Time, level, logger, the call's id in brackets if there is one, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(call)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        request_id = current_request_id.get()
        record.call = f"[{request_id}] " if request_id else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and request_id and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = current_request_id.get()
        if request_id:
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _encode(entry).decode()


def configure(form: str) -> None:
    """Log from INFO up to stderr in ``form`` (one of FORMATS), in place of whatever was configured before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
