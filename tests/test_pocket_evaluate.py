"""``bireme eval pocket`` without a model: bounds, figures, wire forms; and how the word pocket finds the model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from bireme.checkpoint.headers import verify_checkpoint
from bireme.checkpoint.hf_config import load_model_config
from bireme.cli import app
from bireme.cli.generate import model_and_prompt
from bireme.cli.options import POCKET
from bireme.errors import ConfigError
from bireme.pocket import NAME, evaluate, model_path, resolve
from bireme.pocket.evaluate import Answer, Row, agrees, openai_messages, read_requirements, rows_of, shortfalls
from bireme.pocket.skills import RECALL_DISTANCES, SKILLS, Case, eval_cases, generate

PARIS = Case("facts", [{"role": "user", "content": "Capital of France?"}], "Paris", group="facts")


def test_the_word_pocket_is_the_shipped_checkpoint_and_nothing_else_is() -> None:
    assert NAME == POCKET
    assert resolve("pocket") == str(model_path())
    assert resolve("./pocket") == "./pocket"
    verify_checkpoint(str(model_path()), load_model_config(model_path()))


def test_the_shipped_files_are_two_shards_below_16_mb_and_are_kept_by_git() -> None:
    shards = sorted(model_path().glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert all(path.stat().st_size < 16e6 for path in shards)
    # The wheel holds what git does not ignore.
    ignored = subprocess.run(["git", "check-ignore", *map(str, model_path().iterdir())], capture_output=True, text=True)
    assert ignored.stdout == ""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (None, None, ("pocket", None)),
        ("What is 1 + 2?", None, ("pocket", "What is 1 + 2?")),
        ("-", None, ("pocket", "-")),
        ("pocket", None, ("pocket", None)),
        ("pocket", "Hello", ("pocket", "Hello")),
        ("./no-such-folder", None, ("./no-such-folder", None)),
        ("no-such-folder", "Hello", ("no-such-folder", "Hello")),
        (str(Path(__file__).parent), None, (str(Path(__file__).parent), None)),
    ],
)
def test_one_argument_of_generate_is_a_prompt_unless_it_names_a_model(
    first: str | None, second: str | None, expected: tuple[str, str | None]
) -> None:
    assert model_and_prompt(first, second) == expected


def test_generate_without_a_model_answers_the_question_and_keeps_the_thought_apart() -> None:
    command = [sys.executable, "-m", "bireme", "generate", "What is the capital of France?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "Paris\n"), done.stderr
    assert "France" in done.stderr


def test_cases_are_as_many_as_asked_for_each_skill_and_distance_and_all_different() -> None:
    cases = eval_cases(per_skill=2, seed=3)
    expected = [skill for skill in SKILLS if skill != "recall"]
    expected += [f"recall@{distance}" for distance in RECALL_DISTANCES]
    assert sorted(case.group for case in cases) == sorted(expected * 2)
    assert len({repr(case.messages) for case in cases}) == len(cases)


def answer(is_right: bool, group: str = "facts", seconds: float = 1.0) -> Answer:
    case = Case("facts", PARIS.messages, "Paris", group=group)
    content = "Paris" if is_right else "Rome"
    return Answer(case, content=content, num_tokens=2, finish_reason="stop", seconds=seconds)


def test_rows_count_right_answers_and_tokens_by_group_and_over_all() -> None:
    rows = rows_of([answer(True), answer(False, seconds=3.0), answer(True, "recall@100")])
    assert rows == [Row("facts", 2, 1, 4, 2.0), Row("recall@100", 1, 1, 2, 1.0), Row("overall", 3, 2, 6, 5 / 3)]


def test_an_answer_that_was_cut_or_refused_is_wrong_whatever_it_holds() -> None:
    assert answer(True).is_right
    cut = answer(True)
    cut.finish_reason = "length"
    refused = answer(True)
    refused.error = "the server answered 400"
    assert not cut.is_right and not refused.is_right


def test_bounds_apply_to_overall_each_group_a_skill_or_one_distance() -> None:
    rows = [Row("facts", 10, 9, 0, 0), Row("recall@100", 10, 9, 0, 0), Row("overall", 20, 18, 0, 0)]

    def short(*entries: str, agreement: float | None = None) -> list[str]:
        return [sentence.split()[0] for sentence in shortfalls(rows, read_requirements(entries), agreement)]

    assert short() == []
    assert short("each=90", "overall=90") == []
    assert short("each=91") == ["facts", "recall@100"]
    assert short("recall=95", "each=50") == ["recall@100"]
    assert short("recall@100=95") == ["recall@100"]
    assert short("recall@6000=95") == []
    assert short("overall=95") == ["overall"]
    assert short("agreement=99.5") == short("agreement=99.5", agreement=99.4) == ["agreement"]
    assert short("agreement=99.5", agreement=99.5) == []


@pytest.mark.parametrize("entry", ["facts", "facts=", "facts=101", "facts=-1", "facts=nan", "fact=90", "=90"])
def test_a_malformed_bound_is_refused_by_its_text(entry: str) -> None:
    with pytest.raises(ConfigError, match=f"--require {re.escape(entry)}: "):
        read_requirements([entry])


def test_an_unknown_skill_and_a_server_that_is_not_there_are_one_line_and_exit_code_2() -> None:
    for args, word in ((["--skill", "sailing"], "sailing"), (["--url", "http://127.0.0.1:9"], "127.0.0.1:9")):
        done = CliRunner().invoke(app, ["eval", "pocket", "--cases", "1", *args])
        assert done.exit_code == 2
        assert done.output.startswith("bireme: error: ") and word in done.output and done.output.count("\n") == 1


def test_tool_turns_are_sent_with_ids_and_arguments_as_json_text() -> None:
    case = next(generate("tool_answer", "eval", 0))
    sent = openai_messages(case.messages)
    assert [message["role"] for message in sent] == [message["role"] for message in case.messages]
    called, response = sent[-2:]
    original = case.messages[-2]["tool_calls"][0]["function"]
    call = called["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == original["arguments"]
    assert response["tool_call_id"] == call["id"]
    assert isinstance(case.messages[-2]["tool_calls"][0]["function"]["arguments"], dict), "the case is left as it was"


def test_agreement_is_of_prompt_and_output_tokens_but_for_the_end_token() -> None:
    mine = Answer(PARIS, prompt_token_ids=[1, 2], token_ids=[5, 6])
    end_ids = frozenset({9, 8})
    assert agrees(mine, [1, 2], [5, 6, 9], end_ids)
    assert not agrees(mine, [1, 3], [5, 6, 9], end_ids)
    assert not agrees(mine, [1, 2], [5, 7, 9], end_ids)
    assert not agrees(mine, [1, 2], [5], end_ids)


def chat_response(request: httpx.Request) -> httpx.Response:
    """A server's answer, whole or streamed."""
    body = json.loads(request.content)
    usage = {"prompt_tokens": 1, "completion_tokens": 3}
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    if not body.get("stream"):
        message = {"content": "Paris", "reasoning_content": "hm", "tool_calls": [call]}
        choice = {"message": message, "finish_reason": "stop", "token_ids": [5, 6, 9]}
        return httpx.Response(200, json={"choices": [choice], "usage": usage, "prompt_token_ids": [1]})
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "reasoning_content": "h"},
        {"reasoning_content": "m", "content": "Pa"},
        {"content": "ris", "tool_calls": [call]},
    ]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"delta": delta, "finish_reason": None, "token_ids": [token_id]}]}
        for delta, token_id in zip(deltas, (5, 6, 9), strict=True)
    ]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": usage})
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(200, text="".join([*events, "data: [DONE]\n\n"]))


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer_and_a_stream_of_it_are_read_alike(stream: bool) -> None:
    async def one() -> Answer:
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(chat_response)) as client:
            return await evaluate.ask(client, "pocket", Answer(PARIS), stream=stream)

    came = asyncio.run(one())
    assert came.error is None
    assert (came.thought, came.content, came.finish_reason) == ("hm", "Paris", "stop")
    assert [call["function"] for call in came.tool_calls] == [{"name": "f", "arguments": '{"x": 1}'}]
    assert (came.token_ids, came.num_prompt_tokens, came.num_tokens) == ([5, 6, 9], 1, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_an_answer_with_its_reason(stream: bool) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "no such field"}})

    async def one() -> Answer:
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(refuse)) as client:
            return await evaluate.ask(client, "pocket", Answer(PARIS), stream=stream)

    came = asyncio.run(one())
    assert came.error is not None and "400" in came.error and "no such field" in came.error
    assert not came.is_right


def test_the_kept_lm_eval_data_is_what_the_skills_and_the_template_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Path(__file__).parents[1] / "pocket" / "lm_eval"
    spec = importlib.util.spec_from_file_location("make_data", kept / "make_data.py")
    assert spec is not None and spec.loader is not None
    make_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_data)
    monkeypatch.setattr(make_data, "FOLDER", tmp_path)
    make_data.main()
    for name in ("answers.jsonl", "facts.jsonl"):
        assert (tmp_path / name).read_bytes() == (kept / name).read_bytes(), "run python pocket/lm_eval/make_data.py"
