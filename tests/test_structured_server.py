"""Forms of answers and forced tool calls on the embedded model, as ``bireme serve`` serves it and clients ask."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from bireme.local_server import running_server

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = Path(tmp_path_factory.mktemp("structured") / "server.log")
    flags = ("--dtype", "float32", "--max-num-seqs", "16", "--max-waiting", "64")
    with log.open("wb") as out, running_server("pocket", *flags, log=out) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as official:
        yield official


def chat(url: str, **fields: Any) -> httpx.Response:
    body = {"messages": ASK, "max_tokens": 200, "temperature": 0, **NO_THOUGHT} | fields
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=60)


def message(url: str, **fields: Any) -> dict[str, Any]:
    answer = chat(url, **fields)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] in ("stop", "tool_calls"), choice
    return choice["message"]


def function(name: str, parameters: Any = None, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or SCHEMA, **others}}


def calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]


# forms


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("strict", [True, False, None])
def test_json_schema_holds_for_the_content_with_and_without_a_thought(
    url: str, thinking: bool, strict: bool | None
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": strict}}
    found = message(url, response_format=form, chat_template_kwargs={"enable_thinking": thinking})
    jsonschema.validate(json.loads(found["content"]), SCHEMA)
    assert bool(found.get("reasoning_content")) is thinking


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"\d{3}/[a-z]{2}"}, r"[0-9]{3}/[a-z]{2}"),
        ({"guided_choice": ["sunny", 'rain, "maybe"']}, 'sunny|rain, "maybe"'),
        ({"guided_grammar": 'start: "a" /[0-9]{2}/'}, "a[0-9]{2}"),
        ({"guided_json": {"enum": ["x", 12]}}, '"x"|12'),
        ({"guided_json": '{"const": [true]}'}, r"\[\s*true\s*\]"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"regex": "[xy]{4}", "json_object": None}}, "[xy]{4}"),
        ({"structured_outputs": {"grammar": 'root ::= "z" [a-c]'}}, "z[a-c]"),
        ({"response_format": {"type": "text"}, "guided_choice": ["only"]}, "only"),
    ],
)
def test_every_way_to_ask_for_a_form_works_on_both_endpoints(url: str, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, message(url, **fields)["content"])
    answer = httpx.post(url + "/v1/completions", json={"prompt": "It is", "max_tokens": 60} | fields, timeout=60)
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"])


def test_json_object_gives_an_object_however_it_is_streamed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "pocket",
        "messages": [{"role": "user", "content": 'Give me JSON like {"name": "Ada", "points": [1, 2], "paid": true}.'}],
        "temperature": 0,
        "max_tokens": 300,
        "response_format": {"type": "json_object"},
        "extra_body": NO_THOUGHT,
    }
    whole = client.chat.completions.create(**options).choices[0]
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    text = "".join(part.delta.content or "" for part in parts)
    assert text == whole.message.content and parts[-1].finish_reason == whole.finish_reason
    if whole.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)
    rain: bool


def test_the_official_clients_parse_gives_an_instance_of_the_model(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="pocket", messages=ASK, response_format=Weather, max_tokens=200)  # type: ignore[arg-type]
    assert isinstance(parsed.choices[0].message.parsed, Weather)


# tool calls


@pytest.mark.parametrize("thinking", [True, False])
def test_required_and_named_choices_give_calls_that_satisfy_their_schemas(url: str, thinking: bool) -> None:
    tools = [function("get_weather"), function("other", {"type": "object", "properties": {}})]
    common = {"tools": tools, "chat_template_kwargs": {"enable_thinking": thinking}}
    for choice, names in (
        ("required", {"get_weather", "other"}),
        ({"type": "function", "function": {"name": "other"}}, {"other"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ):
        found = message(url, tool_choice=choice, parallel_tool_calls=False, **common)
        ((name, arguments),) = calls(found)
        assert name in names
        jsonschema.validate(arguments, SCHEMA if name == "get_weather" else {"maxProperties": 0})
        assert not found["content"]


EVERYTHING = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["fast", "a </b> c", 7, None]},
        "title": {"type": "string", "minLength": 2, "maxLength": 6},
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]$"},
        "when": {"type": ["string", "null"], "enum": ["now", None]},
        "count": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 4}, {"type": "boolean"}]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
        "spot": {"$ref": "#/$defs/spot"},
        "fixed": {"const": "exactly this"},
    },
    "required": ["mode", "title", "code", "when", "count", "tags", "spot", "fixed"],
    "additionalProperties": False,
    "$defs": {
        "spot": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("seed", range(6))
def test_strict_arguments_of_every_kind_satisfy_their_schema(url: str, seed: int) -> None:
    tools = [function("f", EVERYTHING, strict=True)]
    answer = chat(
        url, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed, max_tokens=600
    ).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls", answer
    ((name, arguments),) = calls(answer["message"])
    assert name == "f"
    jsonschema.validate(arguments, EVERYTHING)


def test_auto_binds_the_calls_of_a_strict_function_only(url: str) -> None:
    ((_, free),) = calls(message(url, tools=[function("get_weather")]))
    assert "days" not in free
    ((_, bound),) = calls(message(url, tools=[function("get_weather", strict=True)]))
    jsonschema.validate(bound, SCHEMA)


def test_auto_with_a_strict_function_leaves_text_free(url: str) -> None:
    called = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    told = [
        *ASK,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_0", "content": '{"sky": "sunny"}'},
    ]
    free = message(url, tools=[function("get_weather")], messages=told)
    bound = message(url, tools=[function("get_weather", strict=True)], messages=told)
    assert "sunny" in free["content"] and not calls(free)
    assert (bound["content"], calls(bound)) == (free["content"], [])


def test_an_answer_may_be_a_call_or_of_the_form_when_both_are_offered(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for question in ("What is the weather in Paris?", "What is the capital of France?"):
        found = message(
            url, tools=[function("get_weather")], response_format=form, messages=[{"role": "user", "content": question}]
        )
        if found.get("tool_calls"):
            assert calls(found)[0][0] == "get_weather"
        else:
            jsonschema.validate(json.loads(found["content"]), SCHEMA)


# refusals


JSON_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"not": {}}}}}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": JSON_FORM},
        "response_format.json_schema.schema",
        '#/properties/a: Unimplemented keys: ["not"]',
    ),
    ({"guided_json": {"format": "nope", "type": "string"}}, "guided_json", "Unknown format: nope"),
    ({"guided_json": {"$ref": "http://127.0.0.1:1/x.json"}}, "guided_json", "x.json"),
    ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json", "guided_json cannot be followed"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_grammar": "start: x"}, "guided_grammar", 'unknown name: "x"'),
    ({"guided_choice": []}, "guided_choice", "non-empty"),
    ({"guided_choice": ["a"] * 200_000}, "guided_choice", "bytes: at most"),
    ({"guided_json": {"pattern": "(a{9999}){9999}", "type": "string"}}, "guided_json", "at least 99980001 times"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs", "both"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
    ({"structured_outputs": {}}, "structured_outputs", "no form"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format", "response_format.x"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos"),
    ({"tools": [function("f")], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "guided_regex"),
    ({"tools": [function("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", '"g"'),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    (
        {"tools": [function("f", {"type": "object", "properties": {"a": {"not": {}}}}, strict=True)]},
        "tools",
        "the argument 'a' of 'f': ",
    ),
    (
        {"tools": [function("f", {"type": "object", "properties": {"a": {}}, "minProperties": 1}, strict=True)]},
        "tools",
        "minProperties",
    ),
    (
        {"tools": [function("f", {"type": "object", "properties": {"a>b": {}}})], "tool_choice": "required"},
        "tools",
        "a>b",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_made_sure_of_is_a_400_with_field_and_reason(
    url: str, fields: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        answer = chat(url, stream=stream, **fields)
        assert answer.status_code == 400, answer.text[:300]
        error = answer.json()["error"]
        assert error["param"] == param and words in error["message"], error
        assert len(error["message"]) < 800
    assert message(url, guided_choice=["still here"])["content"] == "still here"


# company


def test_many_clients_with_forms_of_their_own_each_get_theirs(url: str) -> None:
    def ask(number: int) -> bool:
        pattern = f"{number}-[a-z]{{2,4}}"
        if number % 3 == 0:
            return bool(
                message(url, messages=[{"role": "user", "content": "What is the capital of France?"}])["content"]
            )
        return bool(re.fullmatch(pattern, message(url, guided_regex=pattern)["content"]))

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(ask, range(48)))


def test_a_client_that_leaves_in_the_middle_of_its_form_frees_its_slot(url: str) -> None:
    body = json.dumps(
        {"messages": ASK, "guided_regex": "[a-z]{4000,}", "max_tokens": 5000, "stream": True} | NO_THOUGHT
    ).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as leaving:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        leaving.sendall(head.encode() + body)
        assert b"200" in leaving.recv(4096)
        assert gauge(url, "num_requests_running") == 1
    deadline = time.monotonic() + 10
    while gauge(url, "num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gauge(url, "num_requests_running") == 0


def gauge(url: str, name: str) -> float:
    text = httpx.get(url + "/metrics").text
    found = re.search(rf"^\S*{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def test_a_stream_goes_on_while_bombs_are_refused(url: str) -> None:
    is_over = threading.Event()
    bombs = [
        {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(8)]} for i in range(8)]}},
        {"guided_json": {"enum": [f"v{i}" for i in range(12_000)]}},
        {"guided_regex": "(x{7000}){7}"},
    ]

    def throw() -> None:
        number = 0
        while not is_over.is_set():
            chat(url, max_tokens=1, **bombs[number % len(bombs)])
            number += 1

    thrower = threading.Thread(target=throw)
    thrower.start()
    try:
        times = [time.monotonic()]
        fields = {"messages": ASK, "guided_regex": "[a-z]{200}", "max_tokens": 300, "stream": True}
        with httpx.stream("POST", url + "/v1/chat/completions", json=fields | NO_THOUGHT, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.monotonic())
    finally:
        is_over.set()
        thrower.join()
    assert len(times) > 10
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 5.0
