"""The HTTP surface on the simulated engine, as the official client and bare HTTP see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_support import RunningServer, build_tokenizer, load_tokenizer, running_server

from bireme import __version__
from bireme.server.tokenizer import Tokenizer

MANY = "hello 🚢 船は夜明け前に 배는 새벽이 world"


def said(text: str) -> str:
    """A prompt that makes the simulated model say ``text``."""
    return f"<|say|>{text}<|said|>"


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": said(text)}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("http")
    build_tokenizer(folder)
    with running_server(folder, folder) as running:
        running.folder = folder  # type: ignore[attr-defined]
        yield running


@pytest.fixture(scope="module")
def tokenizer(server: RunningServer) -> Tokenizer:
    return load_tokenizer(server.folder)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as official:
        yield official


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, whose framing is checked on the way."""
    answer = http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames[-1] == ""
    assert frames[-2] == "data: [DONE]"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames[:-1])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


# ---- the plain endpoints ----


def test_health_version_and_models_answer(http: httpx.Client, client: openai.OpenAI) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": __version__}
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny", "tiny-alias"]
    assert client.models.retrieve("tiny-alias").owned_by == "bireme"
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 2048


def test_metrics_count_what_was_served_under_vllms_names(http: httpx.Client, server: RunningServer) -> None:
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_generation_tokens_sum",
        "bireme_steps_total",
    )
    before = {name: server.metric(name) for name in names}
    usage = http.post("/v1/completions", json={"prompt": said("hello world"), "max_tokens": 30}).json()["usage"]
    after = {name: server.metric(name) - before[name] for name in names}
    assert after["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert after["vllm:generation_tokens_total"] == usage["completion_tokens"]
    assert after["vllm:time_to_first_token_seconds_count"] == 1
    assert after["vllm:request_generation_tokens_sum"] == usage["completion_tokens"]
    assert after["bireme_steps_total"] >= usage["completion_tokens"]
    text = http.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{engine="0",model_name="tiny"}} 0.0' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"}' in text
    assert 'vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="tiny"}' in text


# ---- completions ----


def test_a_completion_has_text_usage_and_names(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny-alias", prompt=said(MANY), max_tokens=100)
    assert done.object == "text_completion"
    assert done.model == "tiny-alias"
    assert done.id.startswith("cmpl-")
    assert done.choices[0].text == MANY
    assert done.choices[0].finish_reason == "stop"
    usage = done.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_max_tokens_is_16_unless_said_and_ends_with_length(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt="hello world")
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 16
    done = client.completions.create(model="tiny", prompt="hello world", max_tokens=3)
    assert done.usage is not None
    assert done.usage.completion_tokens == 3


@pytest.mark.parametrize("text", [MANY, "👩\u200d👩\u200d👧 𝄞𝄢", "안녕하세요 세계"])
def test_streamed_pieces_join_to_the_whole_and_hold_no_replacement_characters(
    http: httpx.Client, client: openai.OpenAI, text: str
) -> None:
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(model="tiny", prompt=said(text), max_tokens=200, stream=True)
    ]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_has_usage_only_when_asked_for_and_then_in_a_last_chunk_without_choices(http: httpx.Client) -> None:
    body = {"prompt": said("hello world"), "max_tokens": 30}
    plain = events(http, "/v1/completions", body)
    assert all("usage" not in chunk for chunk in plain)
    assert plain[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in plain[:-1])
    assert len({chunk["id"] for chunk in plain}) == 1
    asked_for = events(http, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in asked_for[:-1])
    whole = http.post("/v1/completions", json=body).json()
    assert asked_for[-1]["choices"] == []
    assert asked_for[-1]["usage"] == whole["usage"]
    each = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(http, "/v1/completions", body | each)]
    assert counts == sorted(counts)
    assert counts[-1] == whole["usage"]["completion_tokens"]


def test_prompts_of_all_forms_and_n_give_answers_in_order(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    texts = ["one two", "three four", "five six"]
    ids = [tokenizer.encode(said(text)) for text in texts]
    for prompt in ([said(text) for text in texts], ids):
        done = client.completions.create(model="tiny", prompt=prompt, max_tokens=50, n=2)  # type: ignore[arg-type]
        assert [choice.index for choice in done.choices] == list(range(6))
        assert [choice.text for choice in done.choices] == [text for text in texts for _ in range(2)]
        assert done.usage is not None
        assert done.usage.prompt_tokens == sum(map(len, ids))
    assert client.completions.create(model="tiny", prompt=ids[0], max_tokens=50).choices[0].text == "one two"


def test_the_choices_of_a_stream_are_told_apart_by_index(http: httpx.Client) -> None:
    texts = ["one two three", "four", "five six"]
    body = {"prompt": [said(text) for text in texts], "n": 2, "max_tokens": 50, "return_token_ids": True}
    found = [""] * 6
    ends = []
    for chunk in events(http, "/v1/completions", body):
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                ends.append(choice["index"])
    assert found == [text for text in texts for _ in range(2)]
    assert sorted(ends) == list(range(6))


def test_token_ids_come_back_when_asked_for(http: httpx.Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("hello world")
    body = {"prompt": prompt, "max_tokens": 9, "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    want = (prompt * 9)[:9]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (want, prompt)
    chunks = [chunk["choices"][0] for chunk in events(http, "/v1/completions", body)]
    assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == want
    assert "token_ids" not in http.post("/v1/completions", json={"prompt": prompt}).json()["choices"][0]


@pytest.mark.parametrize(
    ("fields", "want", "reason"),
    [
        ({"stop": "four"}, "one two three ", "four"),
        ({"stop": ["nine", "ee f"]}, "one two thr", "ee f"),
        ({"stop": ["two", "one two"], "include_stop_str_in_output": True}, "one two", "one two"),
        ({"stop": "fours"}, "one two three four five", None),
        ({"stop": "five!"}, "one two three four five", None),
    ],
)
def test_stop_strings_end_the_answer_streamed_or_not(
    http: httpx.Client, fields: dict[str, Any], want: str, reason: str | None
) -> None:
    body = {"prompt": said("one two three four five"), "max_tokens": 100, **fields}
    whole = http.post("/v1/completions", json=body).json()
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (want, "stop", reason)
    chunks = events(http, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == want
    assert chunks[-2]["choices"][0]["stop_reason"] == reason
    assert chunks[-1]["usage"] == whole["usage"]


def test_stop_token_ids_ignore_eos_and_min_tokens_reach_the_engine(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    body = {"prompt": said("one two three"), "max_tokens": 20}
    choice = http.post("/v1/completions", json=body | {"stop_token_ids": [ids[2]]}).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (tokenizer.decode(ids[:2]), ids[2])
    ignoring = http.post("/v1/completions", json=body | {"ignore_eos": True}).json()
    assert ignoring["usage"]["completion_tokens"] == 20
    assert ignoring["choices"][0]["finish_reason"] == "length"
    longer = http.post("/v1/completions", json=body | {"min_tokens": 12}).json()
    assert longer["usage"]["completion_tokens"] >= 12


def test_special_tokens_are_shown_when_asked_for(http: httpx.Client) -> None:
    body = {"prompt": said("one<|im_start|>two"), "max_tokens": 20}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "onetwo"
    shown = http.post("/v1/completions", json=body | {"skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == "one<|im_start|>two"


def test_logprobs_of_a_completion_line_up_with_its_text(client: openai.OpenAI, http: httpx.Client) -> None:
    body = {"prompt": said("one 𝄞 two"), "max_tokens": 50, "logprobs": 3}
    choice = client.completions.create(model="tiny", **body).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    for token, offset in zip(found.tokens[:-1], found.text_offset, strict=False):
        if not token.startswith("bytes:"):
            assert choice.text[offset:].startswith(token)
    assert any(token.startswith("bytes:") for token in found.tokens)
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert 3 <= len(top) <= 4
        assert top[token] == logprob == -0.5
    chunks = events(http, "/v1/completions", body)
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert streamed == found.tokens
    only = http.post("/v1/completions", json=body | {"logprobs": 0}).json()["choices"][0]["logprobs"]
    assert [list(top) for top in only["top_logprobs"]] == [[token] for token in only["tokens"]]


def test_tokens_can_be_named_by_id(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
    tokens = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["tokens"]
    assert tokens == [f"token_id:{token_id}" for token_id in tokenizer.encode("hello") * 2][:2]


def test_echo_repeats_the_prompt_with_its_logprobs_the_first_one_null(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    for prompt in ("one two three", ids):
        body = {"prompt": prompt, "max_tokens": 2, "logprobs": 1, "echo": True}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == "one two three" + tokenizer.decode(ids[:2])
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [tokenizer.token_text(token_id) for token_id in ids + ids[:2]]
        assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(ids) + 1)
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"][0] == 0
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)
        chunks = events(http, "/v1/completions", body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


def test_echo_with_max_tokens_0_gives_the_prompt_alone(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": "one two three", "max_tokens": 0, "logprobs": 1, "echo": True}
    whole = http.post("/v1/completions", json=body).json()
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one two three", "length")
    assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode("one two three"))
    assert whole["usage"]["completion_tokens"] == 0
    assert "".join(chunk["choices"][0]["text"] for chunk in events(http, "/v1/completions", body)) == "one two three"


def test_a_prompt_of_ids_that_ends_inside_a_character_is_completed_by_the_answer(
    http: httpx.Client, tokenizer: Tokenizer
) -> None:
    first, second = [tokenizer.token_bytes.index(bytes([byte])) for byte in "é".encode()]
    body = {"prompt": [second, first], "max_tokens": 1}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "é"
    echoed = http.post("/v1/completions", json=body | {"echo": True}).json()["choices"][0]["text"]
    assert echoed == "\ufffdé"


# ---- chats ----

THOUGHTS = [
    # (what the model says, thinking, thought, content)
    ("hm\n</think>\n\nyes 🚢", True, "hm", "yes 🚢"),
    ("hm, cut he", True, "hm, cut he", ""),
    ("yes 🚢", False, "", "yes 🚢"),
    ("yes, cut he", False, "", "yes, cut he"),
]


@pytest.mark.parametrize(("text", "thinking", "thought", "content"), THOUGHTS)
@pytest.mark.parametrize("cut", [False, True])
def test_thought_goes_to_reasoning_content_and_answer_to_content(
    client: openai.OpenAI, tokenizer: Tokenizer, text: str, thinking: bool, thought: str, content: str, cut: bool
) -> None:
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinking}}
    create = client.chat.completions.create
    limit = len(tokenizer.encode(text)) if cut else 100
    reason = "length" if cut else "stop"
    done = create(model="tiny", messages=asked(text), max_tokens=limit, extra_body=options)  # type: ignore[arg-type]
    message = done.choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None) or "") == (content, thought)
    assert message.role == "assistant"
    assert done.choices[0].finish_reason == reason
    assert done.usage is not None
    details = done.usage.completion_tokens_details
    assert details is not None
    assert (details.reasoning_tokens or 0) > 0 if thinking else details.reasoning_tokens == 0

    thoughts, contents, roles, reasons = "", "", [], []
    for chunk in create(
        model="tiny",
        messages=asked(text),  # type: ignore[arg-type]
        max_tokens=limit,
        extra_body=options,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if not chunk.choices:
            assert chunk.usage == done.usage
            continue
        delta = chunk.choices[0].delta
        roles.append(delta.role)
        thoughts += getattr(delta, "reasoning_content", None) or ""
        contents += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert (contents, thoughts) == (content, thought)
    assert roles[0] == "assistant"
    assert set(roles[1:]) <= {None}
    assert reasons == [None] * (len(reasons) - 1) + [reason]


def test_a_template_that_leaves_the_thought_to_the_model_is_split_too(client: openai.OpenAI) -> None:
    for text, thought, content in (("<think>hm</think>yes", "hm", "yes"), ("plain", "", "plain")):
        done = client.chat.completions.create(
            model="tiny",
            messages=asked(text),  # type: ignore[arg-type]
            max_tokens=100,
            extra_body={"chat_template_kwargs": {"style": "bare"}},
        )
        message = done.choices[0].message
        assert (message.content, getattr(message, "reasoning_content", None) or "") == (content, thought)


def test_a_chat_may_use_the_whole_context_unless_told_otherwise(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "on and on"}]
    done = client.chat.completions.create(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        extra_body={"ignore_eos": True},
    )
    assert done.usage is not None
    assert done.usage.total_tokens == 2048
    assert done.choices[0].finish_reason == "length"


def test_chat_logprobs_come_per_token_with_bytes(client: openai.OpenAI, http: httpx.Client) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    done = client.chat.completions.create(
        model="tiny",
        messages=asked("one 🚢"),  # type: ignore[arg-type]
        max_tokens=50,
        logprobs=True,
        top_logprobs=2,
        extra_body=off,
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert done.usage is not None
    assert len(logprobs.content) == done.usage.completion_tokens
    joined = b"".join(bytes(entry.bytes or []) for entry in logprobs.content[:-1])
    assert joined.decode() == "one 🚢"
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in logprobs.content)
    body = {"messages": asked("one 🚢"), "max_tokens": 50, "logprobs": True} | off
    chunks = events(http, "/v1/chat/completions", body)
    entries = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [entry.token for entry in logprobs.content]
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_n_chat_answers_come_together(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="tiny",
        messages=asked("yes"),  # type: ignore[arg-type]
        n=3,
        max_tokens=20,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert [(choice.index, choice.message.content) for choice in done.choices] == [(0, "yes"), (1, "yes"), (2, "yes")]


def test_prompt_token_ids_of_a_chat_show_what_the_template_made(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": True}
    whole = http.post("/v1/chat/completions", json=body).json()
    text = tokenizer.decode(whole["prompt_token_ids"], skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert whole["choices"][0]["token_ids"] == whole["prompt_token_ids"][:1]
    chunks = events(http, "/v1/chat/completions", body | {"max_tokens": 5})
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


# ---- the official client ----


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-x"):
        client.completions.create(model="gpt-x", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature is 101") as caught:
        client.completions.create(model="tiny", prompt="x", temperature=101)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match='tool_choice is "required"'):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            tool_choice="required",
        )


def test_64_streams_of_the_async_client_at_once_each_get_their_own_text(server: RunningServer) -> None:
    async def one(official: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        text = f"answer {number} of 64 🚢"
        stream = await official.completions.create(model="tiny", prompt=said(text), max_tokens=100, stream=True)
        return text, "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as official:
            return await asyncio.gather(*(one(official, number) for number in range(64)))

    for want, found in asyncio.run(all_of_them()):
        assert found == want


def test_more_requests_than_slots_wait_for_their_turn(tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    with running_server(tmp_path, tmp_path, num_slots=2) as small:
        with httpx.Client(base_url=small.url, timeout=20) as http:
            body = {"prompt": [said(f"number {i}") for i in range(20)], "max_tokens": 50}
            choices = http.post("/v1/completions", json=body).json()["choices"]
        assert [choice["text"] for choice in choices] == [f"number {i}" for i in range(20)]
        assert small.metric("bireme_state_slots_total") == 2


def test_a_defect_of_the_server_shows_no_trace_and_no_path(server: RunningServer, tokenizer: Tokenizer) -> None:
    from types import SimpleNamespace

    from server_sim import make_config

    from bireme.server.app import create_app
    from bireme.server.settings import ServerSettings
    from bireme.sim import sim_capacity
    from bireme.types import EngineStats

    def submit(requests: list[Any]) -> None:
        raise RuntimeError(f"a defect in {__file__}")

    engine = SimpleNamespace(config=make_config(server.folder))  # type: ignore[attr-defined]
    broken: Any = SimpleNamespace(
        engine=engine, capacity=sim_capacity(), error=None, is_ready=True, stats=EngineStats(), submit=submit
    )
    app = create_app(broken, tokenizer, None, ServerSettings(served_model_names=("tiny",)))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.post("/v1/completions", json={"prompt": "x"})

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "defect" not in answer.text
    assert "test_server_http" not in answer.text


def test_the_schema_lists_the_endpoints_and_no_page_asks_the_network(http: httpx.Client) -> None:
    assert {"/v1/completions", "/v1/chat/completions", "/health"} <= set(http.get("/openapi.json").json()["paths"])
    assert http.get("/docs").status_code == 404


def test_offsets_of_an_echoed_prompt_count_its_text_as_sent(http: httpx.Client, tokenizer: Tokenizer) -> None:
    prompt = "e\u0301te\u0301 one two"  # not composed: the tokenizer composes it
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"].startswith(prompt)
    logprobs = choice["logprobs"]
    named = dict(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
    assert logprobs["text_offset"][0] == 0
    assert sorted(logprobs["text_offset"]) == logprobs["text_offset"]
    assert logprobs["text_offset"][-1] == len(prompt)
    assert choice["text"][named[" two"] :].startswith(" two")


def test_the_gauges_of_an_engine_without_a_step_are_its_capacity(server: RunningServer, tmp_path: Path) -> None:
    with running_server(server.folder, tmp_path, num_slots=3, num_blocks=50) as fresh:
        for name, value in (("state_slots", 3), ("kv_blocks", 50)):
            assert fresh.metric(f"bireme_{name}_total") == fresh.metric(f"bireme_{name}_free") == value
        assert fresh.metric("vllm:kv_cache_usage_perc") == 0
