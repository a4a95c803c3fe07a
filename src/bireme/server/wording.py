"""How values of requests appear in messages to their senders (no HTTP framework here)."""

from __future__ import annotations

from typing import Any

import msgspec

_SHOWN_CHARACTERS = 80


def clipped(text: str, length: int = _SHOWN_CHARACTERS) -> str:
    """A text, cut to ``length``."""
    return text if len(text) <= length else text[:length] + "…"


def shown(value: Any) -> str:
    """A value as JSON, and short."""
    return clipped(msgspec.json.encode(value).decode())
