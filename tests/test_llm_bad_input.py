"""What callers of the offline API get wrong is refused by name; what vLLM documents is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch

import bireme.llm
from bireme import LLM, SamplingParams
from bireme.errors import InvalidRequestError
from bireme.sim import SimExecutor, sim_capacity

ONE = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture
def llm(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    folder = checkpoint(hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=16)
    executor = SimExecutor(sim_capacity(max_model_len=512), keep_plans=True)
    monkeypatch.setattr(bireme.llm, "create_executor", lambda config: executor)
    with LLM(str(folder)) as made:
        yield made


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, r"the prompts are 5: a prompt is a string, a list of token ids, or a dict"),
        (None, r"the prompts are None: a prompt is"),
        (b"abc", r"the prompts are b'abc': a prompt is"),
        ([None], r"the prompt is None: a prompt is a string"),
        (["a", None], r"prompt 1: the prompt is None: a prompt is a string"),
        ([5, "a"], r"prompt 0: the prompt is 5: a prompt is a string"),
        ([1.5, 2], r"holds 1\.5 at position 0: token ids must be integers"),
        ([[1, "2"]], r"holds '2' at position 1: token ids must be integers"),
        ([True], r"holds True at position 0: token ids must be integers"),
        ({"prompt_token_ids": 5}, r"prompt_token_ids is 5: it must be a list of token ids"),
        ({"prompt_token_ids": "abc"}, r"prompt_token_ids is 'abc': it must be a list of token ids"),
        ({"prompt_token_ids": [1.0]}, r"holds 1\.0 at position 0"),
        ({"prompt": 5}, r"prompt is 5: it must be a string"),
        ({"prompt": None}, r"needs prompt or prompt_token_ids"),
        (numpy.array([0.5]), r"holds 0\.5 at position 0"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused_with_what_was_given(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, ONE, use_tqdm=False)
    assert llm._engine.executor.plans == []


@pytest.mark.parametrize(
    "prompt",
    [
        numpy.array([5, 6]),
        torch.tensor([5, 6]),
        [numpy.int64(5), numpy.int32(6)],
        [torch.tensor(5), 6],
        {"prompt_token_ids": numpy.array([5, 6])},
        [numpy.array([5, 6])],
        torch.tensor([[5, 6]]),
        (5, 6),
    ],
    ids=repr,
)
def test_integers_of_numpy_and_torch_are_token_ids(llm: LLM, prompt: Any) -> None:
    result = llm.generate(prompt, ONE, use_tqdm=False)[0]
    assert result.prompt_token_ids == [5, 6]
    assert set(map(type, result.prompt_token_ids)) == {int}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([5], r"sampling_params\[0\] is 5: it must be a SamplingParams"),
        ({"temperature": 1}, r"sampling_params is \{'temperature': 1\}: give one SamplingParams"),
        (5, r"sampling_params is 5: give one SamplingParams"),
    ],
    ids=repr,
)
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate("a", params, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=message):
        next(llm.stream("a", params))


def test_a_stream_of_what_is_no_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is 5: a prompt is a string"):
        next(llm.stream(5, ONE))  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["\ud800", "\ud800" * 5000], ids=["short", "long"])
def test_a_lone_surrogate_in_a_prompt_is_refused_with_its_place(llm: LLM, prompt: str) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt holds a lone surrogate at character 3: it is not valid"):
        llm.generate("abc" + prompt, ONE, use_tqdm=False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user"}], r"messages\[0\]\.content is null"),
        ("hi", r"messages is 'hi': it must be a list of dicts with role and content"),
        ({"role": "user", "content": "hi"}, r"messages is \{.*it must be a list of dicts"),
        (5, r"messages is 5: it must be a list"),
        (["hi"], r"messages is 'hi': it must be a list"),
        ([[{"role": "user", "content": "hi"}], [{"role": "elf", "content": "hi"}]], r"conversation 1: .*role is \"elf"),
        ([{"role": "user", "content": "hi"}, "hi"], r"messages\[1\] is \"hi\": it must be an object"),
        ([{"role": "user", "content": object}], r"messages holds a value that has no JSON form"),
        ([[]], r"messages is empty"),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused_as_by_the_server(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        llm.chat(messages, ONE, use_tqdm=False)
    assert caught.value.param == "messages"


def test_a_template_switch_that_the_call_itself_sets_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs holds 'tools'"):
        llm.chat([{"role": "user", "content": "hi"}], ONE, chat_template_kwargs={"tools": []})


def test_none_stands_for_no_stop_and_a_string_for_one() -> None:
    empty = SamplingParams(stop=None, stop_token_ids=None)  # type: ignore[arg-type]
    assert (empty.stop, empty.stop_token_ids) == ([], [])
    assert SamplingParams(stop="x").stop == ["x"]  # type: ignore[arg-type]
    assert SamplingParams(stop=("x", "y"), stop_token_ids=(1, numpy.int64(2))).stop_token_ids == [1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop", 5, "stop is 5: it must be a string or a list of strings"),
        ("stop", [5], "stop holds 5: every stop string"),
        ("stop", [""], "stop holds '': every stop string"),
        ("stop", ["a\ud800"], r"stop holds 'a\\ud800', with a lone surrogate at character 1"),
        ("stop_token_ids", 5, "stop_token_ids is 5: it must be a list of token ids"),
        ("stop_token_ids", ["5"], "stop_token_ids holds '5'"),
        ("stop_token_ids", [1.0], r"stop_token_ids holds 1\.0"),
        ("stop_token_ids", [-1], "stop_token_ids holds -1"),
        ("ignore_eos", 1, "ignore_eos is 1: it must be True or False"),
        ("include_stop_str_in_output", "no", "include_stop_str_in_output is 'no': it must be True or False"),
        ("skip_special_tokens", None, "skip_special_tokens is None: it must be True or False"),
        ("logit_bias", [1], r"logit_bias is \[1\]: it must be a dict"),
        ("logit_bias", {"5": 1.0}, "logit_bias is '5'"),
        ("logit_bias", {5: "1"}, r"logit_bias\[5\] is '1'"),
        ("repetition_penalty", 0, "repetition_penalty is 0: it must be a number in"),
        ("repetition_penalty", 1e-320, r"must be a number in \[1e-20, 100\]"),
        ("temperature", 10**400, "temperature is 1000"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_value_of_the_wrong_kind_is_refused_by_field_and_value(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_a_float_of_numpy_becomes_one_that_can_be_sent_to_ranks() -> None:
    params = SamplingParams(temperature=numpy.float64(0.5))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_the_smallest_repetition_penalty_keeps_logits_finite() -> None:
    from bireme.types import MIN_REPETITION_PENALTY

    SamplingParams(repetition_penalty=MIN_REPETITION_PENALTY)
    logits = torch.tensor([1000.0, -1000.0]) / torch.tensor(MIN_REPETITION_PENALTY) / 1e-5
    assert torch.isfinite(logits).all() and torch.tensor(MIN_REPETITION_PENALTY) > 0
