"""Right by meaning: the pocket model in every way of running, against each other, transformers and the truth.

A wrong mask, the state of another request or a chunk that is cut badly gives wrong answers, whatever logits look like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from bireme import LLM, SamplingParams
from bireme.checkpoint.hf_config import load_model_config
from bireme.local_server import running_server
from bireme.pocket import NAME, model_path
from bireme.pocket.evaluate import Answer, agrees, ask_all, openai_messages, rows_of, tokens_by_transformers
from bireme.pocket.skills import SKILLS, Case, generate
from bireme.server.chat import ChatTemplate
from bireme.server.tokenizer import Tokenizer

SEED = 0
LONG_ANSWERS = {"arithmetic", "ordering", "words", "json"}
DISTANCES = (100, 500, 1500)
AT_ONCE = 16
WAYS = [(tp, budget) for tp in (1, 2) for budget in (64, 512)]
AT_LEAST = 0.95
"""Share of right answers; the model itself misses about one case in three hundred."""


def some_cases() -> list[Case]:
    """Two of each skill (one where answers are long), and recall at three distances."""
    cases = []
    for skill in SKILLS:
        if skill != "recall":
            stream = generate(skill, "eval", SEED)
            cases += [next(stream) for _ in range(1 if skill in LONG_ANSWERS else 2)]
    return cases + [next(generate("recall", "eval", SEED, distance)) for distance in DISTANCES]


CASES = some_cases()


def answers_of(llm: LLM, cases: list[Case]) -> list[Answer]:
    """All at once, greedily."""
    prompts = [
        llm.render_chat(openai_messages(case.messages), tools=case.tools, enable_thinking=case.enable_thinking)
        for case in cases
    ]
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


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server on two ranks."""
    flags = ("--tp", "2", "--device", "cpu", "--dtype", "float32", "--max-num-batched-tokens", "128")
    with (
        (tmp_path_factory.mktemp("server") / "log").open("wb") as log,
        running_server(NAME, *flags, log=log) as server,
    ):
        yield server.url


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_server_gives_the_same_answers_with_thoughts_and_tool_calls_apart(
    url: str, reference: list[Answer], stream: bool
) -> None:
    answers = asyncio.run(ask_all(url, NAME, CASES, concurrency=AT_ONCE, stream=stream))
    assert [answer.error for answer in answers] == [None] * len(CASES)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in reference]
    assert [answer.is_right for answer in answers] == [answer.is_right for answer in reference]
    assert not any("</think>" in answer.content or "<tool_call>" in answer.content for answer in answers)
    assert all(answer.tool_calls for answer in answers if answer.case.skill == "tool_call" and answer.is_right)
    assert rows_of(answers)[-1].tokens == sum(len(answer.token_ids) for answer in reference)
    if not stream:
        assert [answer.prompt_token_ids for answer in answers] == [answer.prompt_token_ids for answer in reference]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_a_prompt_as_transformers_does_and_also_where_an_end_token_follows(
    url: str, max_tokens: int
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_folder(model_path())
    message = {"role": "user", "content": "What is the capital of France?"}
    question = ChatTemplate.of(tokenizer).render([message], enable_thinking=False)
    prompts = [tokenizer.encode(question + answer) for answer in ("Paris", "Paris<|im_end|>", "Rome", "🦊é")]
    # As lm-eval asks for the likelihood of a continuation.
    body = {"model": NAME, "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
    choices = httpx.post(f"{url}/v1/completions", json=body, timeout=60, verify=False).json()["choices"]
    oracle = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    for prompt, choice in zip(prompts, choices, strict=True):
        with torch.inference_mode():
            logprobs = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = [logprobs[i, token_id].item() for i, token_id in enumerate(prompt[1:])]
        given = choice["logprobs"]["token_logprobs"]
        assert len(given) == len(choice["logprobs"]["top_logprobs"]) == len(prompt) + max_tokens
        assert given[0] is None
        assert given[1 : len(prompt)] == pytest.approx(expected, abs=1e-3)
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1 : len(prompt)]]
        assert best == pytest.approx(logprobs[:-1].max(-1).values.tolist(), abs=1e-3)
    assert [choice["finish_reason"] for choice in choices] == [
        "length" if max_tokens == 0 or prompt[-1] == prompts[1][-1] else "stop" for prompt in prompts
    ]


def test_transformers_generates_the_same_tokens_from_the_same_messages(reference: list[Answer]) -> None:
    chosen = [answer for answer in reference if len(answer.prompt_token_ids) < 700][::2]
    assert len(chosen) >= 8
    theirs = tokens_by_transformers(model_path(), [answer.case for answer in chosen])
    end_ids = frozenset(load_model_config(model_path()).eos_token_ids)
    differing = [
        answer.case.group
        for answer, (prompt_ids, token_ids) in zip(chosen, theirs, strict=True)
        if not agrees(answer, prompt_ids, token_ids, end_ids)
    ]
    assert differing == []
