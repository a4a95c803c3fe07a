"""The values that travel between server, engine and ranks (no torch here).

Everything is a ``msgspec.Struct``, so that one definition is both the Python type and the wire format.
Lengths and positions are in tokens, times in seconds, unless a name says otherwise.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from bireme.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MIN_REPETITION_PENALTY = 1e-20
"""Logits are divided by the penalty, then by a temperature down to 1e-5: this much smaller is far from overflow."""


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class FinishReason(enum.Enum):
    """Why a request ended. ``STOP``: an eos or stop token (or, in the server, a stop string)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What form an answer must have; exactly one of the first five fields is given. Names are vLLM's.

    Attributes:
        json: a JSON schema, as an object or as its text (kept as text).
        regex: a regular expression of the whole answer, in the syntax of Rust's ``regex``.
        choice: the answers there are (a list will do).
        grammar: a context-free grammar in Lark's syntax as llguidance reads it, or in GBNF (``root ::= ...``).
        json_object: True asks for any JSON object.
        begins_after: the answer is free until this text has come, e.g. ``</think>``; up to two line breaks may follow
            it. Empty: the form holds from the first token.
        or_calls: tool calls (rules of a Lark grammar, starting at ``calls``) that may stand in the answer's place.
        field: the request field that asked for it, which errors name.

    Raises:
        InvalidRequestError: none or several forms are given, or one of a wrong type; names the fields.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    begins_after: str = ""
    or_calls: str = ""
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"{self.field} holds {' and '.join(given) or 'no form'}: give exactly one of {', '.join(STRUCTURES)}",
                self.field,
            )
        if not isinstance(self.json_object, bool):
            raise InvalidRequestError(f"{self.field}: json_object must be True or False", self.field)
        if self.json is not None and not isinstance(self.json, str):
            msgspec.structs.force_setattr(self, "json", self._schema_text())
        if self.choice is not None:
            msgspec.structs.force_setattr(self, "choice", self._choices())
        for name in ("json", "regex", "grammar", "begins_after", "or_calls"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or find_surrogate(text) is not None):
                raise InvalidRequestError(f"{self.field}: {name} must be a string of valid Unicode", self.field)
        if self.regex == "" or self.grammar == "":
            raise InvalidRequestError(f"{self.field}: {given[0]} is empty", self.field)

    def _schema_text(self) -> str:
        if not isinstance(self.json, dict):
            raise InvalidRequestError(f"{self.field}: json must be a JSON schema, an object", self.field)
        try:
            return msgspec.json.encode(self.json).decode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{self.field}: json has no JSON form: {error}", self.field) from error

    @property
    def json_text(self) -> str:
        """The schema as text, ``""`` without one."""
        return self.json if isinstance(self.json, str) else ""

    def _choices(self) -> tuple[str, ...]:
        choices = self.choice
        sound = isinstance(choices, (list, tuple)) and all(
            isinstance(text, str) and text and find_surrogate(text) is None for text in choices
        )
        if not choices or not sound:
            raise InvalidRequestError(f"{self.field}: choice must be a list of non-empty strings", self.field)
        return tuple(choices)


STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
"""The forms that StructuredOutputsParams knows."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample one request; names, meanings and defaults are vLLM's.

    ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 mean "off". ``temperature`` below 1e-5 is greedy.
    ``logprobs`` / ``prompt_logprobs`` k asks for the chosen token's and the k largest raw log-probabilities (k ≤ 20).
    ``max_tokens`` None means "up to the model's length limit". ``stop`` may be one string; None stands for none.

    Raises:
        InvalidRequestError: a value out of its range; the message names field, value and bound.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "stop", _stop_strings(self.stop))
        msgspec.structs.force_setattr(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            if isinstance(getattr(self, name), float):  # numpy's float64 is one, and the wire does not take it
                msgspec.structs.force_setattr(self, name, float(getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r}: it must be True or False", name)
        check_integer("n", self.n, 1, 128)
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_integer("top_k", self.top_k, -1, 2**31 - 1)
        check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise InvalidRequestError(
                    f"logit_bias is {self.logit_bias!r}: it must be a dict of token ids to numbers", "logit_bias"
                )
            for token_id, bias in self.logit_bias.items():
                check_integer("logit_bias", token_id, 0, 2**31 - 1)
                check_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), MAX_SEED)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}: it must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                check_integer(name, count, 0, MAX_LOGPROBS)
        structured = self.structured_outputs
        if structured is not None:
            if not isinstance(structured, StructuredOutputsParams):
                raise InvalidRequestError(
                    f"structured_outputs is {structured!r}: it must be a StructuredOutputsParams", "structured_outputs"
                )
            if self.ignore_eos:
                raise InvalidRequestError(
                    f"ignore_eos is True: an answer in the form of {structured.field} ends where its form ends",
                    "ignore_eos",
                )

    @property
    def is_greedy(self) -> bool:
        """True where the draw can only be the argmax."""
        return self.temperature < 1e-5 or self.top_k == 1


def _stop_strings(given: Any) -> list[str]:
    if given is None:
        return []
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, (list, tuple)):
        raise InvalidRequestError(f"stop is {given!r}: it must be a string or a list of strings", "stop")
    for text in given:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"stop holds {text!r}: every stop string must be a non-empty string", "stop")
        position = find_surrogate(text)
        if position is not None:
            raise InvalidRequestError(
                f"stop holds {text!a}, with a lone surrogate at character {position}: it is not valid Unicode",
                "stop",
            )
    return list(given)


def _stop_token_ids(given: Any) -> list[int]:
    if given is None:
        return []
    if not isinstance(given, (list, tuple)):
        raise InvalidRequestError(f"stop_token_ids is {given!r}: it must be a list of token ids", "stop_token_ids")
    token_ids = []
    for item in given:
        token_id = as_token_id(item)
        if token_id is None or not 0 <= token_id < 2**31:
            raise InvalidRequestError(
                f"stop_token_ids holds {item!r}: it must hold integers in [0, {2**31 - 1}]", "stop_token_ids"
            )
        token_ids.append(token_id)
    return token_ids


def as_token_id(value: Any) -> int | None:
    """``value`` as an int if it is an integer of Python, numpy or torch (no bool); None for anything else."""
    if type(value) is int:
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def find_surrogate(text: str) -> int | None:
    """Where ``text`` has a lone surrogate, which no encoding of Unicode can carry; None if it is sound."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def check_number(
    name: str, value: Any, low: float, high: float, *, low_open: bool = False, param: str | None = None
) -> None:
    """Raise InvalidRequestError unless ``value`` is a finite number in [low, high] (or (low, high])."""
    ok = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if not ok or isinstance(value, bool) or value < low or value > high or (low_open and value == low):
        opening = "(" if low_open else "["
        raise InvalidRequestError(
            f"{name} is {value!r}: it must be a number in {opening}{low:g}, {high:g}]", param or name
        )


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raise InvalidRequestError unless ``value`` is an int (not a bool) in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or value > high:
        raise InvalidRequestError(f"{name} is {value!r}: it must be an integer in [{low}, {high}]", name)


class Request(msgspec.Struct, array_like=True, frozen=True):
    """One sequence to generate, as the engine receives it (``params.n`` is 1: callers fan out)."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float = 0.0


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Raw log-softmax values at one position.

    ``rank`` is 1-based (1 = the most likely token); ``top_ids`` / ``top_logprobs`` hold the k largest, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RequestOutput(msgspec.Struct, array_like=True):
    """What one step produced for one request. The last one has a ``finish_reason``; nothing follows it.

    ``prompt_logprobs`` arrives once, with the first token: one entry a prompt token, None for the first.
    ``error`` is set exactly when ``finish_reason`` is ERROR. ``is_invalid``: the request can never be served (400);
    ``error_param`` then names the field at fault, if one is. ``is_overloaded``: the queue was full, retry later (429).
    ``phase_seconds`` comes with the first token: how long the request waited for its slot, and then for that token.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    is_invalid: bool = False
    num_cached_tokens: int = 0
    error_param: str | None = None
    is_overloaded: bool = False
    phase_seconds: tuple[float, float] | None = None


class NewRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request's first appearance in a plan: everything that ranks keep for it in its state slot.

    ``block_table`` holds every KV block of the request's whole life. ``params.seed`` is resolved (never None).
    ``suppressed_token_ids`` may not be drawn before ``params.min_tokens`` tokens are out (eos and stop ids).
    """

    slot: int
    prompt_token_ids: list[int]
    block_table: list[int]
    params: SamplingParams
    suppressed_token_ids: list[int]


class PrefillRow(msgspec.Struct, array_like=True, frozen=True):
    """A chunk of one request's prompt: tokens [start, start + length). ``is_last``: the row samples."""

    slot: int
    start: int
    length: int
    is_last: bool


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """What every rank runs in one step. Row order: ``decode_slots``, then ``prefill_rows``; ranks keep it.

    ``seq`` counts from 0 without gap or repeat. ``new_requests`` are installed into their slots before the rows run.
    """

    seq: int
    new_requests: list[NewRequest]
    decode_slots: list[int]
    prefill_rows: list[PrefillRow]

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that go through the model in this step."""
        return len(self.decode_slots) + sum(row.length for row in self.prefill_rows)

    @property
    def sampled_slots(self) -> list[int]:
        """Slots of the rows that sample, in row order."""
        return self.decode_slots + [row.slot for row in self.prefill_rows if row.is_last]


class StepOutput(msgspec.Struct, array_like=True):
    """Rank 0's result of one plan: one token per sampled row, in the order of ``StepPlan.sampled_slots``.

    ``logprobs[i]`` is None for rows that asked for none (the whole list is None when no row asked).
    ``prompt_logprobs`` maps a slot to the entries of the prompt tokens whose predictions this step computed.
    ``num_padding_rows`` rows ran beside the plan's decode rows, to fill the bucket of a captured graph.
    ``failed_slots``: rows whose form could not be followed any further, with why; their tokens mean nothing.
    ``rank_seconds``: what ``model_seconds`` is for rank 0, for the ranks from 1 on.
    """

    seq: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    model_seconds: float = 0.0
    num_padding_rows: int = 0
    failed_slots: dict[int, str] | None = None
    rank_seconds: list[float] = []


class EngineStats(msgspec.Struct, kw_only=True, array_like=True):
    """A snapshot of the engine: gauges now, counters since start (``*_seconds`` are sums over steps)."""

    num_waiting: int = 0
    num_running: int = 0
    num_free_slots: int = 0
    num_slots: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    host_seconds: float = 0.0
    model_seconds: float = 0.0
    num_padding_rows: int = 0
