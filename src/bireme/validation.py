"""Whether a request can be served at all: one pure check, used by the engine and by the server before it enqueues."""

from __future__ import annotations

from collections.abc import Container

from bireme.config import CacheCapacity
from bireme.errors import InvalidRequestError
from bireme.types import Request


def check_request(request: Request, vocab_size: int, capacity: CacheCapacity, open_ids: Container[str] = ()) -> None:
    """Raise unless ``request`` could be served by an otherwise empty engine.

    Args:
        request: the request; its params have passed their own range checks already.
        vocab_size: the model's; token ids must be below it.
        capacity: the engine's limits (``EngineCore.capacity``).
        open_ids: ids that are taken.

    Raises:
        InvalidRequestError: with the value, the bound and the flag that moves it; ``param`` is the field at fault.
    """
    params = request.params
    if request.request_id in open_ids:
        raise InvalidRequestError(
            f"request id {request.request_id!r} is in use by a request that has not ended", "request_id"
        )
    if params.n != 1:
        raise InvalidRequestError(f"n is {params.n}: the engine takes one sequence a request", "n")

    prompt = request.prompt_token_ids
    num_prompt = len(prompt)
    if not num_prompt:
        raise InvalidRequestError("the prompt is empty: at least one token is needed", "prompt")
    if set(map(type, prompt)) != {int}:
        raise InvalidRequestError("the prompt holds a token id that is not an integer", "prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(token_id for token_id in prompt if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"the prompt holds token id {bad} at position {prompt.index(bad)}: ids must be in [0, {vocab_size})",
            "prompt",
        )
    for name, token_ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(f"{name} holds token id {token_id}: ids must be in [0, {vocab_size})", name)

    max_model_len = capacity.max_model_len
    room = max_model_len - num_prompt
    if room < 1:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens: at most {max_model_len - 1} fit beside one output token in a context "
            f"of {max_model_len} (--max-model-len)",
            "prompt",
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}: together "
            f"{num_prompt + params.max_tokens}, more than the context of {max_model_len} (--max-model-len)",
            "max_tokens",
        )
    if params.min_tokens > room:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}: beside a prompt of {num_prompt} tokens, a context of {max_model_len} "
            f"leaves {room} (--max-model-len)",
            "min_tokens",
        )
    lifetime = num_prompt + (room if params.max_tokens is None else params.max_tokens) - 1
    if lifetime > capacity.num_tokens:
        raise InvalidRequestError(
            f"the request needs room for {lifetime} tokens (prompt and output): the cache holds {capacity.num_tokens} "
            "in all (--kv-cache-memory-bytes)",
            "max_tokens",
        )
