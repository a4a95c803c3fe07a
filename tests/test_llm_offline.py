"""The offline API on a scripted executor (it echoes the prompt): shapes, stop strings, fan-out, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bireme.llm
from bireme import LLM, SamplingParams
from bireme.errors import ConfigError, EngineDeadError, InvalidRequestError
from bireme.server.chat import ChatTemplate
from bireme.sim import SimExecutor, sim_capacity


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=16)


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimExecutor]:
    """Make LLMs run on a SimExecutor with these options."""

    def use(**options: Any) -> SimExecutor:
        executor = SimExecutor(sim_capacity(max_model_len=512), keep_plans=True, **options)
        monkeypatch.setattr(bireme.llm, "create_executor", lambda config: executor)
        return executor

    return use


@pytest.fixture
def llm(folder: Path, sim: Callable[..., SimExecutor]) -> Iterator[LLM]:
    sim()
    with LLM(str(folder)) as made:
        yield made
        made._engine.assert_idle()


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)


def test_every_form_of_prompt_gives_one_result_each_in_order(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("abc")
    forms: list[Any] = ["abc", {"prompt": "abc"}, ids, {"prompt_token_ids": ids}]
    results = llm.generate(forms, greedy(max_tokens=2 * len(ids)), use_tqdm=False)
    assert [result.outputs[0].text for result in results] == ["abcabc"] * 4
    assert [result.outputs[0].token_ids for result in results] == [ids + ids] * 4
    assert [result.prompt for result in results] == ["abc", "abc", None, None]
    assert all(result.prompt_token_ids == ids and result.finished for result in results)
    assert len({result.request_id for result in results}) == 4


@pytest.mark.parametrize(
    "prompt", ["abc", [65, 66, 67], {"prompt_token_ids": [65, 66, 67]}], ids=["text", "ids", "dict"]
)
def test_a_single_prompt_gives_a_list_of_one(llm: LLM, prompt: Any) -> None:
    results = llm.generate(prompt, greedy(max_tokens=3), use_tqdm=False)
    assert len(results) == 1
    assert results[0].outputs[0].finish_reason == "length"


def test_no_prompt_gives_no_result(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


def test_params_may_differ_by_prompt_and_their_number_must_match(llm: LLM) -> None:
    results = llm.generate(["abc", "abc"], [greedy(max_tokens=1), greedy(max_tokens=4)], use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 4]
    with pytest.raises(InvalidRequestError, match=r"2 prompts came with 1 "):
        llm.generate(["abc", "abc"], [greedy()], use_tqdm=False)


def test_without_params_the_checkpoints_defaults_apply(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.7, 20, 0.8)
    llm.generate("abc", use_tqdm=False)
    assert llm._engine.executor.plans[0].new_requests[0].params.top_k == 20


def test_a_stop_string_cuts_text_and_tokens_and_frees_the_row(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("one two!three")
    output = llm.generate("one two!three", greedy(max_tokens=400, stop=["!"]), use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("one two", "stop", "!")
    assert output.token_ids == ids[: len(output.token_ids)]
    assert len(llm._engine.executor.plans) < 30
    kept = greedy(max_tokens=400, stop=["!"], include_stop_str_in_output=True)
    assert llm.generate("one two!three", kept, use_tqdm=False)[0].outputs[0].text == "one two!"


def test_a_stop_token_ends_with_its_id_as_reason(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("abc")
    output = llm.generate("abc", greedy(max_tokens=50, stop_token_ids=[ids[1]]), use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason, output.token_ids) == ("stop", ids[1], ids[:2])


def test_n_completions_get_seeds_one_apart(llm: LLM) -> None:
    result = llm.generate("abc", SamplingParams(n=3, seed=2**63 - 2, max_tokens=2), use_tqdm=False)[0]
    assert [output.index for output in result.outputs] == [0, 1, 2]
    news = [new for plan in llm._engine.executor.plans for new in plan.new_requests]
    assert [new.params.seed for new in news] == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_logprobs_have_vllms_shape(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("abc")
    params = greedy(max_tokens=2, logprobs=2, prompt_logprobs=1)
    result = llm.generate("abc", params, use_tqdm=False)[0]
    output = result.outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == 2
    first = output.logprobs[0][ids[0]]
    assert (first.logprob, first.rank, first.decoded_token) == (-0.5, 1, llm.get_tokenizer().decode([ids[0]]))
    assert len(output.logprobs[0]) >= 2
    assert output.cumulative_logprob == pytest.approx(-1.0)
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    assert [ids[i] in entry for i, entry in enumerate(result.prompt_logprobs) if entry is not None] == [True] * (
        len(ids) - 1
    )
    plain = llm.generate("abc", greedy(max_tokens=2), use_tqdm=False)[0]
    assert plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None
    assert plain.prompt_logprobs is None


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([99999], {}, r"prompt 1: .*99999.*\[0, 512\)"),
        ([], {}, r"prompt 1: the prompt is empty"),
        ({"text": "abc"}, {}, r"needs prompt or prompt_token_ids"),
        ("abc", {"max_tokens": 5000}, r"5000.*512"),
        ("abc", {"logit_bias": {777: 1.0}}, r"777"),
    ],
    ids=["out of vocabulary", "empty", "unknown dict", "too long", "bias"],
)
def test_a_bad_request_is_refused_before_anything_runs(
    llm: LLM, prompt: Any, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["fine", prompt], [greedy(), greedy(**params)], use_tqdm=False)
    assert llm._engine.executor.plans == []
    assert llm.generate("abc", greedy(max_tokens=3), use_tqdm=False)[0].finished


def test_a_batch_longer_than_the_queue_limit_of_a_server_is_taken(llm: LLM) -> None:
    results = llm.generate([[1, 2]] * 5000, greedy(max_tokens=1), use_tqdm=False)
    assert len(results) == 5000


def test_chat_goes_through_the_template_one_or_several_conversations(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    one = llm.chat(conversation, greedy(max_tokens=1), use_tqdm=False)
    two = llm.chat([conversation, conversation], greedy(max_tokens=1), use_tqdm=False)
    assert [result.prompt for result in two] == [one[0].prompt] * 2
    assert one[0].prompt is not None and "<|im_start|>user\nhi<|im_end|>" in one[0].prompt


def test_chat_describes_tools_to_the_model_as_the_server_does(folder: Path, sim: Callable[..., SimExecutor]) -> None:
    sim()
    function = {"name": "lookup", "description": "Finds a word.", "parameters": {"type": "object", "properties": {}}}
    with LLM("pocket") as llm:
        tools = [{"type": "function", "function": {**function, "strict": None}}]
        conversation = [{"role": "user", "content": "hi"}]
        (result,) = llm.chat(conversation, greedy(max_tokens=1), use_tqdm=False, tools=tools)
        assert result.prompt is not None and '"name": "lookup"' in result.prompt and "strict" not in result.prompt
        plain = llm.render_chat(conversation)
        assert llm.render_chat(conversation, tools=[]) == llm.render_chat(conversation, tools=None) == plain


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"type": "function"}, "must be a list"),
        (["lookup"], "must be an object"),
        ([{"type": "retrieval"}], "only tools of type 'function'"),
        ([{"type": "function", "function": {"name": "a b"}}], "name"),
        ([{"type": "function", "function": {"name": "a", "parameters": {1, 2}}}], "tools"),
    ],
)
def test_chat_refuses_bad_tools_by_name(sim: Callable[..., SimExecutor], tools: Any, message: str) -> None:
    sim()
    with LLM("pocket") as llm, pytest.raises(InvalidRequestError, match=message):
        llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False, tools=tools)


def test_chat_refuses_tools_that_the_template_does_not_know(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "a"}}]
    llm._template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match="does not know tools"):
        llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False, tools=tools)


def test_a_stream_adds_up_to_the_whole_and_leaving_it_early_frees_the_row(llm: LLM) -> None:
    params = greedy(max_tokens=40)
    whole = llm.generate("añb漢🚣", params, use_tqdm=False)[0].outputs[0]
    pieces = list(llm.stream("añb漢🚣", params))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert "\ufffd" not in whole.text
    assert [token_id for piece in pieces for token_id in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces][-1] == "length"
    stream = llm.stream("abc", params)
    next(stream)
    stream.close()
    llm._engine.assert_idle()


def test_a_failing_rank_ends_the_call_with_its_error(folder: Path, sim: Callable[..., SimExecutor]) -> None:
    executor = sim(fail_collect_seq=2)
    with LLM(str(folder)) as llm:
        with pytest.raises(EngineDeadError, match="rank 1 died in step 2"):
            llm.generate("abc", greedy(max_tokens=9), use_tqdm=False)
        with pytest.raises(EngineDeadError):
            llm.generate("abc", greedy(max_tokens=9), use_tqdm=False)
    assert executor.is_shut_down


def test_a_closed_llm_says_so(folder: Path, sim: Callable[..., SimExecutor]) -> None:
    executor = sim()
    llm = LLM(str(folder))
    llm.close()
    llm.close()
    assert executor.is_shut_down
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("abc", use_tqdm=False)


def test_a_model_without_tokenizer_takes_and_gives_ids(
    checkpoint: Callable[..., Path], sim: Callable[..., SimExecutor]
) -> None:
    sim()
    bare = checkpoint(hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=16, tokenizer=False)
    with LLM(str(bare)) as llm:
        output = llm.generate([5, 6, 7], greedy(max_tokens=3, logprobs=0), use_tqdm=False)[0].outputs[0]
        assert (output.text, output.token_ids) == ("", [5, 6, 7])
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            llm.generate("text", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="stop strings need a tokenizer"):
            llm.generate([5], greedy(stop=["x"]), use_tqdm=False)


def test_the_progress_bar_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["abc", "abd"], greedy(max_tokens=2))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


def test_a_missing_folder_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no-such-folder"):
        LLM("no-such-folder")
