"""Qwen's XML tool calls out of an answer that arrives in pieces (no HTTP framework here).

A call has this form; further parameters follow the first, and white space between tags is free::

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

It is a call once ``</function>`` is there, and shows as one then, whole: a client cannot run half a call, and so an
answer that is cut never has half of one. A ``<tool_call>`` that no function and parameter tags follow, or whose
``</function>`` never comes, is text like any other. The format has no escapes; therefore ``</parameter>`` ends a value
only where the next parameter or the function's end follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bireme.server.chat import partial_end
from bireme.server.tools import arguments_json

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION_START, FUNCTION_END = "<function=", "</function>"
PARAMETER_START, PARAMETER_END = "<parameter=", "</parameter>"

# Bounds on what may stand between tags and in them, so that what must be looked through again stays short.
_MAX_SPACE = 64
_MAX_NAME = 256
_SPACE = " \t\r\n"


class ToolCall(NamedTuple):
    """A complete call; ``arguments`` is the JSON of an object."""

    name: str
    arguments: str


class _UndecidedError(Exception):
    """The text ends before it shows what it is."""


class ToolCallParser:
    """Splits an answer's content into text and calls. However it is cut into pieces, the results join to the same.

    The text is what the calls leave, and ends without white space if there are any (templates write their own).

    Args:
        tools: as ``read_tools`` gives them. A call of a function that is not among them is a call too; its arguments
            are strings.
        only_first: the answer ends with the first call.

    Attributes:
        num_calls: so far.
    """

    def __init__(self, tools: Sequence[dict[str, Any]], *, only_first: bool = False) -> None:
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._only_first = only_first
        self._step = self._read_text
        self._held = ""
        self._raw: list[str] = []
        """What has been read of the call since its ``<tool_call>``, should it turn out to be none."""
        self._name = ""
        self._arguments: dict[str, str] = {}
        self._key = ""
        self._value: list[str] = []
        self._space = ""
        self._has_shown = False
        self._shown: list[str] = []
        self._calls: list[ToolCall] = []
        self.num_calls = 0

    @property
    def is_over(self) -> bool:
        """True once the first call has ended the answer: what comes then is left out."""
        return self._only_first and self.num_calls > 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take the next piece; return the text and the calls that are to be shown now."""
        self._held += text
        try:
            while not self.is_over:
                self._step()
        except _UndecidedError:
            pass
        return self._taken()

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The answer has ended: what is still held back."""
        if self._step in (self._read_head, self._read_value):
            self._show("".join(self._raw) + self._held)
        elif self._step == self._read_text:
            self._show(self._held)
        if not self.num_calls:
            self._shown.append(self._space)
        self._held = ""
        return self._taken()

    def _taken(self) -> tuple[str, list[ToolCall]]:
        text, calls = "".join(self._shown), self._calls
        self._shown, self._calls = [], []
        return text, calls

    # Each step reads from the start of what is held, takes away what is decided, and sets the step that follows.

    def _read_text(self) -> None:
        start = self._held.find(CALL_START)
        if start < 0:
            self._show(self._take(len(self._held) - partial_end(self._held, CALL_START)))
            raise _UndecidedError
        self._show(self._take(start))
        self._raw = [self._take(len(CALL_START))]
        self._step = self._read_head

    def _read_head(self) -> None:
        """``<function=name>`` and the tag after it."""
        function = _named_tag(self._held, _skip_space(self._held, 0), FUNCTION_START)
        tag = function and _tag_in_function(self._held, function[1])
        if not function or not tag:
            self._show(CALL_START)
            self._step = self._read_text
            return
        self._name = function[0]
        self._arguments = {}
        self._enter(*tag)

    def _read_value(self) -> None:
        end = self._held.find(PARAMETER_END)
        if end < 0:
            self._take_value(len(self._held) - partial_end(self._held, PARAMETER_END))
            raise _UndecidedError
        self._take_value(end)
        tag = _tag_in_function(self._held, len(PARAMETER_END))
        if not tag:
            self._take_value(len(PARAMETER_END))
            return
        self._arguments[self._key] = "".join(self._value).removeprefix("\n").removesuffix("\n")
        self._enter(*tag)

    def _read_end(self) -> None:
        """``</tool_call>``, which an answer may also lack."""
        end = _skip(self._held, _skip_space(self._held, 0), CALL_END)
        self._take(end or 0)
        self._step = self._read_text

    def _enter(self, key: str | None, end: int) -> None:
        """Go on behind a parameter's opening tag or, with ``key`` None, behind the function's end."""
        self._raw.append(self._take(end))
        if key is not None:
            self._key = key
            self._value = []
            self._step = self._read_value
            return
        self._calls.append(ToolCall(self._name, arguments_json(self._arguments, self._schemas.get(self._name))))
        self.num_calls += 1
        self._step = self._read_end

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _take_value(self, length: int) -> None:
        taken = self._take(length)
        self._value.append(taken)
        self._raw.append(taken)

    def _show(self, text: str) -> None:
        """Show text, but hold back the white space at its end until something other than a call follows."""
        text = self._space + text
        kept = text.rstrip(_SPACE)
        self._space = text[len(kept) :]
        if not kept:
            return
        if self.num_calls and not self._has_shown:
            kept = kept.lstrip(_SPACE)
        self._has_shown = True
        self._shown.append(kept)


def _skip(text: str, at: int, word: str) -> int | None:
    """The place behind ``word`` at ``at``; None if something else is there."""
    if text.startswith(word, at):
        return at + len(word)
    if word.startswith(text[at : at + len(word)]):
        raise _UndecidedError
    return None


def _skip_space(text: str, at: int) -> int:
    """The place behind the white space at ``at``, of which a bounded amount counts."""
    end = min(len(text), at + _MAX_SPACE)
    while at < end and text[at] in _SPACE:
        at += 1
    return at


def _named_tag(text: str, at: int, opening: str) -> tuple[str, int] | None:
    """The name in a tag ``<opening=name>`` and the place behind it; None if there is no such tag."""
    start = _skip(text, at, opening)
    if start is None:
        return None
    end = text.find(">", start, start + _MAX_NAME + 1)
    name = text[start : end if end >= 0 else start + _MAX_NAME + 1]
    if "<" in name or "\n" in name or (end >= 0 and not name.strip()) or len(name) > _MAX_NAME:
        return None
    if end < 0:
        raise _UndecidedError
    return name.strip(), end + 1


def _tag_in_function(text: str, at: int) -> tuple[str | None, int] | None:
    """The tag at ``at``, behind white space: a parameter's key, or None for the function's end; the place behind it."""
    at = _skip_space(text, at)
    end = _skip(text, at, FUNCTION_END)
    return (None, end) if end is not None else _named_tag(text, at, PARAMETER_START)
