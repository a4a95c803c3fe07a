"""The messages of a chat request, as the template sees them (no HTTP framework here)."""

from __future__ import annotations

from typing import Any

import msgspec

from bireme.errors import InvalidRequestError
from bireme.server.chat import text_of_parts
from bireme.server.wording import shown

Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {"role", "content"}
_FIELDS_OF_ROLE = {"assistant": {"reasoning_content", "reasoning", "tool_calls"}, "tool": {"tool_call_id", "name"}}
_REASONS = {"name": ": the models' templates show no names, so put it into the content"}
_OFF: dict[str, tuple[Any, ...]] = {"annotations": ([],), "tool_calls": ([],)}

# What clients leave in a call that they received and send back; it says nothing new.
_CALL_LEFTOVERS = {"index"}
_FUNCTION_LEFTOVERS = {"parsed_arguments"}


def read_messages(messages: list[Any]) -> list[Message]:
    """Check a conversation and bring it into the form that templates expect.

    Contents become text, and the arguments of tool calls mappings. Results of tools take the order of the calls that
    they answer, since a template shows no ids.

    Raises:
        InvalidRequestError: names the message, the field and the value.
    """
    if not messages:
        raise InvalidRequestError("messages is empty: at least one message is needed", "messages")
    read: list[Message] = []
    results = _Results()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        one = _read_message(message, where)
        if one["role"] == "tool":
            results.add(one, where)
            continue
        read += results.in_order()
        results = _Results(one.get("tool_calls", ()))
        read.append(one)
    return read + results.in_order()


class _Results:
    """The results that directly follow a message, by the calls that it makes."""

    def __init__(self, calls: list[Message] | tuple[()] = ()) -> None:
        self._names = {call["id"]: call["function"]["name"] for call in calls}
        self._found: dict[str, Message] = {}

    def add(self, message: Message, where: str) -> None:
        call_id = message["tool_call_id"]
        if call_id not in self._names:
            raise InvalidRequestError(
                f"{where}.tool_call_id is {shown(call_id)}: there is no such call in the assistant's message before",
                "messages",
            )
        if call_id in self._found:
            raise InvalidRequestError(
                f"{where}.tool_call_id is {shown(call_id)}: that call has its result already", "messages"
            )
        name = message.pop("name", None)
        if name not in (None, self._names[call_id]):
            raise InvalidRequestError(
                f"{where}.name is {shown(name)}: the call is one of {shown(self._names[call_id])}", "messages"
            )
        self._found[call_id] = message

    def in_order(self) -> list[Message]:
        return [self._found[call_id] for call_id in self._names if call_id in self._found]


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} is {shown(message)}: it must be an object", "messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(f"{where}.role is {shown(role)}: it must be one of {', '.join(_ROLES)}", "messages")
    known = _FIELDS | _FIELDS_OF_ROLE.get(role, set())
    for name, value in message.items():
        if name not in known and value is not None and value not in _OFF.get(name, ()):
            raise InvalidRequestError(
                f"{where}.{name} is {shown(value)}, which is not supported in a message of role {role}"
                f"{_REASONS.get(name, '')}",
                "messages",
            )
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        content = text_of_parts(content, where)
    if not isinstance(content, str):
        raise InvalidRequestError(
            f"{where}.content is {shown(content)}: it must be a string or a list of text parts", "messages"
        )
    read: Message = {"role": _ROLES[role], "content": content}
    if role == "tool":
        read["tool_call_id"] = _text_field(message, "tool_call_id", where)
        read["name"] = message.get("name")
    # The second name is vLLM's newer one; the answers here carry both.
    for name in ("reasoning", "reasoning_content"):
        if message.get(name) is not None:
            read["reasoning_content"] = _text_field(message, name, where)
    if message.get("tool_calls"):
        read["tool_calls"] = _read_calls(message["tool_calls"], f"{where}.tool_calls")
    return read


def _read_calls(calls: Any, where: str) -> list[Message]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{where} is {shown(calls)}: it must be a list", "messages")
    read: list[Message] = []
    for i, call in enumerate(calls):
        one = _read_call(call, f"{where}[{i}]")
        if any(one["id"] == other["id"] for other in read):
            raise InvalidRequestError(f"{where}[{i}].id is {shown(one['id'])}, as is that of another call", "messages")
        read.append(one)
    return read


def _read_call(call: Any, where: str) -> Message:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise InvalidRequestError(f"{where} is {shown(call)}: it must be an object with id and function", "messages")
    if call.get("type", "function") != "function":
        raise InvalidRequestError(
            f"{where}.type is {shown(call['type'])}: only calls of type 'function' are understood", "messages"
        )
    call_id = _text_field(call, "id", where)
    _refuse_others(call, {"id", "type", "function", *_CALL_LEFTOVERS}, where)
    where += ".function"
    function = call["function"]
    name = _text_field(function, "name", where)
    _refuse_others(function, {"name", "arguments", *_FUNCTION_LEFTOVERS}, where)
    arguments = _read_arguments(function.get("arguments"), where)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Arguments as a mapping, from their JSON text (or, as in messages for templates, from a mapping)."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{where}.arguments is {shown(arguments)}: it must be the JSON of an object", "messages"
        )
    return value


def _text_field(holder: dict[str, Any], name: str, where: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} is {shown(value)}: it must be a string", "messages")
    return value


def _refuse_others(holder: dict[str, Any], known: set[str], where: str) -> None:
    for name, value in holder.items():
        if name not in known and value is not None:
            raise InvalidRequestError(f"{where}.{name} is {shown(value)}, which is not supported", "messages")
