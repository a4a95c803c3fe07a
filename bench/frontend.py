"""How fast everything that is not the model streams: HTTP, tokens to text, the engine's loop; on a simulated model.

    python bench/frontend.py [--streams 64 256] [--tokens 1000] [--rounds 3] [--skip-stall] [--append FILE]

Each case prints one JSON line: N streams begin at once and each gets so many tokens from a server (an engine process
and an API process, as in ``bireme serve``) on a simulated model. The limit is a bare uvicorn + FastAPI route that
encodes the same chunks with msgspec and does nothing else. Both take turns, round by round; figures are medians of the
rounds, and ``ratio`` that of the rounds' quotients: on a machine that others use, it says more than a rate. The client
is one process of raw sockets; it shares the cores with the server.

With steps that take no time the engine is ahead of the server, which then sends what several steps brought as one delta
(``tokens_an_event``). In a paced case steps take so long that they would give 120,000 tokens/s, and ``events_s`` says
how many deltas are written. ``*_cpu_us`` is the processor time of each process per token, which depends less on who
else uses the machine.

The last case sends a prompt of 100,000 tokens while 32 others stream at 5 ms a step, and tells the longest silence that
one of them saw, without such a prompt and with it.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import selectors
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from bireme.bench.record import emit, record

PROMPT = "The quick brown fox jumps over the lazy dog, and the oars of the bireme dip into the sea."
EVENT = b"data: "
NUM_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
LONG_PROMPT_TOKENS = 100_000
PACED_TOKENS_A_SECOND = 120_000
STALL_STREAMS = 32
STALL_STEP_SECONDS = 0.005


# ---- servers ----


def make_executor(config: Any, *, step_seconds: float) -> Any:
    """A simulated executor that repeats the prompt."""
    from bireme.sim import SimExecutor, sim_capacity

    capacity = sim_capacity(num_slots=512, num_blocks=1 << 16, max_model_len=1 << 18)
    return SimExecutor(capacity, step_seconds=step_seconds)


def serve_bireme(port: int, step_seconds: float) -> None:
    """The engine and its HTTP server, as ``bireme serve`` has them, on a simulated model."""
    import msgspec

    from bireme.engine_args import build_engine_config
    from bireme.pocket import resolve
    from bireme.server.serve import run_server
    from bireme.server.settings import ServerSettings

    config = build_engine_config(
        resolve("pocket"), device="cpu", max_num_seqs=512, max_num_batched_tokens=8192, max_model_len=None
    )
    config = msgspec.structs.replace(config, scheduler=msgspec.structs.replace(config.scheduler, max_model_len=1 << 18))
    settings = ServerSettings(served_model_names=("sim",), port=port)
    factory = functools.partial(make_executor, step_seconds=step_seconds)
    sys.exit(run_server(config, settings, executor_factory=factory))


def serve_echo(port: int, step_seconds: float) -> None:
    """The limit: the same chunks from a bare FastAPI route."""
    import uvicorn

    from bireme.server.protocol import DONE, CompletionChoice, Envelope, PromptTokensDetails, Usage, event

    app = FastAPI()
    words = [word + " " for word in PROMPT.split()]

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        wanted = (await request.json())["max_tokens"]

        async def chunks() -> Any:
            for index in range(wanted):
                choice = CompletionChoice(0, words[index % len(words)])
                yield event(
                    Envelope("cmpl-0123456789abcdef0123456789abcdef", "text_completion", 0, "sim", [choice], "x")
                )
            usage = Usage(20, wanted, 20 + wanted, PromptTokensDetails(0))
            yield event(Envelope("cmpl", "text_completion", 0, "sim", [], "x", usage)) + DONE

        return StreamingResponse(chunks(), media_type="text/event-stream")

    uvicorn.run(app, port=port, log_level="warning", loop="uvloop", http="httptools", access_log=False)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: where, and as which process."""

    port: int
    pid: int

    def cpu_seconds(self) -> list[float]:
        """Processor time of the process so far, then of each of its children."""
        pids = [self.pid, *map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
        tick = os.sysconf("SC_CLK_TCK")
        return [
            (int(each[11]) + int(each[12])) / tick
            for each, name in zip(fields, names, strict=True)
            if "resource_tracker" not in name
        ]


@contextmanager
def running(serve: Callable[[int, float], None], step_seconds: float = 0.0) -> Iterator[Server]:
    """A server in a process of its own, once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port, step_seconds))
    process.start()
    try:
        deadline = time.monotonic() + 60
        while not _is_healthy(port):
            if time.monotonic() > deadline or not process.is_alive():
                raise SystemExit(f"{serve.__name__} did not come up")
            time.sleep(0.05)
        assert process.pid is not None
        yield Server(port, process.pid)
    finally:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGINT)
        process.join(30)
        if process.is_alive():
            process.kill()


def _is_healthy(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return b" 200 " in connection.recv(100)
    except OSError:
        return False


# ---- the client ----


@dataclass(slots=True)
class Stream:
    """One streamed answer as its reader saw it. Times are on the performance counter."""

    connection: socket.socket
    num_events: int = 0
    num_tokens: int = 0
    num_reads: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    tail: bytes = b""
    arrivals: list[float] = field(default_factory=list)


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    encoded = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


def stream_all(
    port: int,
    requests: list[bytes],
    *,
    keep_arrivals: bool = False,
    on_time: tuple[float, Callable[[], None]] | None = None,
) -> tuple[float, list[Stream]]:
    """Send all the requests at once and read every answer to its end; returns when they were sent, and the answers.

    Args:
        on_time: seconds after the start, and what to call then.
    """
    selector = selectors.DefaultSelector()
    streams = []
    for _ in requests:
        connection = socket.create_connection(("127.0.0.1", port))
        streams.append(Stream(connection))
    started = time.perf_counter()
    for stream, request in zip(streams, requests, strict=True):
        stream.connection.sendall(request)
        stream.connection.setblocking(False)
        selector.register(stream.connection, selectors.EVENT_READ, stream)
    num_open = len(streams)
    while num_open:
        for key, _ in selector.select(0.001 if on_time is not None else 30.0):
            stream = key.data
            data = stream.connection.recv(1 << 18)
            now = time.perf_counter()
            if not data:
                raise SystemExit(f"a stream ended early: {stream.tail[-300:]!r}")
            if not stream.num_reads:
                if b" 200 " not in data[:20]:
                    raise SystemExit(f"not a stream: {data[:500]!r}")
                stream.first_at = now
            stream.num_reads += 1
            stream.num_events += data.count(EVENT)
            if keep_arrivals:
                stream.arrivals.append(now)
            # An event that is cut between two reads is not seen; the count of tokens comes from the usage.
            stream.tail = (stream.tail + data)[-1000:] if len(data) < 1000 else data[-1000:]
            if b"[DONE]" in stream.tail:
                stream.last_at = now
                stream.num_tokens = int(NUM_TOKENS.findall(stream.tail)[-1])
                selector.unregister(stream.connection)
                stream.connection.close()
                num_open -= 1
        if on_time is not None and time.perf_counter() - started > on_time[0]:
            on_time[1]()
            on_time = None
    return started, streams


def body_for(chat: bool, num_tokens: int) -> bytes:
    common = {
        "model": "sim",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    if chat:
        messages = [{"role": "user", "content": PROMPT}]
        return request_bytes("/v1/chat/completions", {"messages": messages, **common})
    return request_bytes("/v1/completions", {"prompt": PROMPT, **common})


def measure(server: Server, num_streams: int, num_tokens: int, *, chat: bool = False) -> dict[str, float]:
    """Tokens/s from the sending of the requests to the last byte, and how the first tokens came."""
    cpu = server.cpu_seconds()
    started, streams = stream_all(server.port, [body_for(chat, num_tokens)] * num_streams)
    cpu = [after - before for after, before in zip(server.cpu_seconds(), cpu, strict=True)]
    ended = max(stream.last_at for stream in streams)
    total = sum(stream.num_tokens for stream in streams)
    if total != num_streams * num_tokens:
        raise SystemExit(f"{total} tokens came where {num_streams * num_tokens} were due")
    num_events = sum(stream.num_events for stream in streams) - 2 * num_streams
    first = sorted(stream.first_at - started for stream in streams)
    return {
        "tok_s": total / (ended - started),
        "events_s": num_events / (ended - started),
        "tokens_an_event": total / num_events,
        "ttft_p50_ms": first[len(first) // 2] * 1e3,
        "ttft_max_ms": first[-1] * 1e3,
        "server_cpu_us": cpu[0] / total * 1e6,
        "engine_cpu_us": cpu[1] / total * 1e6 if len(cpu) > 1 else 0.0,
    }


def speed_case(num_streams: int, num_tokens: int, rounds: int, *, chat: bool, is_paced: bool) -> dict[str, Any]:
    """The server and the limit, in turns."""
    ours, limits = [], []
    step_seconds = num_streams / PACED_TOKENS_A_SECOND if is_paced else 0.0
    with running(serve_bireme, step_seconds) as server, running(serve_echo) as echo:
        measure(server, 8, 50, chat=chat)
        measure(echo, 8, 50)
        for _ in range(rounds):
            limits.append(measure(echo, num_streams, num_tokens))
            ours.append(measure(server, num_streams, num_tokens, chat=chat))
    return {
        "case": "chat" if chat else "completions",
        "streams": num_streams,
        "tokens": num_tokens,
        "rounds": rounds,
        "step_ms": round(step_seconds * 1e3, 3),
        **{name: round(statistics.median(each[name] for each in ours), 1) for name in ours[0]},
        "limit_tok_s": round(statistics.median(each["tok_s"] for each in limits), 1),
        "limit_cpu_us": round(statistics.median(each["server_cpu_us"] for each in limits), 1),
        "ratio": round(statistics.median(a["tok_s"] / b["tok_s"] for a, b in zip(ours, limits, strict=True)), 3),
        "best_tok_s": round(max(each["tok_s"] for each in ours), 1),
        "best_ttft_p50_ms": round(min(each["ttft_p50_ms"] for each in ours), 1),
    }


def stall_case() -> dict[str, Any]:
    """What a prompt of 100,000 tokens does to those who stream meanwhile."""
    words = PROMPT + " "
    text = words * (LONG_PROMPT_TOKENS // 32)
    long_body = {
        "model": "sim",
        "prompt": text,
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    long_request = request_bytes("/v1/completions", long_body)
    requests = [body_for(False, 400)] * STALL_STREAMS
    silences: dict[str, float] = {}
    num_prompt_tokens = 0
    with running(serve_bireme, STALL_STEP_SECONDS) as server:
        port = server.port
        # Cut to exactly the wanted number of tokens by the server's own count.
        _, streams = stream_all(port, [long_request])
        found = re.findall(rb'"prompt_tokens":(\d+)', streams[0].tail)
        share = LONG_PROMPT_TOKENS / int(found[-1])
        long_request = request_bytes("/v1/completions", {**long_body, "prompt": text[: int(len(text) * share)]})
        for name in ("without", "with"):
            longest = []
            for _ in range(3):
                sender = socket.create_connection(("127.0.0.1", port))
                sender.setblocking(True)

                def send(sender: socket.socket = sender) -> None:
                    multiprocessing.get_context("fork").Process(
                        target=sender.sendall, args=(long_request,), daemon=True
                    ).start()

                on_time = (0.7, send if name == "with" else lambda: None)
                _, streams = stream_all(port, requests, keep_arrivals=True, on_time=on_time)
                longest.append(
                    max(
                        later - earlier
                        for stream in streams
                        for earlier, later in zip(stream.arrivals[20:], stream.arrivals[21:], strict=False)
                    )
                )
                if name == "with":
                    answer = b""
                    while b"[DONE]" not in answer:
                        answer += sender.recv(1 << 16)
                    num_prompt_tokens = int(re.findall(rb'"prompt_tokens":(\d+)', answer)[-1])
                sender.close()
            silences[name] = statistics.median(longest) * 1e3
    return {
        "case": "long prompt",
        "streams": STALL_STREAMS,
        "step_ms": STALL_STEP_SECONDS * 1e3,
        "prompt_tokens": num_prompt_tokens,
        "longest_silence_ms_without": round(silences["without"], 1),
        "longest_silence_ms_with": round(silences["with"], 1),
        "stall_ms": round(silences["with"] - silences["without"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-stall", action="store_true", help="leave the long prompt out")
    parser.add_argument("--append", type=Path, help="also append the lines to this file")
    args = parser.parse_args()
    cases: list[Callable[[], dict[str, Any]]] = [
        functools.partial(speed_case, num_streams, args.tokens, args.rounds, chat=chat, is_paced=is_paced)
        for num_streams in args.streams
        for is_paced in (False, True)
        for chat in (False, True)
    ]
    if not args.skip_stall:
        cases.append(stall_case)
    for case in cases:
        load = os.getloadavg()[0]
        emit(record("frontend", load_before=round(load, 2), **case()), args.append)


if __name__ == "__main__":
    main()
