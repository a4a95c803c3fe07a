"""Clients that leave, full queues, engines that die, servers that are told to go: real processes throughout."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_support import RunningServer, build_tokenizer, pull, raw_post, running_server

STEP = 0.05
ENDLESS = {"prompt": "hello world", "max_tokens": 2000, "ignore_eos": True}
PROBE = {"prompt": "<|say|>all is well<|said|>", "max_tokens": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lifecycle")
    build_tokenizer(path)
    return path


class Reader(threading.Thread):
    """Reads an answer to its end in the background.

    Attributes:
        status: of the answer; 0 while there is none.
        text: what has come so far.
    """

    def __init__(self, server: RunningServer, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.status, self.text = 0, ""
        self.headers: dict[str, str] = {}
        self._url, self._body = server.url + "/v1/completions", body
        self.start()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", self._url, json=self._body, timeout=30) as answer,
        ):
            self.status, self.headers = answer.status_code, dict(answer.headers)
            for piece in answer.iter_text():
                self.text += piece

    def wait_for_text(self) -> None:
        deadline = time.monotonic() + 10
        while not self.text and self.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def error(self) -> dict[str, Any]:
        """The error that ended the answer, in a stream or instead of one."""
        self.join(15)
        assert not self.is_alive()
        last = self.text.strip().split("\n\n")[-1].removeprefix("data: ")
        return json.loads(last)["error"]


def wait_until_gone(pids: list[int], seconds: float = 8.0) -> None:
    deadline = time.monotonic() + seconds
    left = pids
    while left:
        left = [pid for pid in left if is_running(pid)]
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- clients that leave ----


@pytest.fixture(scope="module")
def slow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Steps take a while, and there are two slots."""
    with running_server(folder, tmp_path_factory.mktemp("slow"), num_slots=2, step_seconds=STEP) as server:
        yield server


def leave(sock: socket.socket, how: str) -> None:
    """A half-close counts as leaving: on the wire it is the FIN of a client that has closed its socket."""
    if how == "RST":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    elif how == "FIN":
        sock.close()
    else:
        sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("how", ["RST", "FIN", "half-close"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_decode_frees_its_slot_within_two_steps(
    slow: RunningServer, how: str, stream: bool
) -> None:
    sock = raw_post(slow.port, "/v1/completions", ENDLESS | {"stream": stream}, read=stream)
    slow.wait_for("vllm:num_requests_running", 1)
    time.sleep(2 * STEP)
    left = slow.metric("bireme_client_disconnects_total")
    leave(sock, how)
    steps = slow.metric("bireme_steps_total")
    slow.wait_for("bireme_state_slots_free", 2)
    assert slow.metric("bireme_steps_total") - steps <= 2
    assert slow.metric("bireme_kv_blocks_free") == slow.metric("bireme_kv_blocks_total")
    slow.wait_for("bireme_client_disconnects_total", left + 1)
    if how == "half-close":
        sock.settimeout(5)
        while piece := sock.recv(65536):
            assert b"[DONE]" not in piece
    sock.close()


@pytest.mark.parametrize("how", ["RST", "FIN", "half-close"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_prefill_frees_its_slot_within_two_steps(
    slow: RunningServer, how: str, stream: bool
) -> None:
    prefilled = slow.metric("bireme_prefill_tokens_total")
    generated = slow.metric("vllm:generation_tokens_total")
    sock = raw_post(slow.port, "/v1/completions", {"prompt": [5] * 1900, "max_tokens": 100, "stream": stream})
    slow.wait_for("vllm:num_requests_running", 1)
    leave(sock, how)
    steps = slow.metric("bireme_steps_total")
    slow.wait_for("bireme_state_slots_free", 2)
    assert slow.metric("bireme_steps_total") - steps <= 2
    assert slow.metric("bireme_kv_blocks_free") == slow.metric("bireme_kv_blocks_total")
    assert slow.metric("bireme_prefill_tokens_total") - prefilled < 1900
    assert slow.metric("vllm:generation_tokens_total") == generated
    sock.close()


@pytest.mark.parametrize("how", ["RST", "FIN", "half-close"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_queued_leaves_the_queue_within_two_steps(
    slow: RunningServer, how: str, stream: bool
) -> None:
    running = [raw_post(slow.port, "/v1/completions", ENDLESS | {"stream": True}, read=True) for _ in range(2)]
    queued = raw_post(slow.port, "/v1/completions", ENDLESS | {"stream": stream})
    slow.wait_for("vllm:num_requests_waiting", 1)
    leave(queued, how)
    steps = slow.metric("bireme_steps_total")
    slow.wait_for("vllm:num_requests_waiting", 0)
    assert slow.metric("bireme_steps_total") - steps <= 2
    assert slow.metric("vllm:num_requests_running") == 2
    for sock in (*running, queued):
        sock.close()
    slow.wait_for("bireme_state_slots_free", 2)
    assert slow.metric("bireme_kv_blocks_free") == slow.metric("bireme_kv_blocks_total")


def test_all_answers_of_a_call_end_when_its_client_leaves(slow: RunningServer) -> None:
    sock = raw_post(slow.port, "/v1/completions", ENDLESS | {"n": 6, "stream": True}, read=True)
    slow.wait_for("vllm:num_requests_waiting", 4)
    sock.close()
    slow.wait_for("bireme_state_slots_free", 2)
    assert slow.metric("vllm:num_requests_waiting") == 0


def test_a_stop_string_ends_the_request_in_the_engine_too(slow: RunningServer) -> None:
    body = ENDLESS | {"prompt": "one two three", "stop": "two"}
    answer = httpx.post(slow.url + "/v1/completions", json=body, timeout=20).json()
    assert answer["choices"][0]["text"] == "one "
    slow.wait_for("bireme_state_slots_free", 2)


def test_a_client_that_does_not_read_holds_up_nobody(slow: RunningServer) -> None:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", slow.port))
    body = json.dumps(ENDLESS | {"stream": True, "logprobs": 20}).encode()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    slow.wait_for("vllm:num_requests_running", 1)
    answer = httpx.post(slow.url + "/v1/completions", json=PROBE, timeout=10)
    assert answer.json()["choices"][0]["text"] == "all is well"
    sock.close()
    slow.wait_for("bireme_state_slots_free", 2)


def test_a_long_prompt_being_tokenized_does_not_hold_up_streams(slow: RunningServer) -> None:
    with (
        openai.OpenAI(base_url=slow.url + "/v1", api_key="none", max_retries=0) as client,
        client.completions.create(
            model="tiny", prompt="hello", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        ) as stream,
    ):
        next(stream)
        refused = Reader(slow, {"prompt": "The quick brown fox. " * 100_000})
        gaps, last = [], time.monotonic()
        for _ in stream:
            now = time.monotonic()
            gaps.append(now - last)
            last = now
    refused.join(30)
    assert refused.status == 400
    # Tokenizing takes the better part of a second; a stream that waited for it would show that.
    assert max(gaps) < STEP + 0.4, sorted(gaps)[-3:]


# ---- full queues ----


def test_a_full_queue_is_answered_429_with_retry_after(folder: Path, tmp_path: Path) -> None:
    with running_server(folder, tmp_path, num_slots=1, max_waiting=1, step_seconds=STEP) as server:
        running = Reader(server, ENDLESS | {"stream": True})
        running.wait_for_text()
        queued = raw_post(server.port, "/v1/completions", ENDLESS)
        server.wait_for("vllm:num_requests_waiting", 1)
        for stream in (False, True):
            answer = server.post(ENDLESS | {"stream": stream})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        with (
            openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.RateLimitError),
        ):
            client.completions.create(model="tiny", prompt="x")
        # A call whose answers only fit in part is refused whole, and leaves nothing behind.
        queued.close()
        server.wait_for("vllm:num_requests_waiting", 0)
        assert server.post(ENDLESS | {"n": 3}).status_code == 429
        server.wait_for("vllm:num_requests_waiting", 0)
        assert running.is_alive()


# ---- starting ----


def test_health_is_503_while_loading_and_requests_are_told_to_come_back(folder: Path, tmp_path: Path) -> None:
    with running_server(folder, tmp_path, ready=False, load_seconds=1.5) as server:
        health = server.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "loading")
        answer = server.post(PROBE)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert server.get("/v1/models").status_code == 200
        assert server.metric("bireme_engine_up") == 0
        server.wait_ready()
        assert server.post(PROBE).status_code == 200
        assert server.metric("bireme_engine_up") == 1


@pytest.mark.parametrize(
    ("failure", "words"),
    [("checkpoint", "tensor 'norm.weight' is missing"), ("defect", "ZeroDivisionError: a defect while loading")],
)
def test_an_engine_that_cannot_start_ends_the_server_with_its_own_words(
    folder: Path, tmp_path: Path, failure: str, words: str
) -> None:
    with running_server(folder, tmp_path, ready=False, failure=failure) as server:
        assert server.process.wait(15) == 1
        assert words in server.log.read_text()
        assert list(server.scratch.iterdir()) == []


def test_a_port_in_use_is_refused_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    from server_sim import make_config

    from bireme.errors import ConfigError
    from bireme.server.serve import run_server
    from bireme.server.settings import ServerSettings

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} \(--port\)"):
            run_server(make_config(folder), ServerSettings(served_model_names=("x",), port=port))
    with pytest.raises(ConfigError, match="--host"):
        run_server(make_config(folder), ServerSettings(served_model_names=("x",), host="no.such.host.invalid"))


def test_a_signal_while_loading_ends_everything(folder: Path, tmp_path: Path) -> None:
    with running_server(folder, tmp_path, ready=False, load_seconds=30) as server:
        time.sleep(0.5)
        family = server.family()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        wait_until_gone(family)


# ---- leaving ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish_and_exits_0(folder: Path, tmp_path: Path, number: int) -> None:
    with running_server(folder, tmp_path, step_seconds=0.02, num_slots=2) as server:
        family = server.family()
        text = "one two three four five " * 6
        body = {"prompt": f"<|say|>{text}<|said|>", "max_tokens": 300}
        streamed = Reader(server, body | {"stream": True})
        streamed.wait_for_text()
        whole, queued = Reader(server, body), Reader(server, body)
        server.wait_for("vllm:num_requests_running", 2)
        server.wait_for("vllm:num_requests_waiting", 1)
        # A terminal sends Ctrl-C to the whole group, so the engine gets it too.
        for pid in (server.process.pid, server.engine_pid()):
            os.kill(pid, number)
        time.sleep(0.3)
        with pytest.raises(httpx.TransportError):
            server.post(PROBE)
        for reader in (whole, queued):
            reader.join(15)
            assert json.loads(reader.text)["choices"][0]["text"] == text
        streamed.join(15)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert server.process.wait(10) == 0
        wait_until_gone(family)
        assert list(server.scratch.iterdir()) == []


def test_what_does_not_finish_within_the_grace_is_told_so_and_the_exit_is_0(folder: Path, tmp_path: Path) -> None:
    with running_server(folder, tmp_path, step_seconds=0.02, settings={"shutdown_grace": 0.5}) as server:
        family = server.family()
        streamed, whole = Reader(server, ENDLESS | {"stream": True}), Reader(server, ENDLESS)
        streamed.wait_for_text()
        server.wait_for("vllm:num_requests_running", 2)
        server.process.send_signal(signal.SIGTERM)
        assert "shut down" in streamed.error()["message"]
        assert "shut down" in whole.error()["message"]
        assert (streamed.status, whole.status) == (200, 503)
        assert "[DONE]" not in streamed.text
        assert server.process.wait(10) == 0
        wait_until_gone(family)


def test_a_second_signal_ends_what_still_runs(folder: Path, tmp_path: Path) -> None:
    with running_server(folder, tmp_path, step_seconds=0.02) as server:
        family = server.family()
        streamed = Reader(server, ENDLESS | {"stream": True})
        streamed.wait_for_text()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert streamed.is_alive()
        server.process.send_signal(signal.SIGTERM)
        assert "shut down" in streamed.error()["message"]
        assert server.process.wait(5) == 0
        wait_until_gone(family)


# ---- dying ----


@pytest.mark.parametrize("how", ["rank", "defect", "exit", "SIGKILL"])
def test_an_engine_that_dies_gives_every_open_request_one_error_and_ends_the_server(
    folder: Path, tmp_path: Path, how: str
) -> None:
    trip = tmp_path / "trip"
    with running_server(
        folder, tmp_path, num_slots=2, step_seconds=0.02, trip=str(trip), settings={"death_notice": 1.5}
    ) as server:
        family = server.family()
        streamed = Reader(server, ENDLESS | {"stream": True})
        streamed.wait_for_text()
        whole = Reader(server, ENDLESS)
        server.wait_for("vllm:num_requests_running", 2)
        queued = Reader(server, ENDLESS | {"stream": True})
        server.wait_for("vllm:num_requests_waiting", 1)
        if how == "SIGKILL":
            os.kill(server.engine_pid(), signal.SIGKILL)
        else:
            pull(trip, how)
        words = {"rank": "rank 1 died", "defect": "a defect in the loop", "exit": "code 9", "SIGKILL": "SIGKILL"}[how]
        for reader in (streamed, whole, queued):
            assert words in reader.error()["message"]
            assert reader.text.count('"error":{') == 1
        assert (streamed.status, whole.status, queued.status) == (200, 503, 503)
        health = server.get("/health")
        assert health.status_code == 503
        assert words in health.json()["error"]["message"]
        assert server.post(PROBE).status_code == 503
        assert server.process.wait(8) == 1
        wait_until_gone(family)
        assert list(server.scratch.iterdir()) == []


def test_an_engine_that_is_told_to_leave_alone_finishes_its_work_and_ends_the_server(
    folder: Path, tmp_path: Path
) -> None:
    with running_server(folder, tmp_path, step_seconds=0.02) as server:
        running = Reader(server, PROBE | {"max_tokens": 40, "ignore_eos": True, "stream": True})
        running.wait_for_text()
        os.kill(server.engine_pid(), signal.SIGTERM)
        running.join(10)
        assert running.text.endswith("data: [DONE]\n\n")
        assert server.process.wait(8) == 1
        assert "told to leave" in server.log.read_text()


def test_a_rank_that_dies_while_the_engine_is_idle_is_noticed_within_two_seconds(folder: Path, tmp_path: Path) -> None:
    trip = tmp_path / "trip"
    with running_server(folder, tmp_path, trip=str(trip)) as server:
        pull(trip, "rank")
        started = time.monotonic()
        while server.health() == 200:
            assert time.monotonic() - started < 2
            time.sleep(0.02)
        assert server.process.wait(8) == 1


def test_a_server_killed_outright_takes_its_engine_with_it(folder: Path, tmp_path: Path) -> None:
    with running_server(folder, tmp_path, step_seconds=0.02) as server:
        family = server.family()
        running = Reader(server, ENDLESS | {"stream": True})
        running.wait_for_text()
        server.process.kill()
        wait_until_gone(family)
        assert list(server.scratch.iterdir()) == []
