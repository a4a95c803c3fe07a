"""Spans of calls, as a collector gets them over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_support import RunningServer, build_tokenizer, raw_post, running_server

from bireme.errors import ConfigError
from bireme.server.telemetry import Tracing

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A collector for the length of a test.

    Attributes:
        spans: what it got, each as (the service's name, the span).
        delay: seconds that it takes for each batch.
    """

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[tuple[str, Any]] = []
        self.delay = 0.0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                time.sleep(collector.delay)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    name = attributes_of(resource.resource)["service.name"]
                    collector.spans += [(name, span) for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}/v1/traces"

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def attributes_of(holder: Any) -> dict[str, Any]:
    """The attributes of a span or a resource as plain values."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(each) for each in found.values] if kind == "array_value" else found

    return {each.key: plain(each.value) for each in holder.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(path)
    return path


def serving(folder: Path, tmp_path: Path, endpoint: str, **options: Any) -> Any:
    return running_server(folder, tmp_path, settings={"otlp_traces_endpoint": endpoint}, **options)


def stop(server: RunningServer) -> float:
    """SIGTERM, which hands over what has not been sent; the seconds that it took."""
    started = time.monotonic()
    server.process.terminate()
    assert server.process.wait(30) == 0
    return time.monotonic() - started


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"<|say|>{text}<|said|>"}], **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_one_span_in_its_callers_trace(
    folder: Path, tmp_path: Path, collector: Collector, stream: bool
) -> None:
    fields = {"max_tokens": 40, "temperature": 0.5, "top_p": 0.75, "seed": 7, "stream": stream}
    with serving(folder, tmp_path, collector.endpoint, step_seconds=0.01) as server:
        before = time.time_ns()
        response = httpx.post(
            f"{server.url}/v1/chat/completions",
            json=chat("one two three", **fields),
            headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"},
        )
        after = time.time_ns()
        assert response.status_code == 200
        assert stop(server) < 10
    ((service, span),) = collector.spans
    assert service == "bireme" and span.name == "chat tiny" and span.kind == 2
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= after + 50_000_000
    found = attributes_of(span)
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 20,
        "gen_ai.request.seed": 7,
        "gen_ai.request.n": 1,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.num_sequences": 1,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found["gen_ai.request.id"].startswith("chatcmpl-")
    if not stream:
        usage = response.json()["usage"]
        assert found["gen_ai.request.id"] == response.json()["id"]
        assert found["gen_ai.usage.prompt_tokens"] == found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert found["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] > 2
    latency = {name: found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")}
    assert 0 <= latency["time_in_queue"] < latency["time_to_first_token"] < latency["e2e"]
    assert latency["e2e"] == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=1e-3)
    assert span.status.code == 0 and "error.type" not in found
    assert "three" not in str(span), "a span must not tell what was said"


def test_each_endpoint_has_its_span_and_several_answers_are_summed(
    folder: Path, tmp_path: Path, collector: Collector
) -> None:
    with serving(folder, tmp_path, collector.endpoint) as server:
        server.post({"prompt": ["one two", "three"], "n": 2, "max_tokens": 5, "ignore_eos": True})
        server.post({"input": "<|say|>hello<|said|>"}, "/v1/responses")
        server.post({"prompt": 3})
        server.post({}, "/tokenize")
        stop(server)
    completion, response = (span for _, span in collector.spans)
    assert (completion.name, response.name) == ("text_completion tiny", "chat tiny")
    found = attributes_of(completion)
    assert found["gen_ai.usage.completion_tokens"] == 20 and found["gen_ai.usage.num_sequences"] == 4
    assert found["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert "gen_ai.request.seed" not in found
    assert attributes_of(response)["gen_ai.request.id"].startswith("resp_")
    assert completion.trace_id != response.trace_id and not completion.parent_span_id


def test_a_call_that_fails_or_whose_client_leaves_says_so(folder: Path, tmp_path: Path, collector: Collector) -> None:
    long = {"prompt": "one two three", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    settings = {"otlp_traces_endpoint": collector.endpoint, "request_timeout": 0.6}
    with running_server(folder, tmp_path, settings=settings, step_seconds=0.01) as server:
        raw_post(server.port, "/v1/completions", long, read=True).close()
        server.wait_for("vllm:num_requests_running", 0)
        assert server.post({**long, "stream": False}).status_code == 504
        stop(server)
    found = {attributes_of(span)["error.type"]: span for _, span in collector.spans}
    assert sorted(found) == ["499", "504"]
    assert all(span.status.code == 2 for span in found.values())
    assert "--request-timeout" in found["504"].status.message
    assert attributes_of(found["499"])["gen_ai.response.finish_reasons"] == ["none"]


def test_a_caller_that_does_not_sample_gets_no_span(folder: Path, tmp_path: Path, collector: Collector) -> None:
    with serving(folder, tmp_path, collector.endpoint) as server:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "one"}, headers=headers).status_code == 200
        headers = {"traceparent": "this is none"}
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "one"}, headers=headers).status_code == 200
        stop(server)
    ((_, span),) = collector.spans
    assert span.trace_id.hex() != TRACE_ID and not span.parent_span_id


def test_no_call_waits_for_a_slow_collector_and_none_fails_for_a_missing_one(
    folder: Path, tmp_path: Path, collector: Collector
) -> None:
    collector.delay = 2.0
    with serving(folder, tmp_path, collector.endpoint) as server:
        started = time.monotonic()
        for _ in range(600):  # More than a batch, so that one is on its way meanwhile.
            assert server.post({"prompt": "one", "max_tokens": 1}).status_code == 200
            assert time.monotonic() - started < 30
        longest = 0.0
        for _ in range(50):
            before = time.monotonic()
            server.post({"prompt": "one", "max_tokens": 1})
            longest = max(longest, time.monotonic() - before)
        assert longest < 1.0
        stop(server)
    assert len(collector.spans) == 650
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with serving(folder, tmp_path, f"http://127.0.0.1:{closed.getsockname()[1]}/v1/traces") as server:
            assert server.post({"prompt": "one", "max_tokens": 1}).status_code == 200
            assert stop(server) < 10


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://", "/v1/traces"])
def test_an_endpoint_that_is_no_address_is_refused_by_its_flag(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        Tracing(endpoint)


def test_without_the_library_the_error_says_what_to_install() -> None:
    script = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ImportError(f"{name} is absent here")
sys.meta_path.insert(0, Absent())
from bireme.cli import app
app(["serve", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces", "--port", "0"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "pip install 'bireme[otel]'" in " ".join(done.stderr.split())
