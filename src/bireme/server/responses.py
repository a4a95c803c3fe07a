"""/v1/responses without a store: its requests as chats, and a chat's answer as items and events (no HTTP here)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from bireme.config import GenerationDefaults
from bireme.engine_client import EngineClient, Submission
from bireme.errors import InvalidRequestError
from bireme.server.answers import Answer
from bireme.server.generation import Generation, Job, TokenQueue
from bireme.server.metrics import Metrics
from bireme.server.params import ChatCall, Field, chat_call, read_fields, refused
from bireme.server.protocol import ApiError, ChatChunkChoice, ToolCallDelta, encode
from bireme.server.settings import ServerSettings
from bireme.server.telemetry import Tracing
from bireme.server.wording import shown
from bireme.types import RequestOutput

RESPONSES = "responses"

_ALL = (RESPONSES,)
_OFF_TEXT = {"format": {"type": "text"}}

RESPONSE_FIELDS: tuple[Field, ...] = (
    Field("model", _ALL, str, "a served model name; absent: the served model"),
    Field("input", _ALL, str | list[Any], "a text, or messages, function calls, their outputs and thoughts in order"),
    Field("instructions", _ALL, str, "the system message; system messages at the start of the input follow it"),
    Field("max_output_tokens", _ALL, int, "output tokens at most, the thought's included; absent: what fits"),
    Field("stream", _ALL, bool, "send the response as events while it is generated"),
    Field("temperature", _ALL, float, "0 is greedy"),
    Field("top_p", _ALL, float, "smallest set of tokens with this probability"),
    Field("top_k", _ALL, int, "the k most likely tokens; 0 or -1: off"),
    Field("min_p", _ALL, float, "tokens with this share of the best one's probability"),
    Field("repetition_penalty", _ALL, float, "over prompt and output; 1: off"),
    Field("presence_penalty", _ALL, float, "over output tokens"),
    Field("frequency_penalty", _ALL, float, "over output tokens, by count"),
    Field("logit_bias", _ALL, dict[str, float], "added to the logits of token ids"),
    Field("seed", _ALL, int, "the same request with the same seed gives the same answer"),
    Field("stop", _ALL, str | list[str], "strings that end the answer"),
    Field("ignore_eos", _ALL, bool, "go on after the model's end token"),
    Field("skip_special_tokens", _ALL, bool, "leave special tokens out of the text"),
    Field("include_stop_str_in_output", _ALL, bool, "show what ended the answer"),
    Field("tools", _ALL, list[Any], "functions that the model may call; other kinds of tools are refused"),
    Field("tool_choice", _ALL, str | dict[str, Any], "auto, none, required or a function's name, as in a chat"),
    Field("parallel_tool_calls", _ALL, bool, "false: the answer ends with its first tool call"),
    Field("text", _ALL, dict[str, Any], "its format: text, json_object or json_schema"),
    Field("reasoning", _ALL, dict[str, Any], "its effort: none leaves the thought out; other efforts are refused"),
    Field("chat_template_kwargs", _ALL, dict[str, Any], "the template's switches, e.g. enable_thinking"),
    Field("metadata", _ALL, dict[str, str], "comes back with the response"),
    Field("user", _ALL, str, "written to the request log"),
    Field("include", _ALL, list[str], "reasoning.encrypted_content changes nothing: thoughts are sent in the clear"),
    refused("store", _ALL, "nothing is stored", False),
    refused("previous_response_id", _ALL, "nothing is stored: send the earlier items as input"),
    refused("previous_response", _ALL, "send the earlier items as input"),
    refused("previous_input_messages", _ALL, "send the earlier items as input"),
    refused("conversation", _ALL, "nothing is stored: send the earlier items as input"),
    refused("background", _ALL, "a response is generated while its client waits", False),
    refused("background_options", _ALL, "a response is generated while its client waits"),
    refused("prompt", _ALL, "there are no stored prompts"),
    refused("stream_options", _ALL, "events are not padded", {}, {"include_obfuscation": False}),
    refused("top_logprobs", _ALL, "use /v1/chat/completions for log-probabilities", 0),
    refused("max_tool_calls", _ALL, "it limits built-in tools, and there are none"),
    refused("truncation", _ALL, "prompts are never cut", "disabled"),
    refused("context_management", _ALL, "prompts are never cut", []),
    refused("service_tier", _ALL, "there is one tier", "auto", "default"),
    refused("safety_identifier", _ALL, "use user"),
    refused("prompt_cache_key", _ALL, "there is one cache"),
    refused("prompt_cache_options", _ALL, "there is one cache"),
    refused("prompt_cache_retention", _ALL, "there is one cache"),
    refused("access_programs", _ALL, "there are no programs"),
    refused("image", _ALL, "only text is generated"),
    refused("moderation", _ALL, "content is not classified"),
    refused("request_id", _ALL, "send the X-Request-Id header"),
    refused("mm_processor_kwargs", _ALL, "only text is read", {}),
    refused("priority", _ALL, "requests are served first come, first served", 0),
    refused("cache_salt", _ALL, "there is one cache"),
    refused("enable_response_messages", _ALL, "use return_token_ids on /v1/chat/completions", False),
    refused("structured_outputs", _ALL, "use text.format"),
    refused("vllm_xargs", _ALL, "there are no extensions", {}),
)

_KNOWN = {field.name: field for field in RESPONSE_FIELDS}
_SAME_IN_CHATS = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "parallel_tool_calls",
    "user",
)
_NAMES_IN_RESPONSES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
_INCLUDABLE = ("reasoning.encrypted_content",)
_TEXT_PARTS = ("input_text", "output_text", "text")

Item = dict[str, Any]


class ResponseCall(msgspec.Struct, frozen=True):
    """A body of /v1/responses: the chat that it asks for, and what the response repeats of it."""

    chat: ChatCall
    repeated: dict[str, Any]


def parse_response(body: bytes, defaults: GenerationDefaults) -> ResponseCall:
    """Read a body of /v1/responses.

    Raises:
        InvalidRequestError: names the field and the value.
    """
    fields = read_fields(body, _KNOWN)
    if "input" not in fields:
        raise InvalidRequestError("input is required: a text, or a list of items", "input")
    for name in fields.get("include", []):
        if name not in _INCLUDABLE:
            raise InvalidRequestError(f"include holds {shown(name)}: only {_INCLUDABLE[0]} is known here", "include")
    chat: dict[str, Any] = {name: fields[name] for name in _SAME_IN_CHATS if name in fields}
    chat["messages"] = _messages(fields["input"], fields.get("instructions"))
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    if "tools" in fields:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields["tools"])]
    if "tool_choice" in fields and (fields["tool_choice"] != "auto" or fields.get("tools")):
        # Clients send auto along with no tools.
        chat["tool_choice"] = _tool_choice(fields["tool_choice"])
    text_format = _text_format(fields.get("text", {}))
    if text_format is not None:
        chat["response_format"] = text_format
    variables = _template_variables(fields)
    if variables:
        chat["chat_template_kwargs"] = variables
    try:
        call = chat_call(chat, defaults)
    except InvalidRequestError as error:
        name = _NAMES_IN_RESPONSES.get(error.param or "")
        if name is None:
            raise
        raise InvalidRequestError(f"{name}: {error}", name) from error
    params = call.params
    repeated = {
        "instructions": fields.get("instructions"),
        "max_output_tokens": call.max_tokens,
        "metadata": fields.get("metadata", {}),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "reasoning": fields.get("reasoning", {"effort": None, "summary": None}),
        "temperature": params.temperature,
        "text": fields.get("text", _OFF_TEXT),
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "top_p": params.top_p,
        "user": fields.get("user"),
    }
    return ResponseCall(call, repeated)


def _tool(tool: Any, where: str) -> Any:
    """A flat function tool in the form of a chat's; anything else is left for that to refuse."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise InvalidRequestError(f"{where} is {shown(kind)}: only tools of type 'function' can be called", "tools")
    known = ("name", "description", "parameters", "strict")
    rest = {key: value for key, value in tool.items() if key not in known and key != "type"}
    return {"type": "function", **rest, "function": {key: tool[key] for key in known if key in tool}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and set(choice) <= {"type", "name"}:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _text_format(text: dict[str, Any]) -> dict[str, Any] | None:
    """``text`` as a chat's response_format; None for plain text."""
    _only(text, {"format", "verbosity"}, "text")
    if text.get("verbosity") not in (None, "medium"):
        raise InvalidRequestError(
            f"text.verbosity is {shown(text['verbosity'])}, which is not supported: the model has no such switch",
            "text",
        )
    form = text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidRequestError(f"text.format is {shown(form)}: it must be an object", "text")
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
    _only(form, {"type"}, "text.format")
    return None if form.get("type") == "text" else form


def _template_variables(fields: dict[str, Any]) -> dict[str, Any]:
    variables = dict(fields.get("chat_template_kwargs", {}))
    reasoning = fields.get("reasoning", {})
    for name, value in reasoning.items():
        if value is None or (name == "summary" and value == "auto"):
            # There is no summary of a thought that is sent whole.
            continue
        if name != "effort" or value != "none":
            raise InvalidRequestError(
                f"reasoning.{name} is {shown(value)}, which is not supported: only effort 'none' is", "reasoning"
            )
        variables["enable_thinking"] = False
    return variables


def _only(holder: dict[str, Any], known: set[str], where: str) -> None:
    for name, value in holder.items():
        if name not in known and value is not None:
            raise InvalidRequestError(f"{where}.{name} is {shown(value)}, which is not supported", where.split(".")[0])


# ---- input items → messages ----


def _messages(given: str | list[Any], instructions: str | None) -> list[Item]:
    """The conversation in a chat's form: what the assistant thought, said and called in one turn is one message."""
    messages: list[Item] = []
    for i, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise InvalidRequestError(f"{where} is {shown(item)}: it must be an object", "input")
        kind = item.get("type", "message")
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise InvalidRequestError(
                f"{where}.type is {shown(kind)}: only items of type {', '.join(_READERS)} are understood", "input"
            )
        read(item, where, messages)
    if instructions is not None:
        head = [instructions]
        while messages and messages[0]["role"] in ("system", "developer"):
            head.append(messages.pop(0)["content"])
        messages.insert(0, {"role": "system", "content": "\n\n".join(head)})
    if not messages:
        raise InvalidRequestError("input is empty: at least one item is needed", "input")
    return messages


def _read_message(item: Item, where: str, messages: list[Item]) -> None:
    _only_known(item, {"type", "role", "content", "id", "status", "phase"}, where)
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequestError(
            f"{where}.role is {shown(role)}: it must be user, assistant, system or developer", "input"
        )
    content = _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        turn = _turn(messages)
        if turn["content"] is None and "tool_calls" not in turn:
            turn["content"] = content
            return
    messages.append({"role": role, "content": content})


def _read_call(item: Item, where: str, messages: list[Item]) -> None:
    _only_known(item, {"type", "id", "call_id", "name", "arguments", "status"}, where)
    function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    _turn(messages).setdefault("tool_calls", []).append(call)


def _read_output(item: Item, where: str, messages: list[Item]) -> None:
    _only_known(item, {"type", "id", "call_id", "output", "status"}, where)
    content = _text(item.get("output"), f"{where}.output")
    messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content})


def _read_thought(item: Item, where: str, messages: list[Item]) -> None:
    _only_known(item, {"type", "id", "summary", "content", "status"}, where)
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise InvalidRequestError(f"{where}.content is {shown(parts)}: it must be a list of parts", "input")
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") not in ("reasoning_text", "summary_text"):
            raise InvalidRequestError(f"{where}.content[{i}] is {shown(part)}: it must be a reasoning_text", "input")
        texts.append(_string(part, "text", f"{where}.content[{i}]"))
    if texts:
        messages.append({"role": "assistant", "content": None, "reasoning_content": "\n\n".join(texts)})


_READERS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_thought,
}


def _turn(messages: list[Item]) -> Item:
    """The assistant's message that is being put together; a new one where the last message is somebody else's."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} is {shown(content)}: it must be a string or a list of text parts", "input")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in _TEXT_PARTS:
            raise InvalidRequestError(
                f"{where}[{i}] is of type {shown(kind)}: only parts of type {' and '.join(_TEXT_PARTS[:2])} are "
                "understood",
                "input",
            )
        _only_known(part, {"type", "text", "annotations", "logprobs"}, f"{where}[{i}]")
        texts.append(_string(part, "text", f"{where}[{i}]"))
    return "".join(texts)


def _string(holder: Item, name: str, where: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} is {shown(value)}: it must be a string", "input")
    return value


def _only_known(item: Item, known: set[str], where: str) -> None:
    for name, value in item.items():
        if name not in known and value is not None:
            raise InvalidRequestError(f"{where}.{name} is {shown(value)}, which is not supported", "input")


# ---- a chat's answer → items and events ----


class _Output:
    """The items of a response as they grow; every change of them is an event.

    The message stays open while calls come, so that there is one, whatever the order of text and calls.

    Attributes:
        items: as the response shows them.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: Item | None = None
        self._index = 0
        self._pieces: list[str] = []
        self._events: list[bytes] = []
        self._num_events = 0

    def add(self, choice: ChatChunkChoice) -> None:
        """Take a piece of the answer."""
        delta = choice.delta
        if delta.reasoning_content:
            self._write("reasoning", delta.reasoning_content)
        if delta.content:
            self._write("message", delta.content)
        for call in delta.tool_calls or ():
            self._add_call(call)

    def finish(self, *, is_whole: bool) -> None:
        """The answer has ended; ``is_whole``: the model itself ended it."""
        self._close("completed" if is_whole else "incomplete")
        if is_whole and all(item["type"] == "reasoning" for item in self.items):
            self._begin("message")
            self._close("completed")

    def tell(self, kind: str, **fields: Any) -> None:
        """Add an event."""
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        self._events.append(b"event: " + kind.encode() + b"\ndata: " + encode(event) + b"\n\n")

    def taken(self) -> list[bytes]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def _write(self, kind: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            self._close("completed")
            self._begin(kind)
        self._pieces.append(text)
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        self.tell(name, **self._place(), delta=text, **({} if kind == "reasoning" else {"logprobs": []}))

    def _begin(self, kind: str) -> None:
        if kind == "reasoning":
            item = {"id": _id("rs"), "type": kind, "summary": [], "content": [], "status": "in_progress"}
        else:
            item = {"id": _id("msg"), "type": kind, "role": "assistant", "content": [], "status": "in_progress"}
        self._open = item
        self._pieces = []
        self._index = len(self.items)
        self.items.append(item)
        self.tell("response.output_item.added", output_index=self._index, item=item)
        self.tell("response.content_part.added", **self._place(), part=_part(kind, ""))

    def _close(self, status: str) -> None:
        item = self._open
        if item is None:
            return
        place = self._place()
        self._open = None
        text = "".join(self._pieces)
        part = _part(item["type"], text)
        if item["type"] == "reasoning":
            self.tell("response.reasoning_text.done", **place, text=text)
        else:
            self.tell("response.output_text.done", **place, text=text, logprobs=[])
        self.tell("response.content_part.done", **place, part=part)
        item["content"] = [part]
        item["status"] = status
        self.tell("response.output_item.done", output_index=self._index, item=item)

    def _add_call(self, call: ToolCallDelta) -> None:
        if self._open is not None and self._open["type"] == "reasoning":
            self._close("completed")
        item: Item = {
            "id": _id("fc"),
            "type": "function_call",
            "call_id": call.id,
            "name": call.function.name,
            "arguments": "",
            "status": "in_progress",
        }
        self.items.append(item)
        index = len(self.items) - 1
        arguments = call.function.arguments
        place = {"item_id": item["id"], "output_index": index}
        self.tell("response.output_item.added", output_index=index, item=item)
        self.tell("response.function_call_arguments.delta", **place, delta=arguments)
        self.tell("response.function_call_arguments.done", **place, name=call.function.name, arguments=arguments)
        item["arguments"] = arguments
        item["status"] = "completed"
        self.tell("response.output_item.done", output_index=index, item=item)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None, "called with an open item"
        return {"item_id": self._open["id"], "output_index": self._index, "content_index": 0}


def _part(kind: str, text: str) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseGeneration(Generation):
    """Runs a job of /v1/responses: one chat answer, shown as a response object or as its events.

    Args:
        repeated: see ResponseCall.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        queue: TokenQueue,
        job: Job,
        fingerprint: str,
        settings: ServerSettings,
        tracing: Tracing | None,
        repeated: dict[str, Any],
    ) -> None:
        super().__init__(client, metrics, queue, job, fingerprint, settings, tracing)
        self._repeated = repeated
        self._output = _Output()
        self._has_told = False

    def _push(self, submission: Submission, outputs: list[RequestOutput]) -> Sequence[Answer]:
        # Item by item as they come, streamed or not, so that both end up with the same.
        touched = super()._push(submission, outputs)
        self._tell_beginning()
        for answer in touched:
            for choice in answer.chunks():
                assert isinstance(choice, ChatChunkChoice), "a response's answer is a chat's"
                self._output.add(choice)
        if not self._job.call.stream:
            self._output.taken()
        return touched

    def _events(self, answers: Iterable[Answer]) -> list[bytes]:
        return self._output.taken()

    def _last_events(self) -> list[bytes]:
        response = self._finished()
        self._output.tell(f"response.{response['status']}", response=response)
        return self._output.taken()

    def _error_events(self, error: ApiError) -> list[bytes]:
        self._tell_beginning()
        told = {"code": "server_error", "message": error.body.message}
        self._output.tell("response.failed", response=self._response("failed") | {"error": told})
        return self._output.taken()

    def _whole(self) -> Any:
        return self._finished()

    def _tell_beginning(self) -> None:
        if not self._has_told:
            self._has_told = True
            response = self._response("in_progress")
            self._output.tell("response.created", response=response)
            self._output.tell("response.in_progress", response=response)

    def _finished(self) -> dict[str, Any]:
        reason = self._job.answers[0].finish_reason
        is_whole = reason is not None and reason.value != "length"
        self._output.finish(is_whole=is_whole)
        response = self._response("completed" if is_whole else "incomplete")
        if not is_whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = self._usage()
        details = usage.completion_tokens_details
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": details.reasoning_tokens if details else 0},
            "total_tokens": usage.total_tokens,
        }
        return response

    def _response(self, status: str) -> dict[str, Any]:
        items: Sequence[Item] = self._output.items
        return {
            "id": self._job.call_id,
            "object": "response",
            "created_at": self._job.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._job.model,
            "output": list(items),
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None,
            **self._repeated,
        }
