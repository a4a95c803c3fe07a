"""The guards of a server: keys, CORS, limits of size and time, request ids, logs, and silence in streams."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_support import RunningServer, build_tokenizer, raw_post, running_server

from bireme.errors import ConfigError, InvalidRequestError
from bireme.server import chat as chat_module
from bireme.server.chat import ChatTemplate
from bireme.server.guard import KEYS_VARIABLE, check_origins, read_api_keys
from bireme.server.settings import ServerSettings
from bireme.server.wording import without_folders

COMPLETIONS = "/v1/completions"
PROBE = {"prompt": "<|say|>all is well<|said|>", "max_tokens": 20}
ENDLESS = {"prompt": "hello world", "max_tokens": 1000, "ignore_eos": True}
KEYS = ["first-key", "second-key"]
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard")
    build_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[RunningServer]:
    """A server with keys, one allowed origin, small limits, and a log for programs."""
    settings = {
        "api_keys": KEYS,
        "allowed_origins": [ORIGIN],
        "max_body_bytes": 100_000,
        "max_header_bytes": 4000,
        "max_sequences": 6,
        "log_format": "json",
        "access_log": True,
    }
    with running_server(folder, folder, settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def http(guarded: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=20, headers={"authorization": f"Bearer {KEYS[1]}"}) as client:
        yield client


@pytest.fixture(scope="module")
def slow(folder: Path) -> Iterator[RunningServer]:
    """Steps of 50 ms, one slot; streams are never silent for longer than 0.2 s, nor calls longer than 1.5 s."""
    settings = {"sse_keep_alive": 0.2, "request_timeout": 1.5, "max_queue_tokens": 100}
    with running_server(folder, folder, num_slots=1, step_seconds=0.05, settings=settings) as server:
        yield server


def answer_of(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a response on a bare socket, read until the server closes it."""
    data = b""
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while piece := sock.recv(65536):
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body


def has_the_error_form(body: bytes) -> dict[str, Any]:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- keys ----


@pytest.mark.parametrize(
    "header",
    [
        None,
        "Bearer wrong",
        "Bearer  x",
        "Basic first-key",
        "first-key",
        "Bearer first-key2",
        "Bearer first-ke",
        "Bearer é",
    ],
)
def test_a_call_without_a_valid_key_is_refused_and_shows_none(guarded: RunningServer, header: str | None) -> None:
    headers = {} if header is None else {b"authorization": header.encode("latin-1")}
    answer = httpx.post(guarded.url + COMPLETIONS, json=PROBE, headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert has_the_error_form(answer.content)["code"] == "invalid_api_key"
    assert not any(key in answer.text for key in KEYS)
    assert answer.headers["x-request-id"]


def test_each_key_is_accepted_and_the_official_client_sends_its_own(guarded: RunningServer) -> None:
    for key in KEYS:
        with openai.OpenAI(base_url=guarded.url + "/v1", api_key=key, max_retries=0) as client:
            assert client.completions.create(model="tiny", **PROBE).choices[0].text == "all is well"
    with (
        openai.OpenAI(base_url=guarded.url + "/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_probes_need_no_key_and_everything_else_does(guarded: RunningServer) -> None:
    for path in ("/health", "/metrics", "/version"):
        assert httpx.get(guarded.url + path).status_code == 200
    for path in (
        "/v1/models",
        "/openapi.json",
        "/v1/nothing",
        "/tokenize",
        "//health",
        "/health/",
        "/metrics/../v1/models",
    ):
        assert httpx.get(guarded.url + path).status_code == 401, path


def test_keys_come_from_flags_a_file_and_else_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "from-environment")
    path = tmp_path / "keys"
    path.write_text("# people\nalice-key\n\n  bob-key\n")
    assert read_api_keys([], None) == ("from-environment",)
    assert read_api_keys(["flag"], path) == ("flag", "alice-key", "bob-key")
    monkeypatch.delenv(KEYS_VARIABLE)
    assert read_api_keys([], None) == ()


def test_a_key_file_that_guards_nothing_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        read_api_keys([], tmp_path / "absent")
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_api_keys([], tmp_path / "empty")
    for bad in ("", "two words", "schlüssel", "line\nbreak"):
        with pytest.raises(ConfigError, match="printable") as caught:
            read_api_keys([bad], None)
        assert not bad or bad not in str(caught.value)


# ---- CORS ----


def test_a_page_of_an_allowed_origin_may_call_and_no_other(http: httpx.Client, guarded: RunningServer) -> None:
    wish = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    asked = httpx.options(guarded.url + COMPLETIONS, headers=wish)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in asked.headers["access-control-allow-methods"]
    refused = httpx.options(guarded.url + COMPLETIONS, headers=wish | {"origin": "https://evil.example"})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    called = http.post(COMPLETIONS, json=PROBE, headers={"origin": ORIGIN})
    assert called.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in called.headers["access-control-expose-headers"].lower()
    assert "access-control-allow-origin" not in http.get("/health", headers={"origin": "https://evil.example"}).headers
    # A page must be able to read why it was refused.
    keyless = httpx.post(guarded.url + COMPLETIONS, json=PROBE, headers={"origin": ORIGIN})
    assert (keyless.status_code, keyless.headers["access-control-allow-origin"]) == (401, ORIGIN)


def test_credentials_from_every_origin_are_refused_at_the_start() -> None:
    names = ("x",)
    with pytest.raises(ConfigError, match="--allow-credentials"):
        check_origins(ServerSettings(served_model_names=names, allowed_origins=("*",), allow_credentials=True))
    check_origins(ServerSettings(served_model_names=names, allowed_origins=("*",)))
    check_origins(ServerSettings(served_model_names=names, allowed_origins=(ORIGIN,), allow_credentials=True))


def test_without_allowed_origins_no_page_may_call(slow: RunningServer) -> None:
    answer = httpx.get(slow.url + "/health", headers={"origin": ORIGIN})
    assert not any(name.startswith("access-control") for name in answer.headers)


# ---- sizes ----


@pytest.mark.parametrize("how", ["one long header", "many headers", "a long path"])
def test_a_request_head_that_is_too_long_is_answered_431_in_openais_form(guarded: RunningServer, how: str) -> None:
    path, headers = "/health", "x: " + "h" * 5000 + "\r\n"
    if how == "many headers":
        headers = "".join(f"x-{i}: {i}\r\n" for i in range(600))
    elif how == "a long path":
        path, headers = "/" + "p" * 5000, ""
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=5) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())
        status, found, body = answer_of(sock)
    assert status == 431
    assert found["content-type"] == "application/json"
    assert has_the_error_form(body)["code"] == "headers_too_large"
    assert guarded.health() == 200


@pytest.mark.parametrize("how", ["one header", "many headers", "an endless one"])
def test_200_kb_of_headers_are_answered_431_whatever_they_are(slow: RunningServer, how: str) -> None:
    headers = {
        "one header": "x: " + "h" * 200_000 + "\r\n\r\n",
        "many headers": "".join(f"x-{i}: {'v' * 90}\r\n" for i in range(2000)) + "\r\n",
        "an endless one": "x: " + "h" * 200_000,
    }
    with socket.create_connection(("127.0.0.1", slow.port), timeout=5) as sock:
        sock.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n{headers[how]}".encode())
        status, found, body = answer_of(sock)
    assert (status, found["content-type"]) == (431, "application/json")
    assert has_the_error_form(body)["code"] == "headers_too_large"
    assert len(body) < 500
    assert "Traceback" not in slow.log.read_text()
    assert slow.health() == 200


def test_a_header_that_never_ends_is_cut_off(guarded: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=5) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 10_000_000:
                sock.sendall(b"h" * 1000)
                sent += 1000
                time.sleep(0.001)
    assert sent < 1_000_000
    assert guarded.health() == 200


def test_a_large_body_does_not_count_as_a_long_head(guarded: RunningServer, http: httpx.Client) -> None:
    for _ in range(3):
        answer = http.post(COMPLETIONS, json=PROBE | {"stop": ["z" * 1000] * 32, "user": "u" * 60_000})
        assert answer.status_code == 200
    assert http.post(COMPLETIONS, json={"prompt": "x" * 120_000}).status_code == 413


@pytest.mark.parametrize(
    "junk",
    [
        b"GET\r\n\r\n",
        b"\r\n\r\nGARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
        b"FETCH /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx: a\x00b\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=lambda junk: ascii(junk)[2:30],
)
def test_bytes_that_are_no_http_are_answered_in_openais_form(guarded: RunningServer, junk: bytes) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=5) as sock:
        sock.sendall(junk)
        status, found, body = answer_of(sock)
    assert (status, found["content-type"]) == (400, "application/json")
    has_the_error_form(body)
    assert b"Traceback" not in body
    assert "Traceback" not in guarded.log.read_text()
    assert guarded.health() == 200


@pytest.mark.parametrize(
    "body", [b"zz\r\nabc\r\n0\r\n\r\n", b"3\r\nabcdef\r\n0\r\n\r\n"], ids=["no size", "a wrong size"]
)
def test_a_body_in_broken_chunks_ends_its_connection_and_leaves_no_trace(slow: RunningServer, body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", slow.port), timeout=5) as sock:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        sock.sendall(head.encode() + body)
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65536):
                data += piece
    assert not data or data.startswith(b"HTTP/1.1 4")
    assert b"Traceback" not in data
    assert "Traceback" not in slow.log.read_text()
    assert slow.health() == 200


def test_one_call_may_not_ask_for_more_answers_than_the_limit(http: httpx.Client) -> None:
    refused = http.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 4})
    assert refused.status_code == 400
    assert "at most 6 at once (--max-sequences)" in refused.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "x"}], "n": 7}
    assert http.post("/v1/chat/completions", json=chat).status_code == 400
    assert http.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 3, "max_tokens": 1}).status_code == 200


def test_waiting_prompt_tokens_beyond_the_limit_are_answered_429(slow: RunningServer) -> None:
    running = raw_post(slow.port, COMPLETIONS, ENDLESS | {"stream": True}, read=True)
    waiting = raw_post(slow.port, COMPLETIONS, {"prompt": [5] * 90, "max_tokens": 1, "stream": True})
    slow.wait_for("vllm:num_requests_waiting", 1)
    refused = slow.post({"prompt": [5] * 20})
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert "90 prompt tokens wait" in error["message"]
    for sock in (running, waiting):
        sock.close()
    slow.wait_for("vllm:num_requests_waiting", 0)
    # What has left waits no longer, and a long prompt alone is served.
    assert slow.post({"prompt": [5] * 200, "max_tokens": 1}).status_code == 200


# ---- times ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_takes_too_long_is_ended_and_told_so(slow: RunningServer, stream: bool) -> None:
    answer = httpx.post(slow.url + COMPLETIONS, json=ENDLESS | {"stream": stream}, timeout=10)
    if stream:
        assert answer.status_code == 200
        error = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 504
        error = answer.json()["error"]
    assert error["code"] == "timeout"
    assert "--request-timeout" in error["message"]
    slow.wait_for("bireme_state_slots_free", 1)
    assert slow.metric("bireme_kv_blocks_free") == slow.metric("bireme_kv_blocks_total")


def test_a_call_that_waits_too_long_in_the_queue_is_ended_too(slow: RunningServer) -> None:
    with contextlib.closing(raw_post(slow.port, COMPLETIONS, ENDLESS | {"stream": True}, read=True)):
        queued = [raw_post(slow.port, COMPLETIONS, ENDLESS) for _ in range(2)]
        statuses = [answer_of(sock)[0] for sock in queued if sock.settimeout(3) is None]
    assert 504 in statuses
    slow.wait_for("bireme_state_slots_free", 1)


def test_a_stream_that_has_nothing_to_say_gets_comments_until_it_has(slow: RunningServer) -> None:
    running = raw_post(slow.port, COMPLETIONS, ENDLESS | {"stream": True}, read=True)
    with (
        openai.OpenAI(base_url=slow.url + "/v1", api_key="none", max_retries=0) as client,
        httpx.stream("POST", slow.url + COMPLETIONS, json=PROBE | {"stream": True}, timeout=10) as answer,
    ):
        assert answer.status_code == 200
        text = ""
        for piece in answer.iter_text():
            text += piece
            if text.count(": keep-alive\n\n") == 3:
                running.close()
        assert text.startswith(": keep-alive\n\n" * 3)
        assert text.endswith("data: [DONE]\n\n")
        # The official client skips comments.
        pieces = client.completions.create(model="tiny", stream=True, **PROBE)
        assert "".join(piece.choices[0].text for piece in pieces) == "all is well"


def test_a_head_that_dribbles_in_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio
    from types import SimpleNamespace

    import uvicorn

    from bireme.server import guard

    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nothing complete arrives")

    async def talk() -> tuple[bytes, bytes]:
        settings = ServerSettings(served_model_names=("x",))
        metrics: Any = SimpleNamespace(http_errors=Counter())
        protocol = guard.connection_class(settings, metrics)
        config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
        config.load()
        state: Any = SimpleNamespace(connections=set(), tasks=set(), default_headers=[], total_requests=0)
        make = config.http_protocol_class
        server = await asyncio.get_running_loop().create_server(
            lambda: make(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        found = []
        for start in (b"GET / HTTP/1.1\r\nx: ", b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            found.append(await asyncio.wait_for(reader.read(), 5))
            writer.close()
        server.close()
        return found[0], found[1]

    dribbled, silent = asyncio.run(talk())
    assert dribbled.startswith(b"HTTP/1.1 408 ")
    has_the_error_form(dribbled.partition(b"\r\n\r\n")[2])
    assert silent == b""


# ---- ids and logs ----


def test_a_request_id_comes_back_in_the_response_and_in_the_log(guarded: RunningServer, http: httpx.Client) -> None:
    mine = {"x-request-id": "trace-7.a:b"}
    answer = http.post(COMPLETIONS, json=PROBE | {"user": "ann"}, headers=mine)
    assert answer.headers["x-request-id"] == "trace-7.a:b"
    assert http.post(COMPLETIONS, json={}, headers=mine).headers["x-request-id"] == "trace-7.a:b"
    assert http.get("/nowhere", headers=mine).headers["x-request-id"] == "trace-7.a:b"
    ids = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    lines = [json.loads(line) for line in guarded.log.read_text().splitlines()]
    about = [line["message"] for line in lines if line.get("request_id") == "trace-7.a:b"]
    assert any("user" in message and "ann" in message for message in about)
    assert any(message.startswith("POST /v1/completions: 200 in ") for message in about)
    assert any(message.startswith("POST /v1/completions: 400 in ") for message in about)
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)


@pytest.mark.parametrize("bad", ["", "two words", "x" * 129, "semi;colon", "<script>"])
def test_a_request_id_that_cannot_be_trusted_is_refused(guarded: RunningServer, http: httpx.Client, bad: str) -> None:
    answer = http.get("/v1/models", headers={"x-request-id": bad})
    assert answer.status_code == 400
    assert has_the_error_form(answer.content)["param"] == "X-Request-Id"
    assert answer.headers["x-request-id"] != bad


def test_the_official_client_reads_the_request_id(guarded: RunningServer) -> None:
    with openai.OpenAI(base_url=guarded.url + "/v1", api_key=KEYS[0], max_retries=0) as client:
        done = client.completions.create(model="tiny", extra_headers={"X-Request-Id": "mine-1"}, **PROBE)
        assert done._request_id == "mine-1"


def test_no_key_is_ever_written_to_the_log(guarded: RunningServer, http: httpx.Client) -> None:
    http.get("/v1/models")
    assert not any(key in guarded.log.read_text() for key in KEYS)


def test_what_an_engine_says_of_its_files_leaves_the_folders_out() -> None:
    told = "cannot read /home/ann/models/x/a.safetensors: gone (see https://example.org/a/b, 3/4, /tmp)"
    assert without_folders(told) == "cannot read a.safetensors: gone (see https://example.org/a/b, 3/4, /tmp)"


# ---- templates ----


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}"
        + "{% endfor %}" * 2,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * 999999999 }}",
        "{{ [0] * 999999999 }}",
        "{{ 9 ** 99999999 }}",
        "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_would_run_or_grow_for_ever_or_look_around_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_module, "RENDER_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match="the chat template"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - started < 20


def test_what_bounds_a_template_does_not_change_what_it_writes() -> None:
    source = (
        "{% macro twice(t) %}{{ t * 2 }}{% endmacro %}"
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ twice(m.content) }}{% else %}none{% endfor %}"
    )
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]) == "1abab2cc"
    assert template.render([]) == "none"
    with pytest.raises(InvalidRequestError, match="_meter"):
        template.render([], _meter=1)
