"""``docs/parameters.md``: what becomes of each request field, written from the tables that requests are read by.

``python -m bireme.server.parameters docs/parameters.md`` writes it anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bireme.server.params import CHAT, COMPLETIONS, FIELDS, Field
from bireme.server.responses import RESPONSE_FIELDS, RESPONSES
from bireme.server.tokens import DETOKENIZE, TOKEN_FIELDS, TOKENIZE

ENDPOINTS: dict[str, tuple[str, Sequence[Field]]] = {
    "/v1/chat/completions": (CHAT, FIELDS),
    "/v1/completions": (COMPLETIONS, FIELDS),
    "/v1/responses": (RESPONSES, RESPONSE_FIELDS),
    "/tokenize": (TOKENIZE, TOKEN_FIELDS),
    "/detokenize": (DETOKENIZE, TOKEN_FIELDS),
}
"""Every POST endpoint: its name in the tables, and its table."""

_REQUIRED = ("messages", "prompt", "input", "tokens")

_HEAD = """\
# Request parameters

*Written by `python -m bireme.server.parameters docs/parameters.md`; a test keeps it up to date.*

Nothing is accepted and ignored. A field is **honoured**; or it is known but has no effect here, and then it is accepted
only while it asks for nothing: as `null` or with the value that means **off**; or it is **refused**. A field that is in
no table is refused too. A refusal is a 400 whose error names the field, its value and the reason.
"""


def fields_of(path: str) -> list[Field]:
    """The fields of an endpoint, the honoured ones first."""
    endpoint, table = ENDPOINTS[path]
    return sorted((field for field in table if endpoint in field.endpoints), key=lambda field: not field.is_honoured)


def body_schema(path: str) -> dict[str, Any]:
    """The JSON schema of an endpoint's bodies: what has the right type and is no refused field."""
    properties: dict[str, Any] = {}
    for field in fields_of(path):
        if field.is_honoured:
            schema = {} if field.type is Any else _json_schema(field.type)
            properties[field.name] = schema | {"description": field.note}
        else:
            properties[field.name] = {"enum": [None, *field.off], "description": f"not supported: {field.note}"}
    required = [name for name in _REQUIRED if name in properties and path != "/tokenize"]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _json_schema(kind: Any) -> dict[str, Any]:
    """A type's schema with every definition in its place."""
    (schema,), definitions = msgspec.json.schema_components([kind])
    if "$ref" in schema:
        return definitions[schema["$ref"].rpartition("/")[2]]
    return schema


def page() -> str:
    """The whole page."""
    sections = [_HEAD]
    for path in ENDPOINTS:
        rows = [f"| `{field.name}` | {_fate(field)} | {field.note} |" for field in fields_of(path)]
        sections.append(
            "\n".join([f"## `{path}`", "", "| field | what becomes of it | |", "| --- | --- | --- |", *rows])
        )
    return "\n\n".join(section.rstrip("\n") for section in sections) + "\n"


def _fate(field: Field) -> str:
    if field.is_honoured:
        return "honoured"
    if not field.off:
        return "refused"
    off = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in field.off)
    return f"accepted when {off}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
