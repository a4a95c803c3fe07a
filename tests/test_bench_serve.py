"""The serving benchmark's client, against small servers that behave well or badly, and its arithmetic."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from bireme.bench.serve import Case, Client, Stream, describe, read_stream, summarize
from bireme.cli import app
from bireme.errors import ConfigError


def event(content: dict[str, Any] | str) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content)
    return f"data: {text}\n\n".encode()


def token(text: str = "a") -> bytes:
    return event({"choices": [{"text": text}]})


def usage(count: int) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": count}})


Behaviour = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """Lists a model, and leaves completions to ``behaviour``."""

    protocol_version = "HTTP/1.1"
    behaviour: Behaviour

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "served"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).behaviour(self, body)

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, events: list[bytes], pause: float = 0.0) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in events:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
            time.sleep(pause)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def server(behaviour: Behaviour) -> Iterator[str]:
    handler = type("Bound", (Handler,), {"behaviour": staticmethod(behaviour)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def well_behaved(handler: Handler, body: dict[str, Any]) -> None:
    count = body["max_tokens"]
    handler.stream([token()] * count + [usage(count), event("[DONE]")], pause=0.002)


def test_a_burst_of_good_streams_has_no_failure_and_every_token() -> None:
    seen: list[dict[str, Any]] = []

    def behaviour(handler: Handler, body: dict[str, Any]) -> None:
        seen.append(body)
        well_behaved(handler, body)

    with server(behaviour) as url:
        line = Client(url).measure(Case(concurrency=5, prompt_tokens=7, output_tokens=12, rounds=2))
    assert (line["failures"], line["requests"]) == (0, 10)
    assert line["tok_s"] > 0
    assert 0 < line["ttft_ms"]["p50"] <= line["ttft_ms"]["p99"]
    assert line["tpot_ms"]["p50"] > 0
    assert len(seen) == 15, "a burst to warm up, then two"
    assert all(body["stream"] and body["ignore_eos"] and body["temperature"] == 0 for body in seen)
    assert all(len(body["prompt"]) == 7 and body["model"] == "served" for body in seen)
    assert len({tuple(body["prompt"]) for body in seen}) == 15, "prompts differ, so that no cache answers"
    assert "0 of 10 failed" in describe(line)


def refuse(handler: Handler, body: dict[str, Any]) -> None:
    handler.answer(503, b'{"error": {"message": "not now"}}')


def break_off(handler: Handler, body: dict[str, Any]) -> None:
    handler.stream([token(), token()])
    handler.close_connection = True


def stop_early(handler: Handler, body: dict[str, Any]) -> None:
    handler.stream([token(), token(), usage(2), event("[DONE]")])


def say_nothing(handler: Handler, body: dict[str, Any]) -> None:
    handler.stream([token()] * body["max_tokens"] + [event("[DONE]")])


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (refuse, "503"),
        (break_off, r"without \[DONE\]"),
        (stop_early, "2 tokens where 6 were due"),
        (say_nothing, "did not say how many"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure_with_its_reason(behaviour: Behaviour, message: str) -> None:
    with server(behaviour) as url:
        line = Client(url, timeout=10).measure(Case(concurrency=2, prompt_tokens=3, output_tokens=6, rounds=1))
    assert line["failures"] >= 2
    assert re.search(message, line["errors"][0])
    assert "tok_s" not in line


def test_answers_may_end_early_where_nothing_else_was_asked_for() -> None:
    with server(stop_early) as url:
        line = Client(url, ignore_eos=False).measure(Case(concurrency=2, prompt_tokens=3, output_tokens=6, rounds=1))
    assert line["failures"] == 0


def test_a_server_that_is_not_there_is_said_by_its_address() -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/v1/models"):
        Client("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="--url is 'ftp://x'"):
        Client("ftp://x")


def test_the_command_exits_with_1_when_a_request_failed_and_0_when_none_did(tmp_path: Any) -> None:
    out = tmp_path / "lines.jsonl"
    flags = ["--concurrency", "2", "--prompt-tokens", "4", "--output-tokens", "5", "--rounds", "1", "--out", str(out)]
    with server(well_behaved) as url:
        result = CliRunner().invoke(app, ["bench", "serve", "--url", url, *flags])
    assert result.exit_code == 0, result.output
    line = json.loads(out.read_text())
    assert (line["bench"], line["kind"], line["concurrency"], line["failures"]) == ("serve", "serve", 2, 0)
    with server(refuse) as url:
        assert CliRunner().invoke(app, ["bench", "serve", "--url", url, *flags]).exit_code == 1


def test_events_are_stamped_with_the_read_that_completed_them() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    body = token("one") + token("two") + token("three") + usage(3) + event("[DONE]")
    cut = body.index(b"three")
    stream = Stream(sent=1.0)
    read_stream([(2.0, head + token("one")), (3.0, body[len(token("one")) : cut]), (4.0, body[cut:])], stream, 3)
    assert stream.error is None
    assert stream.arrivals == [(2.0, 1), (3.0, 2)], "the third event's name came with the second read"
    assert stream.gaps() == [1.0, 0.0]
    assert stream.num_tokens == 3


def test_rates_count_from_the_first_request_and_while_all_streams_decode() -> None:
    streams = [
        Stream(sent=0.0, arrivals=[(1.0, 1), (2.0, 1), (3.0, 1)], num_tokens=3),
        Stream(sent=0.0, arrivals=[(2.0, 1), (3.0, 1), (4.0, 1)], num_tokens=3),
    ]
    line = summarize(Case(2, 1, 3, 1), [streams], [])
    assert line["tok_s"] == 1.5
    assert line["steady_tok_s"] == 2.0
    assert line["ttft_ms"]["p99"] == 2000.0
    assert line["tpot_ms"]["p50"] == 1000.0
