"""Tools on the embedded model, as ``bireme serve`` serves it and the official client asks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from bireme.demo import running_server
from bireme.pocket import MODEL_DIR
from bireme.pocket.skills import Case, eval_cases

NUM_CASES = 4
NUM_RIGHT = 3
"""The model is small; the engine's part is that what it writes right arrives right."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    log = Path(tmp_path_factory.mktemp("pocket") / "server.log")
    flags = ("--dtype", "float32", "--served-model-name", "pocket")
    with (
        log.open("wb") as out,
        running_server(MODEL_DIR, *flags, log=out) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as official,
    ):
        yield official


def request(case: Case) -> dict[str, Any]:
    return {
        "model": "pocket",
        "messages": _with_ids(case.messages),
        "tools": case.tools,
        "max_tokens": case.max_tokens,
        "temperature": 0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": case.enable_thinking}},
    }


def _with_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases' short form of calls and results, as OpenAI writes it."""
    full = []
    for message in messages:
        if message["role"] == "tool":
            message = message | {"tool_call_id": "call_0"}
        elif "tool_calls" in message:
            function = message["tool_calls"][0]["function"]
            function = function | {"arguments": json.dumps(function["arguments"])}
            message = message | {"tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
        full.append(message)
    return full


def ask(client: openai.OpenAI, case: Case) -> tuple[str, list[dict[str, Any]], str]:
    """The answer, which must be the same streamed: content, calls, finish reason."""
    choice = client.chat.completions.create(**request(case)).choices[0]
    calls = [call.to_dict() for call in choice.message.tool_calls or []]
    content, reason = "", None
    parts: list[dict[str, Any]] = []
    for chunk in client.chat.completions.create(**request(case), stream=True):
        content += chunk.choices[0].delta.content or ""
        parts += [part.to_dict() for part in chunk.choices[0].delta.tool_calls or []]
        reason = chunk.choices[0].finish_reason or reason
    assert content == (choice.message.content or "")
    assert [part["function"] for part in parts] == [call["function"] for call in calls]
    assert reason == choice.finish_reason
    return content, calls, choice.finish_reason


def test_the_embedded_model_calls_tools_and_tells_their_results(client: openai.OpenAI) -> None:
    cases = eval_cases(NUM_CASES, skills=["tool_call", "tool_answer"])
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: ask(client, case), cases))
    right: Counter[str] = Counter()
    for case, (content, calls, reason) in zip(cases, answers, strict=True):
        if case.check(content, calls):
            right[case.skill] += 1
            assert reason == ("tool_calls" if case.kind == "tool" else "stop")
    assert min(right["tool_call"], right["tool_answer"]) >= NUM_RIGHT, right


def test_a_call_its_result_and_the_answer_make_a_round_trip(client: openai.OpenAI) -> None:
    case = next(case for case in eval_cases(10, skills=["tool_call"]) if case.calls[0]["name"] == "get_weather")
    body = request(case)
    message = client.chat.completions.create(**body).choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny"}'}
    body["messages"] = [*body["messages"], message, result]
    answer = client.chat.completions.create(**body).choices[0]
    assert answer.finish_reason == "stop"
    assert "sunny" in (answer.message.content or "")
