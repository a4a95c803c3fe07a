"""Bad requests: each gets its own 4xx, and the next good request its usual answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_sim import VOCAB_SIZE
from server_support import RunningServer, build_tokenizer, running_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"prompt": "<|say|>all is well<|said|>", "max_tokens": 50, "temperature": 0}
USER = [{"role": "user", "content": "hi"}]


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | changes}


def called(*ids: str, **changes: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"} | changes
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    return {"role": "assistant", "tool_calls": calls}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": "x", "tool_call_id": call_id}


# (path, what is changed in a good body or raw bytes, status, field at fault, words of the message)
TABLE: list[tuple[str, Any, int, str | None, str]] = [
    # bodies
    (COMPLETIONS, b"", 400, None, "JSON"),
    (COMPLETIONS, b"{", 400, None, "JSON"),
    (COMPLETIONS, b"[]", 400, None, "object"),
    (COMPLETIONS, b'"x"', 400, None, "object"),
    (COMPLETIONS, b"null", 400, None, "object"),
    (COMPLETIONS, b"\xff\xfe{}", 400, None, "JSON"),
    (COMPLETIONS, b'{"prompt": "x"} trailing', 400, None, "JSON"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, None, "JSON"),
    (COMPLETIONS, b'{"prompt": "\xed\xa0\x80"}', 400, None, "JSON"),
    (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400, None, "JSON"),
    (COMPLETIONS, b'{"prompt": "x", "temperature": Infinity}', 400, None, "JSON"),
    (COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}', 400, "temperature", "out of range"),
    (COMPLETIONS, b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", 400, "seed", "out of range"),
    (COMPLETIONS, b'{"prompt": [1e999]}', 400, "prompt", "out of range"),
    (COMPLETIONS, b"[" * 200_000, 400, None, "JSON"),
    (COMPLETIONS, b'{"prompt": "x", "logit_bias": ' + b'{"a":' * 5000, 400, None, "JSON"),
    (COMPLETIONS, b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 413, None, "4194304"),
    (CHAT, b'{"messages": ' + b" " * 5_000_000 + b"[]}", 413, None, "4194304"),
    (CHAT, b"{", 400, None, "JSON"),
    # prompts
    (COMPLETIONS, {"prompt": None}, 400, "prompt", "required"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "not empty"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt", "prompt 1 is empty"),
    (COMPLETIONS, {"prompt": 7}, 400, "prompt", "7"),
    (COMPLETIONS, {"prompt": {"text": "x"}}, 400, "prompt", "text"),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt", "prompt 1"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", "Expected"),
    (COMPLETIONS, {"prompt": [1, 2.0]}, 400, "prompt", "Expected"),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt", "Expected"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, 400, "prompt", "prompt 1"),
    (COMPLETIONS, {"prompt": [None]}, 400, "prompt", "Expected"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", "-1"),
    (COMPLETIONS, {"prompt": [VOCAB_SIZE]}, 400, "prompt", f"{VOCAB_SIZE}"),
    (COMPLETIONS, {"prompt": [2**31]}, 400, "prompt", f"{2**31}"),
    (COMPLETIONS, {"prompt": [2**70]}, 400, "prompt", f"{2**70}"),
    (COMPLETIONS, {"prompt": [5] * 2048}, 400, "prompt", "2048 tokens"),
    (COMPLETIONS, {"prompt": [5] * 5000}, 400, "prompt", "5000 tokens"),
    (COMPLETIONS, {"prompt": [5] * 2000, "max_tokens": 100}, 400, "max_tokens", "2000 tokens and max_tokens is 100"),
    (COMPLETIONS, {"prompt": [[5]] * 2049}, 400, "prompt", "2049"),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 100}, 400, "prompt", "10000"),
    # models
    (COMPLETIONS, {"model": "gpt-x"}, 404, "model", "gpt-x"),
    (CHAT, {"model": "gpt-x"}, 404, "model", "gpt-x"),
    (COMPLETIONS, {"model": ""}, 404, "model", "served"),
    (COMPLETIONS, {"model": 3}, 400, "model", "3"),
    # numbers
    (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens", "0"),
    (COMPLETIONS, {"max_tokens": -1}, 400, "max_tokens", "-1"),
    (COMPLETIONS, {"max_tokens": 1.5}, 400, "max_tokens", "1.5"),
    (COMPLETIONS, {"max_tokens": "16"}, 400, "max_tokens", "16"),
    (COMPLETIONS, {"max_tokens": True}, 400, "max_tokens", "true"),
    (COMPLETIONS, {"max_tokens": 2**31}, 400, "max_tokens", f"{2**31}"),
    (COMPLETIONS, {"max_tokens": 10**30}, 400, "max_tokens", "1000"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens", "0"),
    (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens", "0"),
    (CHAT, {"max_completion_tokens": 9, "max_tokens": 8}, 400, "max_completion_tokens", "max_tokens is 8"),
    (COMPLETIONS, {"min_tokens": -1}, 400, "min_tokens", "-1"),
    (COMPLETIONS, {"min_tokens": 60}, 400, "min_tokens", "max_tokens (50)"),
    (COMPLETIONS, {"n": 0}, 400, "n", "0"),
    (COMPLETIONS, {"n": 129}, 400, "n", "129"),
    (CHAT, {"n": "2"}, 400, "n", "2"),
    (COMPLETIONS, {"temperature": -0.1}, 400, "temperature", "-0.1"),
    (COMPLETIONS, {"temperature": 101}, 400, "temperature", "101"),
    (COMPLETIONS, {"temperature": "hot"}, 400, "temperature", "hot"),
    (COMPLETIONS, {"temperature": 1e308}, 400, "temperature", "e+308"),
    (COMPLETIONS, {"top_p": 0}, 400, "top_p", "0"),
    (COMPLETIONS, {"top_p": 1.01}, 400, "top_p", "1.01"),
    (COMPLETIONS, {"top_k": -2}, 400, "top_k", "-2"),
    (COMPLETIONS, {"top_k": 2**31}, 400, "top_k", f"{2**31}"),
    (COMPLETIONS, {"top_k": 1.5}, 400, "top_k", "1.5"),
    (COMPLETIONS, {"min_p": 2}, 400, "min_p", "2"),
    (COMPLETIONS, {"repetition_penalty": 0}, 400, "repetition_penalty", "0"),
    (COMPLETIONS, {"presence_penalty": 2.5}, 400, "presence_penalty", "2.5"),
    (COMPLETIONS, {"frequency_penalty": -2.5}, 400, "frequency_penalty", "-2.5"),
    (COMPLETIONS, {"seed": 2**63}, 400, "seed", f"{2**63}"),
    (COMPLETIONS, {"seed": "x"}, 400, "seed", "x"),
    (COMPLETIONS, {"seed": 1.5}, 400, "seed", "1.5"),
    (COMPLETIONS, {"logprobs": 21}, 400, "logprobs", "21"),
    (COMPLETIONS, {"logprobs": -1}, 400, "logprobs", "-1"),
    (COMPLETIONS, {"logprobs": True}, 400, "logprobs", "true"),
    (CHAT, {"logprobs": 3}, 400, "logprobs", "3"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "21"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs", "logprobs: true"),
    # ids and strings
    (COMPLETIONS, {"logit_bias": {str(VOCAB_SIZE): 1}}, 400, "logit_bias", str(VOCAB_SIZE)),
    (COMPLETIONS, {"logit_bias": {"-1": 1}}, 400, "logit_bias", "-1"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, 400, "logit_bias", "x"),
    (COMPLETIONS, {"logit_bias": {"1": 101}}, 400, "logit_bias", "101"),
    (COMPLETIONS, {"logit_bias": {"1": "a"}}, 400, "logit_bias", "Expected"),
    (COMPLETIONS, {"logit_bias": {str(2**40): 1}}, 400, "logit_bias", str(2**40)),
    (COMPLETIONS, {"logit_bias": [1]}, 400, "logit_bias", "Expected"),
    (COMPLETIONS, {"stop_token_ids": [VOCAB_SIZE]}, 400, "stop_token_ids", str(VOCAB_SIZE)),
    (COMPLETIONS, {"stop_token_ids": [-1]}, 400, "stop_token_ids", "-1"),
    (COMPLETIONS, {"stop_token_ids": ["a"]}, 400, "stop_token_ids", "Expected"),
    (COMPLETIONS, {"stop_token_ids": 5}, 400, "stop_token_ids", "Expected"),
    (COMPLETIONS, {"stop": ""}, 400, "stop", "non-empty"),
    (COMPLETIONS, {"stop": ["a", ""]}, 400, "stop", "non-empty"),
    (COMPLETIONS, {"stop": [1]}, 400, "stop", "Expected"),
    (COMPLETIONS, {"stop": ["a"] * 33}, 400, "stop", "33"),
    (COMPLETIONS, {"stop": "a" * 1025}, 400, "stop", "1025"),
    # switches
    (COMPLETIONS, {"stream": "yes"}, 400, "stream", "yes"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, 400, "stream_options", "stream: true"),
    (COMPLETIONS, {"stream": True, "stream_options": {"usage": True}}, 400, "stream_options", "usage"),
    (COMPLETIONS, {"ignore_eos": 1}, 400, "ignore_eos", "Expected"),
    (COMPLETIONS, {"echo": "no"}, 400, "echo", "Expected"),
    (COMPLETIONS, {"suffix": "tail"}, 400, "suffix", "tail"),
    (COMPLETIONS, {"best_of": 3}, 400, "best_of", "3"),
    (COMPLETIONS, {"messages": USER}, 400, "messages", "no field"),
    (COMPLETIONS, {"nonsense": [1, 2]}, 400, "nonsense", "[1,2]"),
    (COMPLETIONS, {"response_format": {"type": "grammar"}}, 400, "response_format", "grammar"),
    (COMPLETIONS, {"guided_regex": ""}, 400, "guided_regex", "empty"),
    # tools
    (CHAT, {"tools": {}}, 400, "tools", "Expected"),
    (CHAT, {"tools": ["f"]}, 400, "tools", "tools[0]"),
    (CHAT, {"tools": [{"type": "web_search"}]}, 400, "tools", "web_search"),
    (CHAT, {"tools": [{"type": "function", "name": "f"}]}, 400, "tools", "tools[0].name"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools", "tools[0].function"),
    (CHAT, {"tools": [tool(), tool()]}, 400, "tools", "tools[0]"),
    (CHAT, {"tools": [tool(name="")]}, 400, "tools", "1 to 64"),
    (CHAT, {"tools": [tool(name="a b")]}, 400, "tools", "a b"),
    (CHAT, {"tools": [tool(name="a>")]}, 400, "tools", "a>"),
    (CHAT, {"tools": [tool(name=None)]}, 400, "tools", "null"),
    (CHAT, {"tools": [tool(name="n" * 65)]}, 400, "tools", "nnn"),
    (CHAT, {"tools": [tool(description=7)]}, 400, "tools", "description is 7"),
    (CHAT, {"tools": [tool(strict="yes")]}, 400, "tools", "strict"),
    (CHAT, {"tools": [tool(parameters=[])]}, 400, "tools", "parameters is []"),
    (CHAT, {"tools": [tool(parameters={"type": "array"})]}, 400, "tools", "array"),
    (CHAT, {"tools": [tool(parameters={"properties": 1})]}, 400, "tools", "properties is 1"),
    (CHAT, {"tool_choice": "auto"}, 400, "tool_choice", "needs tools"),
    (CHAT, {"tool_choice": "auto", "tools": []}, 400, "tool_choice", "needs tools"),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", "needs tools"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "tool_choice", "needs tools"),
    (CHAT, {"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]}, 400, "tool_choice", "allowed_tools"),
    (CHAT, {"tool_choice": "any", "tools": [tool()]}, 400, "tool_choice", "any"),
    (CHAT, {"tool_choice": 1, "tools": [tool()]}, 400, "tool_choice", "Expected"),
    (CHAT, {"parallel_tool_calls": 1}, 400, "parallel_tool_calls", "Expected"),
    (CHAT, {"functions": [{"name": "f"}]}, 400, "functions", "use tools"),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format", "json_schema"),
    (CHAT, {"reasoning_effort": "high"}, 400, "reasoning_effort", "high"),
    (CHAT, {"chat_template": "{{ 1 }}"}, 400, "chat_template", "checkpoint"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "messages"),
    (CHAT, {"chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs", "self"),
    (CHAT, {"chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs", "tools"),
    (CHAT, {"chat_template_kwargs": [1]}, 400, "chat_template_kwargs", "Expected"),
    (CHAT, {"prompt": "x"}, 400, "prompt", "no field"),
    # messages
    (CHAT, {"messages": None}, 400, "messages", "required"),
    (CHAT, {"messages": []}, 400, "messages", "empty"),
    (CHAT, {"messages": "hi"}, 400, "messages", "Expected"),
    (CHAT, {"messages": ["hi"]}, 400, "messages", "messages[0]"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages", "role"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, 400, "messages", "robot"),
    (CHAT, {"messages": [{"role": ["user"], "content": "hi"}]}, 400, "messages", "role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages", "content is 5"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "image_url"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages", "text must be"),
    (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, 400, "messages", "content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "bob"}]}, 400, "messages", "bob"),
    (CHAT, {"messages": [*USER, {"role": "tool", "content": "x"}]}, 400, "messages", "tool_call_id is null"),
    (CHAT, {"messages": [*USER, result("a")]}, 400, "messages", "no such call"),
    (CHAT, {"messages": [called("a"), *USER, result("a")]}, 400, "messages", "no such call"),
    (CHAT, {"messages": [called("a"), result("a"), result("b")]}, 400, "messages", "messages[2]"),
    (CHAT, {"messages": [called("a"), result("a"), result("a")]}, 400, "messages", "already"),
    (CHAT, {"messages": [called("a"), result("a") | {"name": "g"}]}, 400, "messages", "name is"),
    (CHAT, {"messages": [called("a"), result("a") | {"content": None}]}, 400, "messages", "content is null"),
    (CHAT, {"messages": [called("a", "a")]}, 400, "messages", "another call"),
    (CHAT, {"messages": [called("a", arguments="{")]}, 400, "messages", "arguments"),
    (CHAT, {"messages": [called("a", arguments="[1]")]}, 400, "messages", "JSON of an object"),
    (CHAT, {"messages": [called("a", arguments=None)]}, 400, "messages", "arguments is null"),
    (CHAT, {"messages": [called("a", arguments='{"x": ' + "[" * 4000)]}, 400, "messages", "arguments"),
    (CHAT, {"messages": [called("a", name=3)]}, 400, "messages", "name is 3"),
    (CHAT, {"messages": [called("a", cache=3)]}, 400, "messages", "cache is 3"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": {"id": "1"}}]}, 400, "messages", "must be a list"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, 400, "messages", "tool_calls"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, 400, "messages", "role user"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, 400, "messages", "role user"),
    (CHAT, {"messages": [*USER, {"role": "system", "content": "late"}]}, 400, "messages", "must come first"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 2500}]}, 400, "prompt", "2047"),
    (CHAT, {"max_tokens": 3000}, 400, "max_tokens", "3000"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("bad-input")
    build_tokenizer(folder)
    with running_server(folder, folder) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def body_of(path: str, change: Any) -> bytes:
    if isinstance(change, bytes):
        return change
    good = GOOD if path == COMPLETIONS else {"messages": USER, "max_tokens": 50}
    return json.dumps(good | change).encode()


def answers_well(http: httpx.Client) -> None:
    good = http.post(COMPLETIONS, json=GOOD)
    assert good.status_code == 200, good.text
    assert good.json()["choices"][0]["text"] == "all is well"


@pytest.mark.parametrize("row", range(len(TABLE)), ids=lambda row: f"{row}-{TABLE[row][3]}")
def test_a_bad_request_gets_its_own_4xx_and_the_next_good_one_its_answer(
    http: httpx.Client, server: RunningServer, row: int
) -> None:
    path, change, status, param, words = TABLE[row]
    for stream in (False, True):
        if stream and (isinstance(change, bytes) or "stream" in change or "stream_options" in change):
            continue
        body = body_of(path, change if not stream else change | {"stream": True})
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text[:500]
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param, error
        assert words in error["message"], error
        assert len(error["message"]) < 600
        assert "Traceback" not in answer.text
        assert str(Path(__file__).parents[1]) not in answer.text
    answers_well(http)


def test_the_table_has_at_least_80_rows() -> None:
    assert len(TABLE) >= 80


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/gpt-x", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", CHAT, 405),
        ("POST", "/health", 405),
        ("PUT", "/metrics", 405),
    ],
)
def test_an_unknown_path_or_method_is_answered_in_openais_form(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert status != 405 or "allow" in answer.headers


def test_a_body_that_says_it_is_no_json_is_not_read(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, content=json.dumps(GOOD), headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert http.post(COMPLETIONS, content=json.dumps(GOOD)).status_code == 200


def test_a_body_too_large_is_noticed_though_its_length_is_not_announced(http: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(80):
            yield b"x" * 65536

    answer = http.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    answers_well(http)


def test_errors_are_counted_by_status(http: httpx.Client, server: RunningServer) -> None:
    http.post(COMPLETIONS, content=b"{")
    assert 'bireme_http_errors_total{engine="0",model_name="tiny",status="400"}' in http.get("/metrics").text


def test_what_is_not_http_is_refused_and_the_next_request_answered(server: RunningServer, http: httpx.Client) -> None:
    import socket

    for junk in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
            sock.sendall(junk)
            assert sock.recv(100).startswith((b"HTTP/1.1 400", b""))
    answers_well(http)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (COMPLETIONS, {"model": "m" * 100_000}),
        (COMPLETIONS, {"f" * 100_000: 1}),
        (COMPLETIONS, {"stream": True, "stream_options": {"o" * 100_000: True}}),
        (COMPLETIONS, {"logit_bias": {"k" * 100_000: 1}}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "t" * 100_000}]}]}),
        (CHAT, {"messages": [{"role": "r" * 100_000, "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x", "y" * 100_000: 1}]}),
    ],
)
def test_an_error_does_not_grow_with_what_was_sent(http: httpx.Client, path: str, change: dict[str, Any]) -> None:
    answer = http.post(path, content=body_of(path, change), headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2000


def test_an_error_of_a_long_path_or_content_type_is_short(http: httpx.Client) -> None:
    assert len(http.get("/v1/" + "p" * 20_000).content) < 500
    assert len(http.get("/v1/models/" + "p" * 20_000).content) < 500
    assert len(http.post(COMPLETIONS, content=b"{}", headers={"content-type": "c" * 20_000}).content) < 500


def test_a_long_user_is_cut_in_the_log(http: httpx.Client, server: RunningServer) -> None:
    assert http.post(COMPLETIONS, json=GOOD | {"user": "u" * 10_000}).status_code == 200
    text = server.log.read_text()
    assert "user" in text
    assert "u" * 200 not in text
