"""/v1/responses on the simulated engine, as the official client and bare HTTP see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from server_support import RunningServer, build_tokenizer, running_server

RESPONSES = "/v1/responses"
OFF: dict[str, Any] = {"reasoning": {"effort": "none"}}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "strict": False,
}
CALL = """\
<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""


def said(text: str) -> str:
    return f"<|say|>{text}<|said|>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("responses")
    build_tokenizer(folder)
    with running_server(folder, folder) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as official:
        yield official


def events_of(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, whose framing is checked on the way."""
    answer = http.post(RESPONSES, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def shape(response: dict[str, Any]) -> Any:
    """A response without what is new each time."""
    dropped = ("id", "call_id", "created_at")
    if isinstance(response, dict):
        return {key: shape(value) for key, value in response.items() if key not in dropped}
    return [shape(value) for value in response] if isinstance(response, list) else response


def test_a_response_holds_the_thought_and_the_text_as_items(client: openai.OpenAI) -> None:
    done = client.responses.create(
        model="tiny", input=said("hm\n</think>\n\nyes 🚢"), max_output_tokens=100, metadata={"a": "b"}
    )
    assert done.output_text == "yes 🚢"
    assert [item.type for item in done.output] == ["reasoning", "message"]
    assert done.output[0].content[0].text == "hm"  # type: ignore[union-attr,index]
    assert (done.status, done.object, done.model) == ("completed", "response", "tiny")
    assert done.id.startswith("resp_")
    assert done.metadata == {"a": "b"}
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert done.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("yes 🚢 船", OFF),
        ("hm\n</think>\n\nyes", {}),
        ("hm, cut he", {"max_output_tokens": 5}),
        ("", OFF),
        (CALL, OFF | {"tools": [TOOL]}),
        (f"Let me see.\n{CALL}\n{CALL}", OFF | {"tools": [TOOL]}),
        (f"Let me see.\n{CALL}\n{CALL}", OFF | {"tools": [TOOL], "parallel_tool_calls": False}),
    ],
)
def test_the_events_of_a_stream_build_the_response_that_is_not_streamed(
    http: httpx.Client, text: str, fields: dict[str, Any]
) -> None:
    body = {"input": said(text), "max_output_tokens": 200} | fields
    whole = http.post(RESPONSES, json=body).json()
    Response.model_validate(whole, strict=False)
    events = events_of(http, body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert shape(events[-1]["response"]) == shape(whole)
    built: list[dict[str, Any]] = []
    text_so_far: dict[str, str] = {}
    for event in events[2:-1]:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(built)
                built.append(event["item"])
            case (
                "response.output_text.delta"
                | "response.reasoning_text.delta"
                | "response.function_call_arguments.delta"
            ):
                text_so_far[event["item_id"]] = text_so_far.get(event["item_id"], "") + event["delta"]
            case "response.output_text.done" | "response.reasoning_text.done":
                assert text_so_far.get(event["item_id"], "") == event["text"]
            case "response.function_call_arguments.done":
                assert text_so_far[event["item_id"]] == event["arguments"]
            case "response.output_item.done":
                assert built[event["output_index"]]["id"] == event["item"]["id"]
                built[event["output_index"]] = event["item"]
            case kind:
                assert kind in ("response.content_part.added", "response.content_part.done")
    assert shape(built) == shape(whole["output"])


def test_the_official_stream_helper_gives_the_final_response(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny",
        input=said(f"Let me see.\n{CALL}"),
        tools=[TOOL],
        extra_body=OFF,  # type: ignore[list-item]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Let me see."
    call = final.output[1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Oslo", "days": 3}


def test_a_response_that_is_cut_says_so(http: httpx.Client) -> None:
    whole = http.post(RESPONSES, json={"input": said("one two three four"), "max_output_tokens": 3} | OFF).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert whole["usage"]["output_tokens"] == 3


def test_items_become_the_turns_that_the_template_shows(http: httpx.Client) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Weather "}, {"type": "input_text", "text": "there?"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I ask."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "id": "fc_1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "c2", "output": "snow"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "user", "content": said("done")},
    ]
    body = {"instructions": "You help.", "input": items, "max_output_tokens": 20} | OFF
    answer = http.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["content"][0]["text"] == "done"
    call = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
    conversation = [
        {"role": "system", "content": "You help.\n\nBe brief."},
        {"role": "user", "content": "Weather there?"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "I ask.",
            "tool_calls": [
                {
                    "id": f"c{i}",
                    "type": "function",
                    "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'},
                }
                for i, city in ((1, "Oslo"), (2, "Bern"))
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "snow"},
        {"role": "user", "content": said("done")},
    ]
    same = {"messages": conversation, "chat_template_kwargs": {"enable_thinking": False}}
    count = http.post("/tokenize", json=same).json()["count"]
    assert answer.json()["usage"]["input_tokens"] == count
    assert call.format("Oslo") in "".join(
        http.post("/tokenize", json=same | {"return_token_strs": True}).json()["token_strs"]
    )


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": None}, "input", "required"),
        ({"input": []}, "input", "empty"),
        ({"input": [5]}, "input", "input[0] is 5"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", "robot"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"input": [{"role": "user", "content": "x", "name": "bob"}]}, "input", "bob"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input", "no such call"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}]}, "input", "arguments"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input", "encrypted_content"),
        ({"input": [{"type": {}, "summary": []}]}, "input", "type is {}"),
        ({"store": True}, "store", "nothing is stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "resp_1"),
        ({"background": True}, "background", "true"),
        ({"conversation": "c"}, "conversation", "nothing is stored"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0"),
        ({"max_output_tokens": 5000}, "max_tokens", "5000"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools", "a b"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools", "defer_loading"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs", "3"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "high"),
        ({"text": {"verbosity": "low"}}, "text", "verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text", "xml"),
        ({"truncation": "auto"}, "truncation", "auto"),
        ({"messages": []}, "messages", "no field"),
        ({"n": 2}, "n", "no field"),
        ({"temperature": 101}, "temperature", "101"),
        ({"model": "gpt-x"}, "model", "gpt-x"),
    ],
)
def test_what_a_response_cannot_do_is_refused_by_name(
    http: httpx.Client, change: dict[str, Any], param: str, words: str
) -> None:
    answer = http.post(RESPONSES, json={"input": "x", "max_output_tokens": 5} | change)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error
    assert http.post(RESPONSES, json={"input": said("fine"), "max_output_tokens": 20} | OFF).status_code == 200


def test_what_asks_for_nothing_is_accepted(http: httpx.Client) -> None:
    off = {
        "store": False,
        "background": False,
        "previous_response_id": None,
        "truncation": "disabled",
        "service_tier": "auto",
        "include": [],
        "tool_choice": "auto",
        "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": None},
        "top_logprobs": 0,
    }
    assert http.post(RESPONSES, json={"input": said("yes"), "max_output_tokens": 20} | off).status_code == 200


def test_an_engine_that_dies_during_a_stream_fails_the_response(tmp_path: Path) -> None:
    from server_support import pull

    build_tokenizer(tmp_path)
    trip = tmp_path / "trip"
    with running_server(tmp_path, tmp_path, step_seconds=0.02, trip=str(trip)) as dying:
        body = {"input": "on and on", "ignore_eos": True, "stream": True}
        with httpx.stream("POST", dying.url + RESPONSES, json=body, timeout=10) as answer:
            text = ""
            for piece in answer.iter_text():
                text += piece
                if "delta" in text and not trip.exists():
                    pull(trip, "rank")
        last = json.loads(text.strip().split("\n\n")[-1].split("\ndata: ")[1])
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert "rank 1 died" in last["response"]["error"]["message"]
