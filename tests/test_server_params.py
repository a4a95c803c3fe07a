"""The table of request fields, and the calls that bodies are parsed into."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams

from bireme.config import GenerationDefaults
from bireme.errors import InvalidRequestError
from bireme.server.params import BOTH, CHAT, COMPLETIONS, FIELDS, ChatCall, CompletionCall, parse_chat, parse_completion
from bireme.sim import sim_capacity

NOTHING = GenerationDefaults()
MESSAGES = [{"role": "user", "content": "hi"}]
CAPACITY = sim_capacity(max_model_len=100)


def completion(defaults: GenerationDefaults = NOTHING, **fields: Any) -> CompletionCall:
    return parse_completion(json.dumps({"prompt": "x"} | fields).encode(), defaults)


def chat(defaults: GenerationDefaults = NOTHING, **fields: Any) -> ChatCall:
    return parse_chat(json.dumps({"messages": MESSAGES} | fields).encode(), defaults)


def parse(endpoint: str, **fields: Any) -> CompletionCall | ChatCall:
    return completion(**fields) if endpoint == COMPLETIONS else chat(**fields)


@pytest.mark.parametrize(("params", "endpoint"), [(CompletionParams, COMPLETIONS), (ChatParams, CHAT)])
def test_the_table_decides_every_field_of_the_official_client(params: Any, endpoint: str) -> None:
    known = {field.name for field in FIELDS if endpoint in field.endpoints}
    assert set(params.__annotations__) - known == set()


def test_each_field_has_one_fate_per_endpoint_and_a_reason() -> None:
    fates = [(field.name, endpoint) for field in FIELDS for endpoint in field.endpoints]
    assert len(fates) == len(set(fates))
    assert all(field.note for field in FIELDS)
    assert not any(field.is_honoured and field.off for field in FIELDS)


@pytest.mark.parametrize("endpoint", BOTH)
def test_null_and_off_are_accepted_and_anything_else_that_would_be_ignored_is_refused(endpoint: str) -> None:
    for field in FIELDS:
        if endpoint not in field.endpoints or field.name in ("prompt", "messages"):
            continue
        parse(endpoint, **{field.name: None})
        if field.is_honoured:
            continue
        for off in field.off:
            parse(endpoint, **{field.name: off})
        with pytest.raises(InvalidRequestError, match=field.name) as caught:
            parse(endpoint, **{field.name: {"on": 7}})
        assert caught.value.param == field.name
        assert '{"on":7}' in str(caught.value)


def test_off_values_are_compared_with_their_types() -> None:
    with pytest.raises(InvalidRequestError, match="use_beam_search is 0"):
        completion(use_beam_search=0)
    with pytest.raises(InvalidRequestError, match="best_of is true"):
        completion(best_of=True)


@pytest.mark.parametrize("endpoint", BOTH)
def test_an_unknown_field_is_refused_by_name_and_value(endpoint: str) -> None:
    with pytest.raises(InvalidRequestError, match=r'"temprature" .* 0\.5') as caught:
        parse(endpoint, temprature=0.5)
    assert caught.value.param == "temprature"


def test_the_checkpoints_defaults_fill_in_where_the_request_is_silent() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1)
    silent = chat(defaults, temperature=None).params
    assert (silent.temperature, silent.top_k, silent.top_p, silent.min_p) == (0.6, 20, 0.9, 0.05)
    assert silent.repetition_penalty == 1.1
    spoken = chat(defaults, temperature=0, top_k=0, top_p=1).params
    assert (spoken.temperature, spoken.top_k, spoken.top_p) == (0.0, 0, 1.0)
    assert chat().params.temperature == 1.0


def test_max_tokens_defaults_to_16_for_completions_and_to_what_fits_for_chats() -> None:
    assert completion().params_for(10, 0, CAPACITY).max_tokens == 16
    assert completion().params_for(95, 0, CAPACITY).max_tokens == 5
    assert chat().params_for(10, 0, CAPACITY).max_tokens == 90
    assert chat(GenerationDefaults(max_new_tokens=30)).params_for(10, 0, CAPACITY).max_tokens == 30
    assert chat(GenerationDefaults(max_new_tokens=30)).params_for(80, 0, CAPACITY).max_tokens == 20
    assert chat(max_completion_tokens=7).params_for(10, 0, CAPACITY).max_tokens == 7
    assert chat(max_tokens=7, max_completion_tokens=7).max_tokens == 7
    small = sim_capacity(max_model_len=1000, num_blocks=2, block_size=64)
    assert chat().params_for(100, 0, small).max_tokens == 29


def test_answers_of_one_seeded_call_have_seeds_of_their_own() -> None:
    call = completion(n=3, seed=2**63 - 1)
    seeds = [call.params_for(1, index, CAPACITY).seed for index in range(3)]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert completion(n=2).params_for(1, 1, CAPACITY).seed is None


@pytest.mark.parametrize(
    ("prompt", "want"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_all_four_forms_of_a_prompt_are_read(prompt: Any, want: Any) -> None:
    assert completion(prompt=prompt).prompts == want


def test_echo_with_logprobs_asks_for_the_prompts_too() -> None:
    both = completion(echo=True, logprobs=2, max_tokens=0)
    assert (both.params.logprobs, both.params.prompt_logprobs, both.max_tokens) == (2, 2, 0)
    assert both.params_for(5, 0, CAPACITY).max_tokens == 1
    assert completion(logprobs=2).params.prompt_logprobs is None


def test_chat_logprobs_are_a_switch_and_a_count() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).params.logprobs == 5
    assert chat(logprobs=False).params.logprobs is None


def test_messages_come_as_text_whatever_form_they_had() -> None:
    call = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None, "tool_calls": []},
            {"role": "user", "content": ""},
        ]
    )
    assert call.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "user", "content": ""},
    ]
