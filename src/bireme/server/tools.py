"""Function tools: the descriptions that requests give, and arguments typed by them (no HTTP framework here)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from bireme.errors import InvalidRequestError
from bireme.server.wording import shown

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_EXACT_INTEGERS = 2**53
_encode = msgspec.json.Encoder().encode


def read_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """A request's ``tools`` as the template sees them: without nulls, and without what is meant for the server.

    Raises:
        InvalidRequestError: names the tool, the field and the value.
    """
    read: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = _read_tool(tool, where)
        name = function["name"]
        if name in places:
            raise InvalidRequestError(f"{where}.function.name is {shown(name)}, as is that of {places[name]}", "tools")
        places[name] = where
        read.append({"type": "function", "function": function})
    return read


def strict_names(tools: Sequence[Any]) -> frozenset[str]:
    """Names of a request's ``tools`` (which ``read_tools`` has read) whose arguments must match their schemas."""
    return frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequestError(f"{where} is {shown(tool)}: it must be an object", "tools")
    if tool.get("type") != "function":
        raise InvalidRequestError(
            f"{where}.type is {shown(tool.get('type'))}: only tools of type 'function' can be called", "tools"
        )
    for key, value in tool.items():
        if key not in ("type", "function") and value is not None:
            raise InvalidRequestError(f"{where}.{key} is {shown(value)}, which is not supported", "tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where}.function is {shown(function)}: it must be an object", "tools")
    where = f"{where}.function"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.name is {shown(name)}: it must be 1 to 64 letters, digits, '_', '-' or '.'", "tools"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{where}.description is {shown(description)}: it must be a string", "tools")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"{where}.strict is {shown(strict)}: it must be true or false", "tools")
    _check_parameters(function.get("parameters"), f"{where}.parameters")
    return {key: value for key, value in function.items() if key != "strict" and value is not None}


def _check_parameters(parameters: Any, where: str) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise InvalidRequestError(f"{where} is {shown(parameters)}: it must be a JSON schema, an object", "tools")
    kind = parameters.get("type", "object")
    if kind != "object":
        raise InvalidRequestError(f"{where}.type is {shown(kind)}: arguments are always an object", "tools")
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise InvalidRequestError(f"{where}.properties is {shown(properties)}: it must be an object", "tools")


def arguments_json(arguments: dict[str, str], parameters: Any) -> str:
    """The JSON object of a call's arguments, which a model wrote as texts, typed by the function's schema."""
    fields = [
        f"{_string(name)}: {_argument_json(text, _types_of(name, parameters))}" for name, text in arguments.items()
    ]
    return "{" + ", ".join(fields) + "}"


def _argument_json(text: str, types: set[str]) -> str:
    """JSON of one argument.

    Where the schema allows something else than a string and the text is JSON of such a type, it is that, in its own
    digits and spacing; in every other case it is a string, exactly as written.
    """
    if types - {"string"}:
        source = text.strip()
        if "string" not in types:
            source = _PYTHON_WORDS.get(source, source)
        try:
            value = msgspec.json.decode(source)
        except (ValueError, RecursionError):
            return _string(text)
        kind = _kind(value)
        if kind in types or (kind == "integer" and "number" in types):
            return source
        if kind == "number" and "integer" in types and value.is_integer() and abs(value) < _EXACT_INTEGERS:
            return str(int(value))
    return _string(text)


def _types_of(name: str, parameters: Any) -> set[str]:
    """The JSON types that a schema allows for an argument; empty where it says nothing.

    ``anyOf``, ``oneOf`` and ``allOf`` count as all that their branches name. Each reference is followed once, so
    circular ones end.
    """
    if not isinstance(parameters, dict):
        return set()
    properties = parameters.get("properties")
    declared = properties.get(name) if isinstance(properties, dict) else None
    open_schemas = [parameters.get("additionalProperties") if declared is None else declared]
    followed: set[str] = set()
    types: set[str] = set()
    while open_schemas:
        schema = open_schemas.pop()
        if not isinstance(schema, dict):
            continue
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            open_schemas.append(_resolve(reference, parameters))
        types |= _own_types(schema)
        for key in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(key)
            if isinstance(branches, list):
                open_schemas += branches
    return types


def _own_types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema names itself, or else those of the values or parts that it names."""
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {kind for kind in named if isinstance(kind, str)}
    if isinstance(schema.get("enum"), list):
        return {_kind(value) for value in schema["enum"]}
    if "const" in schema:
        return {_kind(schema["const"])}
    return {kind for key, kind in (("properties", "object"), ("items", "array")) if key in schema}


def _resolve(reference: str, root: Any) -> Any:
    """What a reference within the schema (``#/$defs/Name``) points to; None for any other."""
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _string(text: str) -> str:
    return _encode(text).decode()
