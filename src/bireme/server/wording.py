"""How values of requests appear in messages to their senders (no HTTP framework here)."""

from __future__ import annotations

from typing import Any

import msgspec

_SHOWN_CHARACTERS = 80


def shown(value: Any) -> str:
    """A value as JSON, and short."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
