"""What goes back to clients: OpenAI's objects as structs, encoded in one piece (no HTTP framework here)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from bireme.server.wording import clipped

_encode = msgspec.json.Encoder().encode

LONGEST_MESSAGE = 1000
"""Characters of an error's message: whatever it quotes, an answer must not grow with what was sent."""

DONE = b"data: [DONE]\n\n"

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients of server-sent events skip."""


class PromptTokensDetails(Struct):
    """``cached_tokens``: prompt tokens whose computation was taken over from an earlier request."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct):
    """``reasoning_tokens``: output tokens that were thought."""

    reasoning_tokens: int = 0


class Usage(Struct):
    """Tokens of a call: a prompt is counted once, its n answers are added up."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """One entry of each list per token; the first token of an echoed prompt has null where there is nothing to say."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    """One answer of /v1/completions, or a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TopLogprob(Struct):
    """One candidate at a position; ``bytes`` says what ``token`` cannot when it is part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """The token at a position, and the best candidates there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One entry per output token, the thought's included."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Struct):
    """``arguments`` is the JSON of an object."""

    name: str
    arguments: str


class ToolCallPart(Struct):
    """A tool call of a whole answer."""

    id: str
    function: CalledFunction
    type: str = "function"


class ToolCallDelta(ToolCallPart, kw_only=True):
    """A tool call in a piece of an answer: always a whole one. ``index`` is its place among the answer's calls."""

    index: int


class ChatMessage(Struct):
    """A whole answer of /v1/chat/completions; ``content`` is null when there are only tool calls.

    The thought has two names: ``reasoning_content``, and ``reasoning`` as newer servers and clients call it.
    """

    role: str
    content: str | None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCallPart] | UnsetType = UNSET
    reasoning: str | None = None


class ChatDelta(Struct, omit_defaults=True):
    """What a piece adds to an answer."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning: str | None = None


class ChatChoice(Struct):
    """One answer of /v1/chat/completions."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A piece of one answer of /v1/chat/completions."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


Choice = CompletionChoice | ChatChoice | ChatChunkChoice


class Envelope(Struct):
    """What surrounds the choices: a whole response, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ErrorBody(Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


def encode(value: Any) -> bytes:
    """JSON."""
    return _encode(value)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def error_object(error: ErrorBody) -> dict[str, ErrorBody]:
    """The body of an error response, and of an error event in a stream."""
    return {"error": error}


class ApiError(Exception):
    """An answer other than 200, in OpenAI's form.

    Args:
        status: HTTP status.
        message: for people; holds no path and no trace. A long one is cut.
        kind: OpenAI's error type.
        param: the field at fault.
        code: a name for programs.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        if kind is None:
            kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = ErrorBody(clipped(message, LONGEST_MESSAGE), kind, None if param is None else clipped(param), code)
