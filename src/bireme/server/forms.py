"""What a request says about the form of its answer: response_format, guided_* and the like, and forced tool calls.

A call is written as ``tool_parser`` describes; here is the grammar that ensures it, in llguidance's Lark. The tags
around a call are tokens of their own; between them is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from bireme.errors import InvalidRequestError
from bireme.server.tool_parser import (
    CALL_END,
    CALL_START,
    FUNCTION_END,
    FUNCTION_START,
    PARAMETER_END,
    PARAMETER_START,
)
from bireme.server.wording import shown
from bireme.structured import MAX_REPEATS, dumps, lark_regex, lark_string, with_whitespace
from bireme.types import STRUCTURES, StructuredOutputsParams

FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Request fields that ask for a form; at most one of them may."""

_ROOT_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_REMARKS = {"title", "description", "$schema", "$id", "$comment", "examples", "default", "deprecated"}
_VALUE_END = f"\n{PARAMETER_END}\n"
_DEFINITIONS = ("$defs", "definitions")
_MAX_BRANCHES = 64


def read_form(fields: dict[str, Any]) -> StructuredOutputsParams | None:
    """Take the fields that ask for a form out of a request's; the form, or None where the answer is free.

    Raises:
        InvalidRequestError: more than one asks, or one is malformed; names it.
    """
    forms: dict[str, StructuredOutputsParams] = {}
    for name in FORM_FIELDS:
        value = fields.pop(name, None)
        form = None if value is None else _READERS[name](name, value)
        if form is not None:
            forms[name] = form
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise InvalidRequestError(f"{first} and {second} both ask for a form of the answer: give one of them", second)
    return next(iter(forms.values()), None)


def _response_format(name: str, value: Any) -> StructuredOutputsParams | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        _refuse_others(name, value, ("type",))
        return None
    if kind == "json_object":
        _refuse_others(name, value, ("type",))
        return StructuredOutputsParams(json_object=True, field=name)
    if kind != "json_schema":
        raise InvalidRequestError(
            f"{name}.type is {shown(kind)}: it must be 'text', 'json_object' or 'json_schema'", name
        )
    _refuse_others(name, value, ("type", "json_schema"))
    named = value.get("json_schema")
    where = f"{name}.json_schema"
    if not isinstance(named, dict):
        raise InvalidRequestError(f"{where} is {shown(named)}: it must be an object with a schema", name)
    _refuse_others(where, named, ("name", "schema", "strict", "description"))
    for key, kinds in (("name", str), ("description", str), ("strict", bool)):
        if named.get(key) is not None and not isinstance(named[key], kinds):
            raise InvalidRequestError(f"{where}.{key} is {shown(named[key])}: it must be a {kinds.__name__}", name)
    schema = named.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{where}.schema is {shown(schema)}: it must be a JSON schema, an object", name)
    return StructuredOutputsParams(json=schema, field=f"{where}.schema")


def _structured_outputs(name: str, value: Any) -> StructuredOutputsParams:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} is {shown(value)}: it must be an object", name)
    given = {key: each for key, each in value.items() if each is not None and each is not False}
    _refuse_others(name, given, STRUCTURES)
    if isinstance(given.get("choice"), list):
        given["choice"] = tuple(given["choice"])
    return StructuredOutputsParams(**given, field=name)


def _guided(name: str, value: Any) -> StructuredOutputsParams:
    form = name.removeprefix("guided_")
    if form == "choice" and isinstance(value, list):
        value = tuple(value)
    return StructuredOutputsParams(**{form: value}, field=name)


_READERS = {name: _guided for name in FORM_FIELDS} | {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
}


def _refuse_others(where: str, value: dict[str, Any], known: Iterable[str]) -> None:
    for key, each in value.items():
        if key not in known and each is not None:
            raise InvalidRequestError(
                f"{where}.{key} is {shown(each)}, which is not supported", where.partition(".")[0]
            )


def with_calls(
    form: StructuredOutputsParams | None,
    tools: Sequence[dict[str, Any]],
    strict: frozenset[str],
    choice: str | dict[str, Any] | None,
    only_first: bool,
) -> StructuredOutputsParams | None:
    """The form of an answer that may, or must, be tool calls.

    Args:
        form: what else is asked of the answer.
        tools: the functions that the model is shown.
        strict: names of those whose arguments must match their schemas.
        choice: None or "auto": calls may be; "required": at least one must be; or an object that names a function:
            a call of that must be.
        only_first: one call at most.

    Returns:
        None where nothing is asked.

    Raises:
        InvalidRequestError: calls must be, and so must another form; or a schema cannot be written as a grammar.
    """
    must_call = choice is not None and choice != "auto"
    if not must_call and not strict and form is None:
        return None
    chosen = named_function(choice)
    if chosen is not None and chosen not in [tool["function"]["name"] for tool in tools]:
        raise InvalidRequestError(
            f"tool_choice names the function {shown(chosen)}, which is not in tools", "tool_choice"
        )
    rules = _Rules()
    for tool in tools:
        function = tool["function"]
        if chosen is not None and function["name"] != chosen:
            continue
        rules.add_function(function["name"], function.get("parameters"), function["name"] in strict, must_call)
    one = chosen is not None or only_first
    if must_call:
        if form is not None:
            raise InvalidRequestError(
                f"tool_choice asks for a call, and {form.field} for another form of the answer: give one of them",
                "tool_choice",
            )
        start = "start: call" if one else 'start: call ("\\n" call)*'
        return StructuredOutputsParams(grammar=rules.text(start), field="tools")
    if form is None:
        start = "start: free (call free)?" if one else "start: free (call free)*"
        return StructuredOutputsParams(grammar=rules.text(start), field="tools")
    start = "start: call" if one else 'start: call ("\\n" call)*'
    return msgspec.structs.replace(form, or_calls=rules.text(start))


def named_function(choice: Any) -> str | None:
    """The function that a ``tool_choice`` names, if it is of that form."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


class _Rules:
    """Collects the rules of a grammar of calls."""

    def __init__(self) -> None:
        self._functions: list[str] = []
        self._lines: list[str] = []

    def text(self, start: str) -> str:
        """The grammar with its start rule."""
        lines = [
            start,
            f'call: {CALL_START} "\\n" ({" | ".join(self._functions)}) "\\n" {CALL_END}',
            "free: FREE?",
            f"FREE: /(?s:.+)/ & ~/(?s:.*){CALL_START}(?s:.*)/",
            "any_value" + _until_end("ANY_VALUE"),
            f"ANY_VALUE: {_VALUE}",
            f"any_parameter: {lark_string(PARAMETER_START)} /[A-Za-z0-9_.-]{{1,64}}/ {_tag_end} any_value",
            *self._lines,
        ]
        return "\n".join(lines)

    def add_function(self, name: str, parameters: Any, is_strict: bool, is_typed: bool) -> None:
        """A function that may be called. ``is_typed``: its arguments follow its schema also where it is not strict."""
        rule = f"function_{len(self._functions)}"
        self._functions.append(rule)
        where = f"the parameters of {name!r}"
        parameters = parameters or {"properties": {}, "additionalProperties": False}
        arguments = "any_parameter*"
        if is_strict or is_typed:
            arguments = self._arguments(rule, parameters, where, is_strict)
        self._lines.append(f"{rule}: {lark_string(f'{FUNCTION_START}{name}>' + chr(10))} {arguments} {_function_end}")

    def _arguments(self, rule: str, parameters: dict[str, Any], where: str, is_strict: bool) -> str:
        unknown = sorted(set(parameters) - _ROOT_KEYS - _REMARKS)
        if is_strict and unknown:
            raise InvalidRequestError(
                f"{where} hold {shown(unknown[0])}, which cannot be made sure of in a call's arguments: leave out "
                "strict, or the keyword",
                "tools",
            )
        properties = parameters.get("properties") or {}
        required = parameters.get("required") or []
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise InvalidRequestError(f"{where}: required is {shown(required)}: it must be a list of names", "tools")
        # A schema that lists arguments means these, whatever JSON Schema says of others.
        others = parameters.get("additionalProperties", "properties" not in parameters)
        properties = dict(properties) | {
            name: {} if isinstance(others, bool) else others for name in required if name not in properties
        }
        if not properties and others is not False:
            return "any_parameter*"
        shared = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
        parts = []
        for index, (name, schema) in enumerate(properties.items()):
            if not name.strip() or name != name.strip() or set(name) & set("<>\n\r") or len(name) > 128:
                raise InvalidRequestError(
                    f"{where}: {shown(name)} cannot be the name of an argument in a call", "tools"
                )
            part = f"{rule}_{index}"
            value = self._value(part, schema, shared)
            self._lines.append(f"{part}: {lark_string(f'{PARAMETER_START}{name}>' + chr(10))} ({value})")
            parts.append(part if name in required else f"{part}?")
        return " ".join(parts)

    def _value(self, rule: str, schema: Any, shared: dict[str, Any]) -> str:
        """What stands for a value, its end included: alternatives for the texts and for the JSON that it may be."""
        alternatives: list[str] = []
        for index, part in enumerate(_branches(schema, shared)):
            branch: dict[str, Any] | None = part
            literals = _literals(part)
            if literals is not None:
                texts = [each for each in literals if isinstance(each, str)]
                alternatives += [lark_string(text + _VALUE_END) for text in texts if PARAMETER_END not in text]
                others = [each for each in literals if not isinstance(each, str)]
                branch = {"enum": others} if others else None
            elif _is_text(part):
                terminal = f"{rule}_{index}"
                self._lines.append(f"{terminal}{_until_end(terminal.upper())}")
                self._lines.append(f"{terminal.upper()}: {_text_pattern(part)}")
                alternatives.append(terminal)
                branch = None
            if branch is not None:
                schema_text = dumps(with_whitespace(branch | shared if "$ref" in dumps(branch) else branch))
                alternatives.append(f"%json {schema_text} {lark_string(_VALUE_END)}")
        return " | ".join(alternatives) or "any_value"


def _until_end(terminal: str) -> str:
    return f"[suffix={lark_string(_VALUE_END)}]: {terminal}"


_VALUE = r"/(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)/"
_tag_end = lark_string(">\n")
_function_end = lark_string(FUNCTION_END)


def _branches(schema: Any, shared: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives that a value's schema allows, as far as they are plain: each is all text or all JSON."""
    open_schemas: list[tuple[Any, int]] = [(schema, 0)]
    found: list[dict[str, Any]] = []
    while open_schemas:
        each, depth = open_schemas.pop(0)
        if not isinstance(each, dict):
            each = {}
        keys = set(each) - _REMARKS
        reference = each.get("$ref")
        named = each.get("type")
        if keys == {"$ref"} and isinstance(reference, str) and depth < 8:
            open_schemas.insert(0, (_definition(reference, shared), depth + 1))
        elif keys in ({"anyOf"}, {"oneOf"}) and isinstance(each[next(iter(keys))], list) and depth < 8:
            open_schemas = [(part, depth + 1) for part in each[next(iter(keys))]] + open_schemas
        elif isinstance(named, list) and "string" in named and len(named) > 1 and _literals(each) is None:
            rest = [kind for kind in named if kind != "string"]
            found += [each | {"type": "string"}, each | {"type": rest}]
        else:
            found.append(each)
        if len(found) + len(open_schemas) > _MAX_BRANCHES:
            return [schema]
    return found


def _definition(reference: str, shared: dict[str, Any]) -> Any:
    value: Any = shared
    for part in reference.removeprefix("#/").split("/"):
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def _literals(schema: dict[str, Any]) -> list[Any] | None:
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [schema["const"]] if "const" in schema else None


def _is_text(schema: dict[str, Any]) -> bool:
    """Whether the parser takes a value of this schema as it is written: it is a string, or may be anything."""
    named = schema.get("type")
    return named in ("string", ["string"]) or not set(schema) - _REMARKS


def _text_pattern(schema: dict[str, Any]) -> str:
    """The terminal of a string: bounds and pattern, without what would end the value."""
    pattern = _VALUE
    low, high = schema.get("minLength"), schema.get("maxLength")
    if isinstance(low, int) or isinstance(high, int):
        has_end = isinstance(high, int) and high <= MAX_REPEATS
        pattern += f" & /(?s:.{{{low or 0},{high if has_end else ''}}})/"
    if isinstance(schema.get("pattern"), str):
        pattern += f" & {lark_regex(_searching(schema['pattern']))}"
    return pattern


def _searching(pattern: str) -> str:
    """An expression of a whole text in which ``pattern`` is found.

    Where anchors and alternatives meet it is ``pattern`` itself: not every text with a find, but none without.
    """
    if "|" in pattern and ("^" in pattern or "$" in pattern):
        return pattern
    start = end = "(?s:.*)"
    if pattern.startswith("^"):
        start, pattern = "", pattern[1:]
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        end, pattern = "", pattern[:-1]
    return f"{start}(?:{pattern}){end}"
