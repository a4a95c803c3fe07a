"""The tables of request fields: complete for the clients that there are, and the page that shows them up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses import response_create_params as response_params

from bireme.server.parameters import ENDPOINTS, body_schema, fields_of, page

PAGE = Path(__file__).parents[1] / "docs" / "parameters.md"

SAMPLING = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words response_format structured_outputs priority request_id
    session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
    thinking_token_budget add_special_tokens guided_json guided_regex guided_choice guided_grammar
"""
VLLM = {
    "/v1/completions": SAMPLING + "prompt_embeds",
    "/v1/chat/completions": SAMPLING
    + """
        reasoning_effort include_reasoning parallel_tool_calls echo add_generation_prompt continue_final_message
        documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
    """,
    "/v1/responses": """
        top_k skip_special_tokens include_stop_str_in_output prompt_cache_key request_id mm_processor_kwargs priority
        cache_salt enable_response_messages previous_input_messages previous_response structured_outputs
        repetition_penalty seed stop ignore_eos vllm_xargs logit_bias
    """,
    "/tokenize": """
        model prompt add_special_tokens return_token_strs messages add_generation_prompt continue_final_message
        chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools
    """,
    "/detokenize": "model tokens",
}
"""Fields that vLLM's server knows beside OpenAI's."""


def names(*types: Any) -> set[str]:
    return {name for each in types for name in each.__annotations__}


OPENAI = {
    "/v1/completions": names(CompletionParams) | {"stream"},
    "/v1/chat/completions": names(chat_params.CompletionCreateParamsBase, chat_params.CompletionCreateParamsStreaming),
    "/v1/responses": names(response_params.ResponseCreateParamsBase, response_params.ResponseCreateParamsStreaming),
    "/tokenize": set(),
    "/detokenize": set(),
}


def test_the_page_of_parameters_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m bireme.server.parameters docs/parameters.md"


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_of_the_official_client_and_of_vllm_has_its_row(path: str) -> None:
    known = {field.name for field in fields_of(path)}
    assert (OPENAI[path] | set(VLLM[path].split())) - known == set()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_each_field_has_one_row_with_a_reason(path: str) -> None:
    fields = fields_of(path)
    assert len({field.name for field in fields}) == len(fields)
    assert all(field.note for field in fields)
    assert not any(field.is_honoured and field.off for field in fields)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_schema_of_a_body_names_the_same_fields(path: str) -> None:
    schema = body_schema(path)
    assert list(schema["properties"]) == [field.name for field in fields_of(path)]
    assert schema["additionalProperties"] is False
    assert "$ref" not in json.dumps(schema)
