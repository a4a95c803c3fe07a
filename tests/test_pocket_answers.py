"""Right by meaning: the pocket model in every way of running, against each other, transformers and the truth.

A wrong mask, the state of another request or a chunk that is cut badly gives wrong answers, whatever logits look like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from bireme import LLM, SamplingParams
from bireme.checkpoint.hf_config import load_model_config
from bireme.local_server import running_server
from bireme.pocket import NAME, model_path
from bireme.pocket.evaluate import Answer, agrees, ask_all, rows_of, tokens_by_transformers
from bireme.pocket.skills import SKILLS, Case, generate

SEED = 0
PER_SKILL = 2
DISTANCES = (100, 500, 1500)
AT_ONCE = 16
WAYS = [(tp, budget) for tp in (1, 2) for budget in (64, 512)]
AT_LEAST = 0.95
"""Share of right answers; the model itself misses about one case in two hundred."""


def some_cases() -> list[Case]:
    streams = [generate(skill, "eval", SEED) for skill in SKILLS if skill != "recall"]
    cases = [next(stream) for stream in streams for _ in range(PER_SKILL)]
    return cases + [next(generate("recall", "eval", SEED, distance)) for distance in DISTANCES]


CASES = some_cases()


def answers_of(llm: LLM, cases: list[Case]) -> list[Answer]:
    """All at once, greedily."""
    prompts = [llm.render_chat(case.messages, tools=case.tools, enable_thinking=case.enable_thinking) for case in cases]
    params = [SamplingParams(temperature=0, max_tokens=case.max_tokens) for case in cases]
    answers = []
    for case, result in zip(cases, llm.generate(prompts, params, use_tqdm=False), strict=True):
        output = result.outputs[0]
        answers.append(
            Answer(
                case,
                content=output.text,
                prompt_token_ids=result.prompt_token_ids,
                token_ids=output.token_ids,
                finish_reason=output.finish_reason,
            )
        )
    return answers


@pytest.fixture(scope="module")
def reference() -> list[Answer]:
    """One rank, every prompt in one piece, one request after another."""
    with LLM(NAME, device="cpu", dtype="float32", max_num_seqs=1, max_num_batched_tokens=2048) as llm:
        return [answers_of(llm, [case])[0] for case in CASES]


@pytest.fixture(scope="module", params=WAYS, ids=[f"tp{tp}-chunks-of-{budget}" for tp, budget in WAYS])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    tp, budget = request.param
    with LLM(
        NAME,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=tp,
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=budget,
    ) as running:
        yield running


def assert_same(answers: list[Answer], reference: list[Answer]) -> None:
    differing = [
        (mine.case.group, mine.content, theirs.content)
        for mine, theirs in zip(answers, reference, strict=True)
        if (mine.token_ids, mine.finish_reason) != (theirs.token_ids, theirs.finish_reason)
    ]
    assert differing == []


def test_the_answers_are_right(reference: list[Answer]) -> None:
    wrong = [(answer.case.group, answer.case.expected, answer.content) for answer in reference if not answer.is_right]
    assert len(wrong) <= (1 - AT_LEAST) * len(reference), wrong


def test_answers_alone_are_the_same_on_any_number_of_ranks_and_in_chunks_of_any_size(
    llm: LLM, reference: list[Answer]
) -> None:
    assert_same([answers_of(llm, [case])[0] for case in CASES], reference)


def test_answers_are_the_same_among_sixteen_at_once(llm: LLM, reference: list[Answer]) -> None:
    assert_same(answers_of(llm, CASES), reference)


def test_the_server_gives_the_same_answers_with_thoughts_and_tool_calls_apart(
    reference: list[Answer], tmp_path: Path
) -> None:
    flags = ("--tp", "2", "--device", "cpu", "--dtype", "float32", "--max-num-batched-tokens", "128")
    with (
        (tmp_path / "log").open("wb") as log,
        running_server(NAME, *flags, log=log) as server,
    ):
        whole = asyncio.run(ask_all(server.url, NAME, CASES, concurrency=AT_ONCE))
        streamed = asyncio.run(ask_all(server.url, NAME, CASES, concurrency=AT_ONCE, stream=True))
    for answers in (whole, streamed):
        assert [answer.error for answer in answers] == [None] * len(CASES)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in reference]
        assert [answer.is_right for answer in answers] == [answer.is_right for answer in reference]
        assert not any("<" in answer.content for answer in answers if answer.case.skill != "copy")
        assert all(answer.tool_calls for answer in answers if answer.case.skill == "tool_call" and answer.is_right)
        assert rows_of(answers)[-1].tokens == sum(len(answer.token_ids) for answer in reference)
    assert [answer.prompt_token_ids for answer in whole] == [answer.prompt_token_ids for answer in reference]


def test_transformers_generates_the_same_tokens_from_the_same_messages(reference: list[Answer]) -> None:
    chosen = [answer for answer in reference if len(answer.prompt_token_ids) < 700][::2]
    assert len(chosen) >= 10
    theirs = tokens_by_transformers(model_path(), [answer.case for answer in chosen])
    end_ids = frozenset(load_model_config(model_path()).eos_token_ids)
    differing = [
        answer.case.group
        for answer, (prompt_ids, token_ids) in zip(chosen, theirs, strict=True)
        if not agrees(answer, prompt_ids, token_ids, end_ids)
    ]
    assert differing == []
