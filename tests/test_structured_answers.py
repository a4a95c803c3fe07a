"""Forms of answers on the embedded model, through the offline API: what comes out, alone and in company."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from bireme import LLM, SamplingParams, StructuredOutputsParams
from bireme.errors import InvalidRequestError
from bireme.sampling.grammar import GrammarMask, SlotGrammars

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "points": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["red", "green", None]},
    },
    "required": ["name", "points", "kind"],
    "additionalProperties": False,
}
NO_THOUGHT = {"enable_thinking": False}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("pocket", dtype="float32", max_num_seqs=32) as made:
        yield made


@pytest.fixture(scope="module")
def suite() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "bench" / "schemas.py"
    spec = importlib.util.spec_from_file_location("bench_schemas", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def params(form: dict[str, Any] | None = None, **others: Any) -> SamplingParams:
    wanted = None if form is None else StructuredOutputsParams(**form)
    return SamplingParams(**{"max_tokens": 160, "temperature": 0.0} | others, structured_outputs=wanted)


def num_rows(llm: LLM) -> int:
    return llm._engine.executor._runner.sampler.grammars.num_rows  # type: ignore[attr-defined]


def test_every_schema_of_the_suite_is_refused_with_a_reason_or_gives_valid_json(llm: LLM, suite: ModuleType) -> None:
    schemas = suite.read_suite(suite.SUITE)
    forms, reasons = suite.prepare(llm, schemas)
    assert len(schemas) == 438
    assert all("structured_outputs " in reason and len(reason) > 40 for reason in reasons)
    jobs = [(each, form) for each, form in zip(schemas, forms, strict=True) if form is not None]
    assert len(jobs) > 180
    results = llm.chat(
        [suite.PROMPT] * len(jobs),
        [
            SamplingParams(temperature=1.0, seed=number, max_tokens=96, structured_outputs=form)
            for number, (_, form) in enumerate(jobs)
        ],
        use_tqdm=False,
        chat_template_kwargs=NO_THOUGHT,
    )
    complete = [
        (each["schema"], result.outputs[0].text)
        for (each, _), result in zip(jobs, results, strict=True)
        if result.outputs[0].finish_reason == "stop"
    ]
    verdicts = [suite.why_invalid(text, schema) for schema, text in complete]
    unchecked = [reason for reason in verdicts if reason is not None and reason.startswith(suite.UNCHECKED)]
    assert [reason for reason in verdicts if reason is not None and reason not in unchecked] == []
    assert len(unchecked) <= 2
    assert len(complete) > 0.8 * len(jobs)
    assert num_rows(llm) == 0


@pytest.mark.parametrize("thinking", [True, False])
def test_each_form_is_followed_after_the_thought_and_without_one(llm: LLM, thinking: bool) -> None:
    forms: list[tuple[dict[str, Any], Any]] = [
        ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
        ({"regex": r"[A-Z][a-z]{2,8} \d"}, lambda text: re.fullmatch(r"[A-Z][a-z]{2,8} \d", text)),
        ({"choice": ["Paris", "Rome, of course"]}, lambda text: text in ("Paris", "Rome, of course")),
        ({"grammar": 'root ::= "<" [a-z] [a-z]? ">" | "no"'}, lambda text: re.fullmatch("<[a-z]{1,2}>|no", text)),
    ]
    results = llm.chat(
        [QUESTION] * len(forms),
        [params(form, temperature=1.0, seed=5) for form, _ in forms],
        use_tqdm=False,
        chat_template_kwargs={} if thinking else NO_THOUGHT,
    )
    for (form, is_right), result in zip(forms, results, strict=True):
        answer = result.outputs[0]
        thought, found, content = answer.text.rpartition("</think>")
        assert answer.finish_reason == "stop"
        assert bool(found) is thinking and bool(thought.strip()) is thinking
        if thinking:
            assert re.match("\n{0,2}[^\n]", content)
        assert is_right(content.strip("\n")), (form, answer.text)


def test_the_thought_is_the_one_of_a_free_answer(llm: LLM) -> None:
    free, bound = llm.chat([QUESTION] * 2, [params(), params({"choice": ["Rome", "Oslo"]})], use_tqdm=False)
    thought = free.outputs[0].text.partition("</think>")[0]
    assert bound.outputs[0].text.partition("</think>")[0] == thought and thought.strip()


MIXED = [None, {"json": SCHEMA}, None, {"regex": "[a-z]{5,30}"}, None, {"json_object": True}, None]


def mixed(llm: LLM, forms: list[dict[str, Any] | None]) -> list[list[int]]:
    sampling: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 4, "top_p": 0.9},
        {"temperature": 0.8, "seed": 5, "top_k": 20, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 6, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 7, "min_tokens": 12},
        {"temperature": 0.0, "logprobs": 2, "min_tokens": 20},
    ]
    chosen = [params(form, max_tokens=40, **each) for form, each in zip(MIXED, sampling, strict=True) if form in forms]
    results = llm.chat([QUESTION] * len(chosen), chosen, use_tqdm=False, chat_template_kwargs=NO_THOUGHT)
    return [result.outputs[0].token_ids for result in results]


def test_free_rows_draw_the_same_tokens_with_and_without_bound_neighbours(llm: LLM) -> None:
    together = mixed(llm, MIXED)
    alone = mixed(llm, [None])
    assert [together[index] for index, form in enumerate(MIXED) if form is None] == alone
    for index, form in enumerate(MIXED):
        if form is not None:
            assert mixed(llm, [form]) == [together[index]]


def test_two_ranks_give_the_tokens_of_one(llm: LLM) -> None:
    with LLM("pocket", dtype="float32", tensor_parallel_size=2, max_num_seqs=8, distributed_backend="gloo") as two:
        assert mixed(two, MIXED) == mixed(llm, MIXED)


def test_n_answers_of_one_form_differ_and_all_have_it(llm: LLM) -> None:
    result = llm.chat(QUESTION, params({"regex": "[a-z]{8}"}, n=6, temperature=1.0, seed=1), use_tqdm=False)[0]
    contents = [output.text.rpartition("</think>")[2].strip() for output in result.outputs]
    assert all(re.fullmatch("[a-z]{8}", content) for content in contents)
    assert len(set(contents)) > 1


def test_min_tokens_and_stop_strings_and_length_bound_an_answer_with_a_form(llm: LLM) -> None:
    form = {"regex": "[a-z ]+"}
    results = llm.chat(
        [QUESTION] * 4,
        [
            params(form, min_tokens=25, max_tokens=30),
            params(form, stop=["a"]),
            params({"json": SCHEMA}, max_tokens=4),
            params({"choice": ["Paris"]}, min_tokens=30, max_tokens=40),
        ],
        use_tqdm=False,
        chat_template_kwargs=NO_THOUGHT,
    )
    long, stopped, cut, ended = (result.outputs[0] for result in results)
    assert len(long.token_ids) >= 25 and re.fullmatch("[a-z ]+", long.text)
    assert stopped.finish_reason == "stop" and stopped.stop_reason == "a" and "a" not in stopped.text
    assert cut.finish_reason == "length" and len(cut.token_ids) == 4
    assert ended.text == "Paris" and ended.finish_reason == "stop"  # nothing else was left to say
    assert num_rows(llm) == 0


def test_a_stream_that_is_left_lets_go_of_its_form(llm: LLM) -> None:
    stream = llm.stream(QUESTION, params({"regex": "[a-z]+"}, max_tokens=500))
    next(stream)
    assert num_rows(llm) == 1
    stream.close()  # type: ignore[attr-defined]
    assert num_rows(llm) == 0
    assert not llm._engine._prepared


def test_a_form_that_cannot_be_followed_stops_the_call_before_anything_runs(llm: LLM) -> None:
    steps = llm._engine.stats().num_steps
    with pytest.raises(InvalidRequestError, match=r'conversation|prompt 1: .*#/not: .*|prompt 1: .*"not"') as caught:
        llm.chat([QUESTION] * 2, [params(), params({"json": {"not": {}}})], use_tqdm=False)
    assert caught.value.param == "structured_outputs"
    assert llm._engine.stats().num_steps == steps


def test_a_form_that_runs_into_a_limit_ends_with_an_error_and_the_others_go_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: SlotGrammars, slots: list[int]) -> GrammarMask | None:
        mask = finish(self, slots)
        for slot, row in self._rows.items():
            if row.num_outputs == 3 and row.min_tokens == 2:
                self._fail(slot, row, "a limit was reached")
        return mask

    finish = SlotGrammars.finish
    monkeypatch.setattr(SlotGrammars, "finish", fails)
    failing = params({"regex": "[a-z]+"}, min_tokens=2)
    with pytest.raises(InvalidRequestError, match="a limit was reached"):
        llm.chat(QUESTION, failing, use_tqdm=False, chat_template_kwargs=NO_THOUGHT)
    fine = llm.chat(QUESTION, params({"regex": "[a-z]{4}"}), use_tqdm=False, chat_template_kwargs=NO_THOUGHT)
    assert re.fullmatch("[a-z]{4}", fine[0].outputs[0].text)
    assert num_rows(llm) == 0


def test_a_checkpoint_without_a_tokenizer_refuses_forms_and_serves_the_rest(checkpoint: Any) -> None:
    folder = checkpoint(tokenizer=False, hidden_size=64, intermediate_size=64, num_hidden_layers=4, head_dim=32)
    with LLM(str(folder), dtype="float32") as bare:
        with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json"):
            bare.generate([[1, 2]], params({"regex": "a"}), use_tqdm=False)
        assert bare.generate([[1, 2]], params(max_tokens=3), use_tqdm=False)[0].outputs[0].finish_reason == "length"
