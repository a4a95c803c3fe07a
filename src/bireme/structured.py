"""From what a request asks of an answer's form to the grammar that llguidance compiles (pure text, no torch here)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from bireme.errors import InvalidRequestError
from bireme.types import StructuredOutputsParams

MAX_GRAMMAR_BYTES = 128 * 1024
"""A longer schema, expression or grammar is refused unread: what compiling costs grows with it."""

MAX_REPEATS = 50_000
"""How often an expression may ask for its innermost part at the least: its automaton has as many states, and those of
a million take half a second to build while everybody waits."""

JSON_WHITESPACE = r"\n[ \t]{0,32}|[ ]"
"""What may stand where JSON takes white space: nothing, a space, or a line break and an indent. A model that likes
white space better than ending would otherwise write it for ever."""

LEAD = r"\n{1,2}"
"""What may follow the end of a thought before the form begins."""

_OPTIONS = "x-guidance"
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")

_encode = msgspec.json.Encoder().encode


def grammar_of(params: StructuredOutputsParams) -> str:
    """The llguidance grammar (its JSON form) of a form.

    Raises:
        InvalidRequestError: it is too long, is no JSON where it must be, or sets options that are not the caller's.
    """
    given = (params.json_text, params.regex, params.grammar, params.or_calls, *(params.choice or ()))
    size = sum(len(text.encode()) for text in given if text)
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"{params.field} has {size} bytes: at most {MAX_GRAMMAR_BYTES} are read", params.field
        )
    for pattern in (params.regex, params.grammar, params.or_calls):
        _check_repeats(pattern or "", params.field)
    body = _body(params)
    if not params.begins_after and not params.or_calls:
        return dumps({"grammars": [body]})
    lead = "LEAD?" if params.begins_after else ""
    calls = "| @calls" if params.or_calls else ""
    grammars = [
        {"name": "answer", "lark_grammar": f"start: {lead} (@body {calls})\nLEAD: /{LEAD}/"},
        {"name": "body"} | body,
    ]
    if params.or_calls:
        grammars.append({"name": "calls", "lark_grammar": params.or_calls})
    return dumps({"grammars": grammars})


def _body(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.json_object:
        return {"json_schema": with_whitespace({"type": "object"})}
    if params.json is not None:
        return {"json_schema": with_whitespace(read_schema(params.json_text, params.field))}
    if params.regex is not None:
        if (len(params.regex) - len(params.regex.rstrip("\\"))) % 2:
            raise InvalidRequestError(f"{params.field} is an expression that ends in a single backslash", params.field)
        return {"lark_grammar": f"start: {lark_regex(params.regex)}"}
    if params.choice is not None:
        return {"lark_grammar": "start: " + " | ".join(lark_string(text) for text in params.choice)}
    assert params.grammar is not None
    if "::=" not in params.grammar:
        return {"lark_grammar": params.grammar}
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return {"lark_grammar": gbnf_to_lark(params.grammar)}
    except Exception as error:  # the converter has no errors of its own
        raise InvalidRequestError(f"{params.field} is no GBNF that can be read: {error}", params.field) from error


def read_schema(text: str, field: str) -> dict[str, Any]:
    """The JSON schema in ``text``; ``true`` is the empty one.

    Raises:
        InvalidRequestError: it is no JSON, no schema, or sets the compiler's options.
    """
    try:
        schema = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} is no valid JSON: {error}", field) from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{field} must be a JSON schema that something satisfies, an object", field)
    if _OPTIONS in schema:
        raise InvalidRequestError(f"{field} holds {_OPTIONS!r}, which is not supported", field)
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            patterns = [part.get("pattern"), *_keys(part.get("patternProperties"))]
            for pattern in patterns:
                _check_repeats(pattern, field)
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return schema


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _check_repeats(pattern: Any, field: str) -> None:
    if isinstance(pattern, str) and "{" in pattern:
        count = largest_repeat(pattern)
        if count > MAX_REPEATS:
            raise InvalidRequestError(
                f"{field} holds an expression that repeats a part at least {count} times: at most {MAX_REPEATS} "
                f"({pattern[:80]!r})",
                field,
            )


def largest_repeat(pattern: str) -> int:
    """How often a regular expression repeats its most repeated part at the least: ``(ab{3}){4,9}`` gives 12."""
    largest, groups, last, at = 1, [1], 1, 0
    in_class = False
    while at < len(pattern):
        character = pattern[at]
        at += 2 if character == "\\" else 1
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class, last = True, 1
        elif character == "(":
            groups.append(1)
            last = 1
        elif character == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif character == "{":
            end = at
            while end < len(pattern) and pattern[end] in "0123456789":
                end += 1
            last *= max(1, int(pattern[at : min(end, at + 9)] or 1))
            largest, groups[-1] = max(largest, last), max(groups[-1], last)
            at = pattern.find("}", end, end + 16) + 1 or end
        elif character not in "?*+":
            last = 1
    return largest


def with_whitespace(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with the rule for white space."""
    return schema | {_OPTIONS: {"whitespace_pattern": JSON_WHITESPACE}}


def lark_string(text: str) -> str:
    """``text`` as a literal of a Lark grammar."""
    return dumps(text)


def lark_regex(pattern: str) -> str:
    r"""``pattern`` as a regular expression of a Lark grammar; ``\d`` means ASCII digits, as people expect."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, 'd')}/"


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside a schema, each with its JSON pointer from there; definitions come last."""
    for key in (*_SINGLE, *_LISTS, *_MAPS):
        value = schema.get(key)
        if isinstance(value, dict) and key in _SINGLE:
            yield f"/{key}", value
        elif isinstance(value, dict) and key in _MAPS:
            for name, each in value.items():
                if isinstance(each, dict):
                    yield f"/{key}/{name.replace('~', '~0').replace('/', '~1')}", each
        elif isinstance(value, list) and (key in _LISTS or key == "items"):
            for index, each in enumerate(value):
                if isinstance(each, dict):
                    yield f"/{key}/{index}", each


def dumps(value: Any) -> str:
    """Compact JSON text."""
    return _encode(value).decode()
