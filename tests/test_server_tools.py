"""Tool calls over HTTP on the simulated engine, with the official client; and answers put together by hand."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_support import RunningServer, build_tokenizer, load_tokenizer, running_server

from bireme.config import GenerationDefaults
from bireme.errors import ConfigError
from bireme.server.answers import ChatAnswer
from bireme.server.chat import ChatTemplate
from bireme.server.messages import read_messages
from bireme.server.params import ChatCall, parse_chat
from bireme.server.tokenizer import Tokenizer
from bireme.types import FinishReason, RequestOutput, TokenLogprobs

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}, "deep": {"type": "boolean"}},
                "required": ["word"],
            },
        },
    },
    {"type": "function", "function": {"name": "ping", "description": None, "parameters": None}},
]
LOOK_UP = (
    "<tool_call>\n<function=look_up>\n<parameter=word>\nship 🚢\n</parameter>\n<parameter=limit>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
LOOK_UP_CALL = ("look_up", '{"word": "ship 🚢", "limit": 3}')
PING = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
PING_CALL = ("ping", "{}")

THINKING, NOT_THINKING = ({"chat_template_kwargs": {"enable_thinking": on}} for on in (True, False))


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": f"<|say|>{text}<|said|>"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    build_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder, folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as official:
        yield official


Answered = tuple[str | None, str | None, list[tuple[str, str]], str | None]
"""Content, thought, calls, finish reason."""


def whole(client: openai.OpenAI, text: str, extra: dict[str, Any] = NOT_THINKING, **options: Any) -> Answered:
    """An answer that is not streamed."""
    done = client.chat.completions.create(
        model="tiny", messages=asked(text), extra_body=extra, **({"tools": TOOLS} | options)
    )
    choice = done.choices[0]
    calls = choice.message.tool_calls or []
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    thought = getattr(choice.message, "reasoning_content", None)
    named = [(call.function.name, call.function.arguments) for call in calls]  # type: ignore[union-attr]
    return choice.message.content, thought, named, choice.finish_reason


def streamed(client: openai.OpenAI, text: str, extra: dict[str, Any] = NOT_THINKING, **options: Any) -> Answered:
    """The same, put together from a stream as the official examples do it."""
    content: str | None = None
    thought: str | None = None
    calls: dict[int, list[str]] = {}
    reasons: list[str] = []
    for chunk in client.chat.completions.create(
        model="tiny", messages=asked(text), extra_body=extra, stream=True, **({"tools": TOOLS} | options)
    ):
        delta = chunk.choices[0].delta
        if delta.content is not None:
            content = (content or "") + delta.content
        if getattr(delta, "reasoning_content", None):
            thought = (thought or "") + delta.reasoning_content  # type: ignore[attr-defined]
        for part in delta.tool_calls or []:
            assert part.function is not None
            if part.index not in calls:
                assert part.type == "function"
                assert (part.id or "").startswith("call_")
                calls[part.index] = [part.function.name or "", ""]
            calls[part.index][1] += part.function.arguments or ""
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert len(reasons) == 1
    assert list(calls) == list(range(len(calls)))
    return content, thought, [(name, arguments) for name, arguments in calls.values()], reasons[0]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (LOOK_UP, (None, None, [LOOK_UP_CALL], "tool_calls")),
        (f"I look.\n\n{LOOK_UP}", ("I look.", None, [LOOK_UP_CALL], "tool_calls")),
        (f"{PING}\n{LOOK_UP}\n{PING}", (None, None, [PING_CALL, LOOK_UP_CALL, PING_CALL], "tool_calls")),
        ("Write <tool_call> for a call.", ("Write <tool_call> for a call.", None, [], "stop")),
        ("No call here.\n", ("No call here.\n", None, [], "stop")),
    ],
)
def test_calls_come_apart_from_content_streamed_or_not(client: openai.OpenAI, text: str, want: Answered) -> None:
    assert whole(client, text) == want
    assert streamed(client, text) == want
    content, _, calls, reason = want
    thinking = (content, "hm", calls, reason)
    assert whole(client, f"hm\n</think>\n\n{text}", THINKING) == thinking
    assert streamed(client, f"hm\n</think>\n\n{text}", THINKING) == thinking


def test_a_call_in_a_thought_is_a_thought(client: openai.OpenAI) -> None:
    want: Answered = ("no", f"{PING} or not?", [], "stop")
    assert whole(client, f"{PING} or not?</think>no", THINKING) == want
    assert streamed(client, f"{PING} or not?</think>no", THINKING) == want


def test_an_answer_cut_anywhere_is_the_same_streamed_or_not_and_has_no_half_call(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    text = f"hm</think>Look:\n\n{LOOK_UP}\n{PING}"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    counts = []
    for limit in range(1, len(token_ids) + 2):
        got = whole(client, text, THINKING, max_tokens=limit)
        joined = streamed(client, text, THINKING, max_tokens=limit)
        assert (joined[0] or "", *joined[1:]) == (got[0] or "", *got[1:])
        content, _, calls, reason = got
        assert calls == [LOOK_UP_CALL, PING_CALL][: len(calls)]
        assert reason == ("length" if limit <= len(token_ids) else "tool_calls")
        assert content is None or "Look:\n\n".startswith(content) or "<tool_call>" in content
        counts.append(len(calls))
    assert counts == sorted(counts)
    assert counts[-1] == 2


def test_parallel_tool_calls_false_ends_the_answer_with_its_first_call(
    client: openai.OpenAI, server: RunningServer
) -> None:
    text = f"I look.\n{LOOK_UP}\n{PING} and more"
    want: Answered = ("I look.", None, [LOOK_UP_CALL], "tool_calls")
    assert whole(client, text, parallel_tool_calls=False) == want
    assert streamed(client, text, parallel_tool_calls=False) == want
    both: list[Any] = [client.chat.completions.create(
        model="tiny", messages=asked(text), tools=TOOLS, parallel_tool_calls=off, extra_body=NOT_THINKING
    ) for off in (True, False)]  # fmt: skip
    assert both[1].usage.completion_tokens < both[0].usage.completion_tokens - 5
    assert whole(client, "no call", parallel_tool_calls=False) == ("no call", None, [], "stop")
    server.wait_for("bireme_state_slots_free", 64)


def test_without_tools_or_with_tool_choice_none_the_text_is_left_as_it_is(
    client: openai.OpenAI, server: RunningServer, tokenizer: Tokenizer
) -> None:
    want: Answered = (f"a\n{LOOK_UP}", None, [], "stop")
    ways: list[dict[str, Any]] = [{"tools": openai.omit}, {"tools": []}, {"tool_choice": "none"}]
    for options in ways:
        assert whole(client, f"a\n{LOOK_UP}", **options) == want
        assert streamed(client, f"a\n{LOOK_UP}", **options) == want
    body = {"messages": asked("x"), "max_tokens": 1, "return_token_ids": True, "tools": TOOLS}
    for choice, is_shown in (("auto", True), ("none", False), (None, True)):
        answer = server.post(body | {"tool_choice": choice}, "/v1/chat/completions").json()
        assert ("Looks up." in tokenizer.decode(answer["prompt_token_ids"])) == is_shown


def test_n_answers_usage_and_logprobs_are_right_beside_calls(client: openai.OpenAI, server: RunningServer) -> None:
    before = server.metric("bireme_tool_calls_total")
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": asked(f"{PING}\n{LOOK_UP}"),
        "tools": TOOLS,
        "n": 3,
        "logprobs": True,
        "extra_body": NOT_THINKING,
    }
    done = client.chat.completions.create(**options)
    ids = [call.id for choice in done.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 6
    num_tokens = sum(len(choice.logprobs.content) for choice in done.choices)
    assert num_tokens == done.usage.completion_tokens
    assert server.metric("bireme_tool_calls_total") == before + 6

    calls: list[tuple[int, int]] = []
    entries = 0
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            entries += len(choice.logprobs.content)
            calls += [(choice.index, part.index) for part in choice.delta.tool_calls or []]
        usage = chunk.usage
    assert sorted(calls) == [(i, j) for i in range(3) for j in range(2)]
    assert entries == num_tokens
    assert usage == done.usage


def test_a_stop_string_inside_a_call_leaves_text_and_one_behind_it_the_call(client: openai.OpenAI) -> None:
    half = LOOK_UP[: LOOK_UP.index("limit")]
    for get in (whole, streamed):
        assert get(client, LOOK_UP, stop="limit") == (half, None, [], "stop")
        assert get(client, f"{PING} then more", stop="more") == ("then", None, [PING_CALL], "tool_calls")


def test_a_result_goes_back_and_the_answer_comes(client: openai.OpenAI, server: RunningServer) -> None:
    first = client.chat.completions.create(
        model="tiny", messages=asked(f"{PING}\n{LOOK_UP}"), tools=TOOLS, extra_body=NOT_THINKING
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"of {call.function.name}: <|say|>done<|said|>"}
        for call in message.tool_calls
        if call.type == "function"
    ]
    messages: list[Any] = [*asked("x"), message, *reversed(results)]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, extra_body=NOT_THINKING)
    assert second.choices[0].message.content == "done"


def test_the_clients_stream_helper_and_its_async_twin_agree(client: openai.OpenAI, server: RunningServer) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": asked(f"I look.\n{LOOK_UP}\n{PING}"),
        "tools": TOOLS,
        "extra_body": NOT_THINKING,
    }
    for only_first in (True, False):
        with client.chat.completions.stream(**options, parallel_tool_calls=not only_first) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        assert kinds.count("tool_calls.function.arguments.done") == (1 if only_first else 2)
    assert final.message.content == "I look."
    assert final.finish_reason == "tool_calls"

    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as official:
            return await official.chat.completions.create(**options)

    other = asyncio.run(ask()).choices[0].message
    named = [[(c.function.name, c.function.arguments) for c in m.tool_calls or []] for m in (final.message, other)]
    assert named == [[LOOK_UP_CALL, PING_CALL]] * 2
    # What the helper keeps of a call beside OpenAI's fields does not keep it from being sent back.
    client.chat.completions.create(model="tiny", messages=[*asked("x"), final.message])  # type: ignore[list-item]


# ---- requests ----


def call_of(**fields: Any) -> ChatCall:
    return parse_chat(json.dumps({"messages": asked("x"), "tools": TOOLS} | fields).encode(), GenerationDefaults())


def test_tools_reach_the_template_without_nulls_and_without_what_is_for_the_server() -> None:
    tools = [{"type": "function", "function": {"name": "a.b-c_1", "strict": False, "extra": 1}}, TOOLS[1]]
    assert call_of(tools=tools).tools == [
        {"type": "function", "function": {"name": "a.b-c_1", "extra": 1}},
        {"type": "function", "function": {"name": "ping"}},
    ]
    assert not call_of().only_first_call
    assert call_of(parallel_tool_calls=False).only_first_call


def test_a_template_that_knows_no_tools_is_noticed() -> None:
    assert ChatTemplate("{% for tool in tools %}{{ tool }}{% endfor %}").takes_tools
    assert not ChatTemplate("{% set tools = [] %}{{ messages }} tools").takes_tools
    with pytest.raises(ConfigError):
        ChatTemplate("{% for tool in tools %}")


def test_arguments_become_mappings_and_results_take_the_order_of_their_calls() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}, "index": 1},
        {"id": "3", "function": {"name": "g", "arguments": {"b": 1}}},
    ]
    read = read_messages(
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
            {"role": "tool", "tool_call_id": "3", "content": "third"},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "first"}], "name": "f"},
            {"role": "assistant", "content": "", "tool_calls": calls[:1]},
            {"role": "tool", "tool_call_id": "1", "content": "again"},
        ]
    )
    assert [message["content"] for message in read] == ["x", "", "first", "third", "", "again"]
    assert read[2] == {"role": "tool", "content": "first", "tool_call_id": "1"}
    assert [call["function"] for call in read[1]["tool_calls"]] == [
        {"name": "f", "arguments": {"a": [1, None]}},
        {"name": "g", "arguments": {}},
        {"name": "g", "arguments": {"b": 1}},
    ]


# ---- answers ----


def answer_of(
    call: ChatCall, tokenizer: Tokenizer, token_ids: list[int], sizes: Iterator[int], reason: FinishReason
) -> tuple[Any, ChatAnswer]:
    """The whole answer when its tokens arrive in steps of these sizes."""
    params = call.params_for(1, 0, capacity())
    answer = ChatAnswer(0, call, tokenizer, params, [1], "<think>\n\n</think>\n\n")
    start = 0
    while answer.finish_reason is None:
        end = min(len(token_ids), start + next(sizes))
        entries = [TokenLogprobs(token_id, -0.5, 1, [], []) for token_id in token_ids[start:end]]
        is_last = end == len(token_ids)
        answer.push(RequestOutput("r", token_ids[start:end], reason if is_last else None, logprobs=entries))
        start = end
    return answer.whole(), answer


def capacity() -> Any:
    from bireme.sim import sim_capacity

    return sim_capacity(max_model_len=2048)


def test_an_answer_that_its_first_call_ends_counts_the_same_tokens_however_they_arrive(tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    token_ids = tokenizer.encode(f"Look:\n{LOOK_UP}\n{PING} x", add_special_tokens=False)
    upto_call = tokenizer.encode(f"Look:\n{LOOK_UP.removesuffix('</tool_call>')}"[:-1], add_special_tokens=False)
    for min_tokens, want in ((0, len(upto_call)), (len(token_ids) - 2, len(token_ids) - 2)):
        call = call_of(parallel_tool_calls=False, min_tokens=min_tokens, logprobs=True, return_token_ids=True)
        for _ in range(50):
            sizes = iter(lambda: rng.randint(1, 30), 0)
            got, answer = answer_of(call, tokenizer, token_ids, sizes, FinishReason.LENGTH)
            assert answer.num_tokens == want
            assert got.token_ids == token_ids[:want]
            assert len(got.logprobs.content) == want
            assert (got.message.content, len(got.message.tool_calls)) == ("Look:", 1)
            assert got.finish_reason == "tool_calls"


def test_an_answer_is_the_same_however_its_tokens_arrive(tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    pieces = [LOOK_UP, PING, "a", "\n", " ", "<tool_call>", LOOK_UP[:40], "</tool_call>", "🚢"]
    for _ in range(300):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 5)))
        token_ids = [*tokenizer.encode(text, add_special_tokens=False), 1]
        call = call_of(parallel_tool_calls=rng.random() < 0.5)
        results = []
        for most in (1, 7, 1000):
            sizes = iter(lambda most=most: rng.randint(1, most), 0)  # type: ignore[misc]
            got, answer = answer_of(call, tokenizer, token_ids, sizes, FinishReason.LENGTH)
            named = [(c.function.name, c.function.arguments) for c in got.message.tool_calls or []]
            results.append((got.message.content, named, got.finish_reason, answer.num_tokens))
        assert results[0] == results[1] == results[2], text
