"""The scheduling policy as pure functions on numbers. Lengths, budgets and positions are in tokens.

A request is a sequence of tokens that must go through the model: its prompt, then each output token except the last.
Token t is a prompt token while t < num_prompt_tokens; computing the last prompt token, or any token after it, yields an
output. So one counter of computed tokens says everything about where a request is.
"""

from __future__ import annotations

import enum
from collections.abc import Container

from bireme.config import CHUNK_ALIGNMENT
from bireme.types import FinishReason


class Admission(enum.Enum):
    """What to do with the request at the head of the queue."""

    ADMIT = "admit"
    DEFER = "defer"
    REJECT = "reject"


def resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Output tokens that a request may produce: ``max_tokens``, or when None all that the length limit leaves."""
    return max_model_len - num_prompt_tokens if max_tokens is None else max_tokens


def lifetime_tokens(num_prompt_tokens: int, max_tokens: int) -> int:
    """Tokens that pass through the model over the request's whole life: the last output token is never fed back."""
    return num_prompt_tokens + max_tokens - 1


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """KV blocks that hold ``num_tokens``."""
    return -(-num_tokens // block_size)


def admission(num_blocks_needed: int, num_free_blocks: int, num_blocks: int, num_free_slots: int) -> Admission:
    """Whether a request enters now (a slot and all its blocks are free), later, or never (more blocks than exist)."""
    if num_blocks_needed > num_blocks:
        return Admission.REJECT
    if num_free_slots < 1 or num_blocks_needed > num_free_blocks:
        return Admission.DEFER
    return Admission.ADMIT


def prefill_budget(max_num_batched_tokens: int, num_decode_rows: int) -> int:
    """Prompt tokens that a step may take beside its decode rows.

    Decode rows are served first, and at least one aligned chunk always remains, so that prompts move on however many
    rows decode. A step therefore holds up to max(max_num_batched_tokens, CHUNK_ALIGNMENT + num_slots - 1) tokens: the
    slot of the prompt itself does not decode.
    """
    return max(CHUNK_ALIGNMENT, max_num_batched_tokens - num_decode_rows)


def chunk_length(start: int, num_prompt_tokens: int, budget: int) -> int:
    """Length of the prompt chunk at ``start``: the longest within ``budget`` that ends on an aligned position or at the
    prompt's end. 0 when there is none; never 0 for a budget of one alignment or more."""
    if num_prompt_tokens - start <= budget:
        return num_prompt_tokens - start
    end = (start + budget) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    return max(0, end - start)


def finish_check(
    token_id: int,
    num_output_tokens: int,
    min_tokens: int,
    max_tokens: int,
    eos_token_ids: Container[int],
    stop_token_ids: Container[int],
) -> tuple[FinishReason | None, int | None]:
    """Whether a request ends with the token just produced.

    Args:
        token_id: the token.
        num_output_tokens: output tokens so far, this one included.
        min_tokens: eos and stop tokens do not end the request while it has fewer.
        max_tokens: the request ends when it has this many.
        eos_token_ids: the model's end tokens; empty for a request that ignores them.
        stop_token_ids: the request's own stop tokens.

    Returns:
        (finish reason, stop reason): reason None to go on. The stop reason is the token for a stop token and None for
        an eos, as in vLLM; a token that stops wins over the length limit.
    """
    if num_output_tokens >= min_tokens:
        if token_id in eos_token_ids:
            return FinishReason.STOP, None
        if token_id in stop_token_ids:
            return FinishReason.STOP, token_id
    if num_output_tokens >= max_tokens:
        return FinishReason.LENGTH, None
    return None, None
