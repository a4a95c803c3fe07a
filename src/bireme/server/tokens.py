"""/tokenize and /detokenize, in vLLM's shapes: their fields, and the calls that bodies are parsed into."""

from __future__ import annotations

from typing import Any

import msgspec

from bireme.config import GenerationDefaults
from bireme.errors import InvalidRequestError
from bireme.server.params import ChatCall, Field, chat_call, read_fields, refused

TOKENIZE = "tokenize"
DETOKENIZE = "detokenize"

_TO = (TOKENIZE,)
_FROM = (DETOKENIZE,)

TOKEN_FIELDS: tuple[Field, ...] = (
    Field("model", (TOKENIZE, DETOKENIZE), str, "a served model name; absent: the served model"),
    Field("prompt", _TO, str, "a text"),
    Field("messages", _TO, list[Any], "a conversation, in the prompt's stead: the template makes its text"),
    Field("add_special_tokens", _TO, bool, "let the tokenizer add its own tokens to a text prompt"),
    Field("return_token_strs", _TO, bool, "the tokens' texts too"),
    Field("add_generation_prompt", _TO, bool, "end a conversation with the opening of the assistant's answer"),
    Field("chat_template_kwargs", _TO, dict[str, Any], "the template's switches, e.g. enable_thinking"),
    Field("tools", _TO, list[Any], "functions that a conversation's model may call"),
    Field("tokens", _FROM, list[int], "token ids"),
    refused("continue_final_message", _TO, "an answer begins a new message", False),
    refused("chat_template", _TO, "only the checkpoint's own template is run"),
    refused("media_io_kwargs", _TO, "only text is read", {}),
    refused("mm_processor_kwargs", _TO, "only text is read", {}),
)

_KNOWN = {
    endpoint: {field.name: field for field in TOKEN_FIELDS if endpoint in field.endpoints}
    for endpoint in (TOKENIZE, DETOKENIZE)
}
_OF_CHATS = ("add_generation_prompt", "chat_template_kwargs", "tools")


class TokenizeCall(msgspec.Struct, frozen=True, kw_only=True):
    """A body of /tokenize: ``prompt`` or ``chat``, and the other is None."""

    model: str | None
    prompt: str | None
    chat: ChatCall | None
    add_special_tokens: bool
    wants_texts: bool


class DetokenizeCall(msgspec.Struct, frozen=True, kw_only=True):
    """A body of /detokenize."""

    model: str | None
    token_ids: list[int]


def parse_tokenize(body: bytes) -> TokenizeCall:
    """Read a body of /tokenize.

    Raises:
        InvalidRequestError: names the field and the value.
    """
    fields = read_fields(body, _KNOWN[TOKENIZE])
    given = [name for name in ("prompt", "messages") if name in fields]
    if len(given) != 1:
        raise InvalidRequestError(f"{' and '.join(given) or 'neither'} is given: give prompt or messages", "prompt")
    chat = None
    if "messages" in fields:
        if fields.get("add_special_tokens"):
            raise InvalidRequestError(
                "add_special_tokens is true, which is not supported with messages: the template writes all special "
                "tokens",
                "add_special_tokens",
            )
        of_chat = {name: fields[name] for name in ("messages", *_OF_CHATS) if name in fields}
        chat = chat_call(of_chat, GenerationDefaults())
    else:
        for name in _OF_CHATS:
            if name in fields:
                raise InvalidRequestError(f"{name} is given: it needs messages", name)
    return TokenizeCall(
        model=fields.get("model"),
        prompt=fields.get("prompt"),
        chat=chat,
        add_special_tokens=fields.get("add_special_tokens", True),
        wants_texts=fields.get("return_token_strs", False),
    )


def parse_detokenize(body: bytes, vocab_size: int) -> DetokenizeCall:
    """Read a body of /detokenize.

    Raises:
        InvalidRequestError: names the field and the value.
    """
    fields = read_fields(body, _KNOWN[DETOKENIZE])
    if "tokens" not in fields:
        raise InvalidRequestError("tokens is required: a list of token ids", "tokens")
    for position, token_id in enumerate(fields["tokens"]):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"tokens holds {token_id} at position {position}: ids must be in [0, {vocab_size})", "tokens"
            )
    return DetokenizeCall(model=fields.get("model"), token_ids=fields["tokens"])
