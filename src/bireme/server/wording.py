"""How values of requests appear in messages to their senders (no HTTP framework here)."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_SHOWN_CHARACTERS = 80
_PATH = re.compile(r"(?<![\w/])(?:/[\w.@+~-]+)+/([\w.@+~-]+)")


def clipped(text: str, length: int = _SHOWN_CHARACTERS) -> str:
    """A text, cut to ``length``."""
    return text if len(text) <= length else text[:length] + "…"


def without_folders(text: str) -> str:
    """A text of this machine for somebody elsewhere: of each absolute path the last name is left."""
    return _PATH.sub(r"\1", text)


def shown(value: Any) -> str:
    """A value as JSON, and short."""
    return clipped(msgspec.json.encode(value).decode())
