"""Conversations: messages → prompt text, and an answer's text → thought and content (no HTTP framework here)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from bireme.errors import ConfigError, InvalidRequestError
from bireme.server.tokenizer import Tokenizer
from bireme.server.wording import clipped, shown
from bireme.types import SamplingParams

THINK_START = "<think>"
THINK_END = "</think>"

RENDER_SECONDS = 5.0
"""What a template gets for one conversation."""

MAX_PROMPT_CHARACTERS = 32 * 1024 * 1024
"""The longest text that a template may write."""

_MAX_POWER = 64
_METER = "_meter"

_RESERVED_NAMES = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", _METER}
)


def check_template_variables(names: Iterable[str]) -> None:
    """Raise InvalidRequestError if one of ``names`` is what a template receives from the request itself."""
    reserved = sorted(_RESERVED_NAMES.intersection(names))
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs holds {reserved[0]!r}, which the request itself sets", "chat_template_kwargs"
        )


class _GenerationBlock(Extension):
    """``{% generation %} … {% endgeneration %}``: marks assistant text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and shape that Jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also bounds what one multiplication makes."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """For the code that Jinja makes of a template: ``left * right`` or ``left ** right``."""
        if operator == "**" and isinstance(right, int) and abs(right) > _MAX_POWER:
            raise SecurityError(f"a power above {_MAX_POWER}")
        for many, times in ((left, right), (right, left)):
            if not isinstance(many, (str, bytes, list, tuple)) or not isinstance(times, int):
                continue
            if len(many) * times > MAX_PROMPT_CHARACTERS:
                raise SecurityError(f"a sequence repeated to more than {MAX_PROMPT_CHARACTERS}")
        return super().call_binop(context, operator, left, right)


def _add_meters(tree: nodes.Template) -> None:
    """Let every pass through a loop and every call of a macro look at the clock."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        tick = nodes.ExprStmt(nodes.Call(nodes.Name(_METER, "load"), [], [], None, None))
        node.body.insert(0, tick.set_lineno(node.lineno))  # type: ignore[attr-defined]


class ChatTemplate:
    """A checkpoint's chat template, with what templates written for ``transformers`` expect to find.

    It runs in a sandbox, for RENDER_SECONDS at most and to a text of MAX_PROMPT_CHARACTERS at most: templates come with
    checkpoints, and their variables from anyone.

    Attributes:
        takes_tools: the template can describe tools to the model.

    Raises:
        ConfigError: the template is no valid Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(tree)
            _add_meters(tree)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"cannot use the chat template: line {error.lineno}: {error.message}") from error
        except Exception as error:
            # Jinja's code generator has errors of its own, Python's compiler among them.
            raise ConfigError(f"cannot use the chat template: {type(error).__name__}: {error}") from error
        self._special_tokens = special_tokens or {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template that came with ``tokenizer``.

        Raises:
            ConfigError: the checkpoint has none, or it is no valid Jinja.
        """
        if tokenizer.chat_template is None:
            raise ConfigError(
                "the checkpoint has no chat template: neither chat_template.jinja nor one in tokenizer_config.json"
            )
        return cls(tokenizer.chat_template, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: role, content and whatever else the template reads.
            tools: function descriptions, or None.
            add_generation_prompt: end with the opening of the assistant's answer.
            variables: the template's own switches, e.g. ``enable_thinking``.

        Raises:
            InvalidRequestError: the template refuses the messages, or fails on them or on the variables.
        """
        check_template_variables(variables)
        deadline = time.monotonic() + RENDER_SECONDS

        def look_at_the_clock() -> None:
            if time.monotonic() > deadline:
                raise SecurityError(f"it took longer than {RENDER_SECONDS:g} s")

        try:
            written: list[str] = []
            room = MAX_PROMPT_CHARACTERS
            for piece in self._template.generate(
                self._special_tokens | variables,
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{_METER: look_at_the_clock},
            ):
                written.append(piece)
                room -= len(piece)
                if room < 0:
                    raise SecurityError(f"it wrote more than {MAX_PROMPT_CHARACTERS} characters")
            return "".join(written)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error.message}", "messages"
            ) from error
        except Exception as error:
            # Messages and variables are the caller's, and a template may do anything with them.
            raise InvalidRequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}", "messages"
            ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def after_thought(params: SamplingParams, prompt: str) -> SamplingParams:
    """``params`` for an answer to ``prompt``: where that leaves a thought open, a form begins only after its end."""
    wanted = params.structured_outputs
    if wanted is None or wanted.begins_after or not prompt.rstrip().endswith(THINK_START):
        return params
    wanted = msgspec.structs.replace(wanted, begins_after=THINK_END)
    return msgspec.structs.replace(params, structured_outputs=wanted)


class ReasoningSplitter:
    """Splits an answer that arrives in pieces into its thought and its content.

    The prompt decides how it begins: after an open ``<think>`` the answer starts as thought, after a closed one it is
    all content, and otherwise a ``<think>`` at its very start opens the thought. The first ``</think>`` ends it. An
    answer that is cut within the thought has no content. Line breaks around the thought, and those between it and the
    content, are left out.
    However the text is cut into pieces, the pieces that come out join to the same two texts.
    """

    def __init__(self, prompt: str) -> None:
        tail = prompt.rstrip()
        if tail.endswith(THINK_START):
            self._state = "thought"
        elif tail.endswith(THINK_END):
            self._state = "content"
        else:
            self._state = "start"
        self._held = ""
        self._at_start = self._state != "content"

    @property
    def in_thought(self) -> bool:
        """True while what arrives is thought."""
        return self._state == "thought"

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece; return (thought, content) to show now."""
        if self._state == "content" and not self._at_start:
            return "", text
        self._held += text
        thought = ""
        if self._state == "start":
            self._begin()
        if self._state == "thought":
            thought = self._think()
        if self._state == "content":
            return thought, self._content()
        return thought, ""

    def flush(self) -> tuple[str, str]:
        """The text has ended: what is still held back."""
        held, self._held = self._held, ""
        if self._state == "thought":
            return (held.lstrip("\n") if self._at_start else held).rstrip("\n"), ""
        return "", held.lstrip("\n") if self._state == "content" and self._at_start else held

    def _begin(self) -> None:
        """Find out whether the answer opens a thought."""
        text = self._held.lstrip()
        if text.startswith(THINK_START):
            self._held = text[len(THINK_START) :]
            self._state = "thought"
        elif not THINK_START.startswith(text):
            self._state = "content"
            self._at_start = False

    def _think(self) -> str:
        text = self._held.lstrip("\n") if self._at_start else self._held
        end = text.find(THINK_END)
        if end >= 0:
            self._held = text[end + len(THINK_END) :]
            self._state = "content"
            self._at_start = True
            return text[:end].rstrip("\n")
        keep = len(text) - partial_end(text, THINK_END)
        keep = len(text[:keep].rstrip("\n"))
        self._held = text[keep:]
        if keep:
            self._at_start = False
        return text[:keep]

    def _content(self) -> str:
        text, self._held = self._held, ""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text


def partial_end(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag`` without completing it."""
    start = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while start >= 0:
        if tag.startswith(text[start:]):
            return len(text) - start
        start = text.find(tag[0], start + 1)
    return 0


def text_of_parts(content: list[Any], where: str) -> str:
    """The text of a message given as content parts, which must all be of type text.

    Raises:
        InvalidRequestError: a part is of another type, or malformed.
    """
    return "".join(_texts(content, where))


def _texts(content: list[Any], where: str) -> Iterator[str]:
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequestError(
                f"{where}.content[{i}] is of type {shown(kind)}: only parts of type 'text' are understood", "messages"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}.content[{i}].text must be a string", "messages")
        for name, value in part.items():
            if name not in ("type", "text") and value is not None:
                raise InvalidRequestError(
                    f"{where}.content[{i}].{clipped(name)} is {shown(value)}, which is not supported", "messages"
                )
        yield part["text"]
