"""Request bodies: one table that says what becomes of each field, and the calls that bodies are parsed into.

A field is honoured; or it is known but has no effect here, and then only null and the values that mean "off" are
accepted; or it is unknown. Whatever is not honoured and not off is refused by name and value: nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bireme.config import CacheCapacity, GenerationDefaults
from bireme.errors import InvalidRequestError
from bireme.server.chat import check_template_variables
from bireme.server.forms import named_function, read_form, with_calls
from bireme.server.messages import read_messages
from bireme.server.tools import read_tools, strict_names
from bireme.server.wording import shown
from bireme.types import MAX_LOGPROBS, STRUCTURES, SamplingParams, check_integer

COMPLETIONS = "completions"
CHAT = "chat"
BOTH = (COMPLETIONS, CHAT)

DEFAULT_COMPLETION_TOKENS = 16
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 1024
_SEED_SPAN = 2**64


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``include_usage``: a last chunk with usage; ``continuous_usage_stats``: usage in every chunk.

    ``include_obfuscation`` must be off: chunks are not padded.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """What becomes of a request field.

    Attributes:
        endpoints: where the field exists.
        type: of an honoured field, as msgspec checks it; None for a field that is not honoured.
        off: values beside null that ask for nothing, of a field that is not honoured.
        note: what an honoured field does; why another is refused.
    """

    name: str
    endpoints: tuple[str, ...]
    type: Any
    note: str
    off: tuple[Any, ...] = ()

    @property
    def is_honoured(self) -> bool:
        return self.type is not None


def refused(name: str, endpoints: tuple[str, ...], note: str, *off: Any) -> Field:
    """A field that is known but not honoured; ``off`` are the values beside null that are accepted."""
    return Field(name, endpoints, None, note, off)


FIELDS: tuple[Field, ...] = (
    Field("model", BOTH, str, "a served model name; absent: the served model"),
    Field("prompt", (COMPLETIONS,), Any, "a string, token ids, or a list of either"),
    Field("messages", (CHAT,), list, "the conversation"),
    Field("n", BOTH, int, "answers per prompt"),
    Field("stream", BOTH, bool, "send the answer as it is generated"),
    Field("stream_options", BOTH, StreamOptions, "include_usage, continuous_usage_stats"),
    Field("max_tokens", BOTH, int, "output tokens at most; absent: 16 for a completion, what fits for a chat"),
    Field("max_completion_tokens", (CHAT,), int, "the newer name of max_tokens"),
    Field("min_tokens", BOTH, int, "no end token, stop token or stop string counts before"),
    Field("temperature", BOTH, float, "0 is greedy"),
    Field("top_p", BOTH, float, "smallest set of tokens with this probability"),
    Field("top_k", BOTH, int, "the k most likely tokens; 0 or -1: off"),
    Field("min_p", BOTH, float, "tokens with this share of the best one's probability"),
    Field("repetition_penalty", BOTH, float, "over prompt and output; 1: off"),
    Field("presence_penalty", BOTH, float, "over output tokens"),
    Field("frequency_penalty", BOTH, float, "over output tokens, by count"),
    Field("logit_bias", BOTH, dict[str, float], "added to the logits of token ids"),
    Field("seed", BOTH, int, "the same request with the same seed gives the same answer; answer i of n takes seed + i"),
    Field("stop", BOTH, str | list[str], f"up to {MAX_STOP_STRINGS} strings that end the answer"),
    Field("stop_token_ids", BOTH, list[int], "token ids that end the answer"),
    Field("ignore_eos", BOTH, bool, "go on after the model's end token"),
    Field("include_stop_str_in_output", BOTH, bool, "show what ended the answer"),
    Field("skip_special_tokens", BOTH, bool, "leave special tokens out of the text"),
    Field("logprobs", (COMPLETIONS,), int, f"log-probabilities of up to {MAX_LOGPROBS} tokens at each position"),
    Field("logprobs", (CHAT,), bool, "log-probabilities of the output tokens"),
    Field("top_logprobs", (CHAT,), int, f"and of up to {MAX_LOGPROBS} others at each position"),
    Field("echo", (COMPLETIONS,), bool, "the prompt comes first in the answer, with log-probabilities if asked for"),
    Field("add_special_tokens", (COMPLETIONS,), bool, "let the tokenizer add its own tokens to a text prompt"),
    Field("add_generation_prompt", (CHAT,), bool, "end the prompt with the opening of the assistant's answer"),
    Field("chat_template_kwargs", (CHAT,), dict[str, Any], "the template's switches, e.g. enable_thinking"),
    Field("tools", (CHAT,), list, "functions that the model may call"),
    Field(
        "tool_choice",
        (CHAT,),
        str | dict[str, Any],
        "auto: may call (the default with tools); required: must; a function: must call that; none: sees no tools",
    ),
    Field("parallel_tool_calls", (CHAT,), bool, "false: the answer ends with its first tool call"),
    Field("reasoning_effort", (CHAT,), str, "none leaves the thought out; other efforts are refused"),
    Field("return_token_ids", BOTH, bool, "prompt_token_ids and token_ids in the answer"),
    Field("return_tokens_as_token_ids", BOTH, bool, "tokens in log-probabilities appear as token_id:N"),
    Field("response_format", BOTH, dict[str, Any], "text, json_object, or json_schema: the answer is such JSON"),
    Field("structured_outputs", BOTH, dict[str, Any], f"the answer's form: one of {', '.join(STRUCTURES)}"),
    Field("guided_json", BOTH, str | dict[str, Any], "the answer is JSON that satisfies this schema"),
    Field("guided_regex", BOTH, str, "the whole answer matches this expression"),
    Field("guided_choice", BOTH, list[str], "the answer is one of these"),
    Field("guided_grammar", BOTH, str, "the answer follows this grammar, in Lark's syntax or GBNF"),
    Field("user", BOTH, str, "written to the request log"),
    refused("best_of", (COMPLETIONS,), "answers are not ranked; ask for n and choose", 1),
    refused("suffix", (COMPLETIONS,), "the model does not fill in the middle", ""),
    refused("prompt_embeds", (COMPLETIONS,), "prompts are text or token ids"),
    refused("use_beam_search", BOTH, "there is no beam search", False),
    refused("length_penalty", BOTH, "there is no beam search", 1, 1.0),
    refused("early_stopping", BOTH, "there is no beam search", False),
    refused("prompt_logprobs", BOTH, "use echo with logprobs on /v1/completions"),
    refused("truncate_prompt_tokens", BOTH, "prompts are never cut"),
    refused("truncation_side", BOTH, "prompts are never cut"),
    refused("logprob_token_ids", BOTH, "log-probabilities are those of the likeliest tokens"),
    refused("watermarking", BOTH, "there is no watermark", False),
    refused("repetition_detection", BOTH, "use repetition_penalty or stop"),
    refused("thinking_token_budget", BOTH, "a thought is as long as it is", -1),
    refused("stream_interval", BOTH, "every step is sent at once", 1),
    refused("request_id", BOTH, "send the X-Request-Id header"),
    refused("session_id", BOTH, "nothing is kept between requests but the cache, which finds its prefixes itself"),
    refused("cache_salt", BOTH, "there is one cache"),
    refused("kv_transfer_params", BOTH, "caches are not moved between servers"),
    refused("ec_transfer_params", BOTH, "there is no encoder"),
    refused("routed_experts_prompt_start", BOTH, "routing is not reported", 0),
    refused("return_token_offsets", BOTH, "use echo with logprobs on /v1/completions", False),
    refused("return_mm_kwargs", BOTH, "only text is read", True),
    refused("vllm_xargs", BOTH, "there are no extensions", {}),
    refused("allowed_token_ids", BOTH, "use logit_bias"),
    refused("bad_words", BOTH, "use logit_bias", []),
    refused("spaces_between_special_tokens", BOTH, "special tokens are written without spaces", True),
    refused("priority", BOTH, "requests are served first come, first served", 0),
    refused("functions", (CHAT,), "use tools", []),
    refused("function_call", (CHAT,), "use tool_choice", "none"),
    refused("include_reasoning", (CHAT,), "the thought is always sent, apart from the content", True),
    refused("verbosity", (CHAT,), "the model has no such switch", "medium"),
    refused("modalities", (CHAT,), "only text is generated", ["text"]),
    refused("audio", (CHAT,), "only text is generated"),
    refused("prediction", (CHAT,), "predicted output is not used"),
    refused("web_search_options", (CHAT,), "there is no web search"),
    refused("store", (CHAT,), "nothing is stored", False),
    refused("metadata", (CHAT,), "nothing is stored", {}),
    refused("service_tier", (CHAT,), "there is one tier", "auto", "default"),
    refused("safety_identifier", (CHAT,), "use user"),
    refused("prompt_cache_key", (CHAT,), "there is one cache"),
    refused("prompt_cache_options", (CHAT,), "there is one cache"),
    refused("prompt_cache_retention", (CHAT,), "there is one cache"),
    refused("moderation", (CHAT,), "content is not classified"),
    refused("documents", (CHAT,), "put documents into messages", []),
    refused("media_io_kwargs", (CHAT,), "only text is read", {}),
    refused("mm_processor_kwargs", (CHAT,), "only text is read", {}),
    refused("return_prompt_text", (CHAT,), "use return_token_ids, and /detokenize", False),
    refused("chat_template", (CHAT,), "only the checkpoint's own template is run"),
    refused("continue_final_message", (CHAT,), "an answer begins a new message", False),
    refused("echo", (CHAT,), "messages are not repeated; use /v1/completions", False),
    refused("add_special_tokens", (CHAT,), "the template writes all special tokens", False),
)

_BY_ENDPOINT = {endpoint: {field.name: field for field in FIELDS if endpoint in field.endpoints} for endpoint in BOTH}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints ask for.

    ``params`` holds everything but max_tokens, which depends on each prompt's length: see ``params_for``.
    ``max_tokens`` None: not given. ``echo`` with ``max_tokens`` 0 asks for the prompt alone.
    """

    model: str | None
    n: int
    stream: bool
    stream_options: StreamOptions
    params: SamplingParams
    max_tokens: int | None
    default_max_tokens: int | None
    echo: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    user: str | None = None

    def params_for(self, num_prompt_tokens: int, index: int, capacity: CacheCapacity) -> SamplingParams:
        """The parameters of answer ``index`` to a prompt of this length.

        Raises:
            InvalidRequestError: min_tokens exceeds what is then max_tokens.
        """
        max_tokens = self.max_tokens
        if max_tokens is None:
            fits = min(capacity.max_model_len, capacity.num_tokens + 1) - num_prompt_tokens
            max_tokens = max(1, fits if self.default_max_tokens is None else min(fits, self.default_max_tokens))
        seed = self.params.seed
        if seed is not None and index:
            seed = (seed + index + _SEED_SPAN // 2) % _SEED_SPAN - _SEED_SPAN // 2
        return msgspec.structs.replace(self.params, max_tokens=max(1, max_tokens), seed=seed)


class CompletionCall(Call, frozen=True, kw_only=True):
    """A body of /v1/completions; ``prompts`` are texts or token ids."""

    prompts: list[str | list[int]]
    add_special_tokens: bool = True


class ChatCall(Call, frozen=True, kw_only=True):
    """A body of /v1/chat/completions.

    ``messages`` and ``tools`` are as the template takes them; no tools: the answer is not searched for calls.
    ``only_first_call``: the answer ends with its first tool call.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    only_first_call: bool = False
    add_generation_prompt: bool = True
    template_variables: dict[str, Any] = {}


def parse_completion(body: bytes, defaults: GenerationDefaults) -> CompletionCall:
    """Read a body of /v1/completions.

    Raises:
        InvalidRequestError: names the field and the value.
    """
    fields = read_fields(body, _BY_ENDPOINT[COMPLETIONS])
    if "prompt" not in fields:
        raise InvalidRequestError("prompt is required: a string, token ids, or a list of either", "prompt")
    prompts = _read_prompts(fields.pop("prompt"))
    echo = fields.get("echo", False)
    max_tokens = fields.get("max_tokens")
    if max_tokens is not None:
        check_integer("max_tokens", max_tokens, 0 if echo else 1, 2**31 - 1)
    logprobs = fields.pop("logprobs", None)
    add_special_tokens = fields.pop("add_special_tokens", True)
    return CompletionCall(
        prompts=prompts,
        add_special_tokens=add_special_tokens,
        **_common(fields, defaults, logprobs, logprobs if echo else None),
        max_tokens=max_tokens,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        echo=echo,
    )


def parse_chat(body: bytes, defaults: GenerationDefaults) -> ChatCall:
    """Read a body of /v1/chat/completions.

    Raises:
        InvalidRequestError: names the field and the value.
    """
    return chat_call(read_fields(body, _BY_ENDPOINT[CHAT]), defaults)


def chat_call(fields: dict[str, Any], defaults: GenerationDefaults) -> ChatCall:
    """The call that the given fields of a chat ask for, each of its type.

    Raises:
        InvalidRequestError: names the field and the value.
    """
    if "messages" not in fields:
        raise InvalidRequestError("messages is required: a list of at least one message", "messages")
    messages = read_messages(fields.pop("messages"))
    max_tokens = fields.pop("max_tokens", None)
    newer = fields.pop("max_completion_tokens", None)
    if newer is not None:
        if max_tokens is not None and max_tokens != newer:
            raise InvalidRequestError(
                f"max_tokens is {max_tokens} and max_completion_tokens is {newer}: give one of them, or the same value",
                "max_completion_tokens",
            )
        check_integer("max_completion_tokens", newer, 1, 2**31 - 1)
        max_tokens = newer
    elif max_tokens is not None:
        check_integer("max_tokens", max_tokens, 1, 2**31 - 1)
    variables = fields.pop("chat_template_kwargs", {})
    check_template_variables(variables)
    effort = fields.pop("reasoning_effort", None)
    if effort is not None:
        if effort != "none":
            raise InvalidRequestError(
                f"reasoning_effort is {shown(effort)}, which is not supported: a thought is as long as it is; 'none' "
                "leaves it out",
                "reasoning_effort",
            )
        variables = {"enable_thinking": False} | variables
    top_logprobs = fields.pop("top_logprobs", None)
    wants_logprobs = fields.pop("logprobs", False)
    if top_logprobs is not None:
        check_integer("top_logprobs", top_logprobs, 0, MAX_LOGPROBS)
        if not wants_logprobs:
            raise InvalidRequestError(f"top_logprobs is {top_logprobs}: it needs logprobs: true", "top_logprobs")
    given_tools, choice = fields.pop("tools", []), fields.pop("tool_choice", None)
    tools = _chosen_tools(given_tools, choice)
    only_first_call = not fields.pop("parallel_tool_calls", True)
    common = _common(fields, defaults, (top_logprobs or 0) if wants_logprobs else None, None)
    params = common["params"]
    if tools:
        form = with_calls(params.structured_outputs, tools, strict_names(given_tools), choice, only_first_call)
        common["params"] = msgspec.structs.replace(params, structured_outputs=form)
    return ChatCall(
        messages=messages,
        tools=tools,
        only_first_call=only_first_call,
        add_generation_prompt=fields.pop("add_generation_prompt", True),
        template_variables=variables,
        **common,
        max_tokens=max_tokens,
        default_max_tokens=defaults.max_new_tokens,
    )


def _chosen_tools(tools: list[Any], choice: str | dict[str, Any] | None) -> list[dict[str, Any]]:
    """The tools that the model is shown under this ``tool_choice``."""
    read = read_tools(tools)
    if choice == "none":
        return []
    if choice is not None and choice not in ("auto", "required") and named_function(choice) is None:
        raise InvalidRequestError(
            f"tool_choice is {shown(choice)}: it must be 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    if choice is not None and not tools:
        raise InvalidRequestError(f"tool_choice is {shown(choice)}: it needs tools", "tool_choice")
    return read


def read_fields(body: bytes, known: Mapping[str, Field]) -> dict[str, Any]:
    """The honoured fields that a body gives, each of its type; null counts as not given.

    Args:
        known: the endpoint's fields, by name.

    Raises:
        InvalidRequestError: names the field and the value.
    """
    try:
        raw = msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        # Valid JSON, and a number that nothing here can hold.
        name = _field_out_of_range(body)
        raise InvalidRequestError(f"{shown(name or 'the body')} holds a number out of range", name) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is no valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequestError("the body must be a JSON object")
    fields: dict[str, Any] = {}
    for name, value in raw.items():
        field = known.get(name)
        if field is None:
            raise InvalidRequestError(f"{shown(name)} is no field of this endpoint (its value is {shown(value)})", name)
        if value is None:
            continue
        if not field.is_honoured:
            # 0 == False and 1 == True in Python, never in a request.
            if not any(type(value) is type(off) and value == off for off in field.off):
                raise InvalidRequestError(f"{name} is {shown(value)}, which is not supported: {field.note}", name)
            continue
        try:
            fields[name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"{name} is {shown(value)}: {error}", name) from error
    return fields


def _field_out_of_range(body: bytes) -> str | None:
    """The first field whose value cannot be decoded, of a body that is an object; else None."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None
    for name, raw in fields.items():
        try:
            msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return name
    return None


def _common(
    fields: dict[str, Any], defaults: GenerationDefaults, logprobs: int | None, prompt_logprobs: int | None
) -> dict[str, Any]:
    """What both endpoints take from the fields, as arguments of Call."""

    def sampled(name: str) -> dict[str, Any]:
        value = fields.get(name)
        if value is None:
            value = getattr(defaults, name, None)
        return {} if value is None else {name: value}

    n = fields.get("n", 1)
    check_integer("n", n, 1, 128)
    stream = fields.get("stream", False)
    if "stream_options" in fields and not stream:
        raise InvalidRequestError("stream_options is given: it needs stream: true", "stream_options")
    options = fields.get("stream_options", StreamOptions())
    if options.include_obfuscation:
        raise InvalidRequestError(
            "stream_options.include_obfuscation is true, which is not supported: chunks are not padded",
            "stream_options",
        )
    stop = fields.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop holds {len(stop)} strings: at most {MAX_STOP_STRINGS} are looked for", "stop")
    for text in stop:
        if len(text) > MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop holds a string of {len(text)} characters: at most {MAX_STOP_CHARACTERS} are looked for", "stop"
            )
    named: dict[str, Any] = {}
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "min_tokens",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
    ):
        named |= sampled(name)
    params = SamplingParams(
        **named,
        structured_outputs=read_form(fields),
        stop=stop,
        logit_bias=_read_logit_bias(fields.get("logit_bias")),
        max_tokens=None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return {
        "model": fields.get("model"),
        "n": n,
        "stream": stream,
        "stream_options": options,
        "params": params,
        "return_token_ids": fields.get("return_token_ids", False),
        "tokens_as_ids": fields.get("return_tokens_as_token_ids", False),
        "user": fields.get("user"),
    }


def _read_logit_bias(biases: dict[str, float] | None) -> dict[int, float] | None:
    if not biases:
        return None
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(f"logit_bias holds the key {shown(key)}: keys must be token ids", "logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def _read_prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        prompts: Sequence[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = [prompt] if not isinstance(prompt[0], (str, list)) else prompt
    else:
        raise InvalidRequestError(
            f"prompt is {shown(prompt)}: it must be a string, token ids, or a list of either, and not empty", "prompt"
        )
    kind = str if isinstance(prompts[0], str) else list[int]
    for i, item in enumerate(prompts):
        try:
            msgspec.convert(item, kind)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(
                f"prompt {i} is {shown(item)}: {error}; prompts are strings or lists of token ids, all of one kind",
                "prompt",
            ) from error
        if not item:
            raise InvalidRequestError(f"prompt {i} is empty: at least one token is needed", "prompt")
    return list(prompts)
