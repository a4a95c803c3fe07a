"""An OpenAI-compatible server under load: bursts of streamed completions over HTTP, and what each client saw.

The client is one process of bare sockets that stamps what arrives and parses it afterwards, so that the figures are the
server's; ``client_cpu`` is its share of one core.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import httpx

from bireme.bench.record import median
from bireme.errors import ConfigError

WARM_UP_TOKENS = 8
MAX_ERRORS_SHOWN = 3

_EVENT = re.compile(rb"^data: ", re.MULTILINE)
_DONE = b"data: [DONE]"
_NUM_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass
class Case:
    """A burst: ``concurrency`` completions that begin at once, as often as ``rounds`` says."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    rounds: int


@dataclass
class Stream:
    """What one request saw. Times are of ``time.perf_counter``.

    Attributes:
        sent: when its request was written.
        arrivals: (time, events) of each read that brought events; the last event is the usage.
        num_tokens: as the server counts them.
        error: why it counts as failed, or None.
    """

    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """When the first token was there."""
        return self.arrivals[0][0]

    @property
    def last(self) -> float:
        """When the last one was."""
        return self.arrivals[-1][0]

    def gaps(self) -> list[float]:
        """Seconds between tokens, as they became visible; those that came in one read came at once."""
        found = []
        for (before, _), (now, events) in pairwise(self.arrivals):
            found += [now - before] + [0.0] * (events - 1)
        return found


class _Connection(asyncio.Protocol):
    """Sends one request and keeps what comes back, with the time of each read."""

    def __init__(self, payload: bytes, stream: Stream, ended: asyncio.Future[None]) -> None:
        self.payload, self.stream, self.ended = payload, stream, ended
        self.reads: list[tuple[float, bytes]] = []
        self.transport: Any = None
        self.tail = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.stream.sent = time.perf_counter()
        transport.write(self.payload)

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), data))
        self.tail = (self.tail + data)[-64:]
        if _DONE in self.tail:
            self.transport.close()
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done() and exc is not None:
            self.stream.error = f"the connection broke: {exc}"
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def read_stream(reads: list[tuple[float, bytes]], stream: Stream, wanted: int | None) -> None:
    """Fill ``stream`` from what arrived: the status, the events by their times, the server's token count.

    Args:
        wanted: tokens that a complete answer has; None if it may end earlier.
    """
    if stream.error is not None:
        return
    body = b"".join(data for _, data in reads)
    status = body.partition(b"\r\n")[0]
    if b" 200 " not in status + b" ":
        detail = body[body.find(b"{") :][:200].decode("utf-8", "replace") if b"{" in body else ""
        stream.error = f"{status.decode('latin-1') or 'no answer'} {detail}".strip()
        return
    if _DONE not in body:
        stream.error = "the stream ended without [DONE]"
        return
    ends = []
    position = 0
    for at, data in reads:
        position += len(data)
        ends.append((position, at))
    counts: dict[float, int] = {}
    read = 0
    for match in _EVENT.finditer(body):
        while match.end() > ends[read][0]:
            read += 1
        event = body[match.end() : body.find(b"\n", match.end())]
        if event.startswith(b"[DONE]") or b'"choices":[]' in event or b'"choices": []' in event:
            continue
        counts[ends[read][1]] = counts.get(ends[read][1], 0) + 1
    stream.arrivals = sorted(counts.items())
    found = _NUM_TOKENS.findall(body)
    stream.num_tokens = int(found[-1]) if found else 0
    if not stream.arrivals:
        stream.error = "a stream without a token"
    elif not found:
        stream.error = "the server did not say how many tokens it sent (stream_options.include_usage)"
    elif wanted is not None and stream.num_tokens != wanted:
        stream.error = f"{stream.num_tokens} tokens where {wanted} were due"


class Client:
    """Bursts against one server.

    Args:
        url: its address, without /v1.
        model: the name it serves; asked for when None.
        ignore_eos: send ``ignore_eos`` (Bireme, vLLM), and count answers of another length as failures.
        timeout: seconds that a burst may take.
    """

    def __init__(
        self, url: str, model: str | None = None, *, ignore_eos: bool = True, timeout: float = 600.0, seed: int = 0
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}: it must be like http://127.0.0.1:8000")
        self.secure = parts.scheme == "https"
        self.host, self.port = parts.hostname, parts.port or (443 if self.secure else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.ignore_eos, self.timeout = ignore_eos, timeout
        self._random = random.Random(seed)
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        scheme = "https" if self.secure else "http"
        url = f"{scheme}://{self.host}:{self.port}{self.path}/v1/models"
        try:
            return str(httpx.get(url, timeout=30).raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise ConfigError(f"--url: asking {url} for its model failed: {error}") from error

    def request(self, prompt_tokens: int, output_tokens: int) -> bytes:
        """A streamed completion as bytes on the wire; the prompt is random ids below 256, which every vocabulary of
        this family has as bytes."""
        content: dict[str, Any] = {
            "model": self.model,
            "prompt": [self._random.randrange(256) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            content["ignore_eos"] = True
        body = json.dumps(content).encode()
        head = (
            f"POST {self.path}/v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def _one(self, payload: bytes) -> _Connection:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        stream = Stream(sent=time.perf_counter())
        connection = _Connection(payload, stream, ended)
        try:
            await loop.create_connection(lambda: connection, self.host, self.port, ssl=True if self.secure else None)
            await asyncio.wait_for(ended, self.timeout)
        except TimeoutError:  # before OSError, which it is one of
            stream.error = f"no end after {self.timeout:g} s"
            if connection.transport is not None:
                connection.transport.abort()
        except OSError as error:
            stream.error = f"cannot connect: {error}"
        return connection

    def burst(self, concurrency: int, prompt_tokens: int, output_tokens: int) -> list[Stream]:
        """``concurrency`` completions that begin at once."""
        payloads = [self.request(prompt_tokens, output_tokens) for _ in range(concurrency)]
        wanted = output_tokens if self.ignore_eos else None

        async def together() -> list[_Connection]:
            return await asyncio.gather(*(self._one(payload) for payload in payloads))

        connections = asyncio.run(together())
        for connection in connections:
            read_stream(connection.reads, connection.stream, wanted)
        return [connection.stream for connection in connections]

    def measure(self, case: Case) -> dict[str, Any]:
        """The fields of a case's JSON line."""
        warm_up = self.burst(case.concurrency, case.prompt_tokens, min(WARM_UP_TOKENS, case.output_tokens))
        rounds = []
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(case.rounds):
            rounds.append(self.burst(case.concurrency, case.prompt_tokens, case.output_tokens))
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        errors = [stream.error for stream in warm_up if stream.error is not None]
        return summarize(case, rounds, errors) | {"client_cpu": round(share, 3)}


def summarize(case: Case, rounds: list[list[Stream]], warm_up_errors: list[str]) -> dict[str, Any]:
    """Percentiles over all requests of all rounds, rates as medians over rounds.

    ``tok_s`` counts from the first request to the last token. ``steady_tok_s`` counts while every stream had begun and
    none had ended: decode alone.
    """
    streams = [stream for streams in rounds for stream in streams]
    good = [stream for stream in streams if stream.error is None]
    errors = warm_up_errors + [stream.error for stream in streams if stream.error is not None]
    found: dict[str, Any] = {
        "kind": "serve",
        "concurrency": case.concurrency,
        "prompt_tokens": case.prompt_tokens,
        "output_tokens": case.output_tokens,
        "requests": len(streams) + len(warm_up_errors),
        "failures": len(errors),
        "errors": sorted(set(errors))[:MAX_ERRORS_SHOWN],
    }
    if not good:
        return found
    whole, steady = [], []
    for burst in rounds:
        done = [stream for stream in burst if stream.error is None]
        if not done:
            continue
        took = max(stream.last for stream in done) - min(stream.sent for stream in done)
        whole.append(sum(stream.num_tokens for stream in done) / took)
        begin, end = max(stream.first for stream in done), min(stream.last for stream in done)
        if end > begin:
            events = sum(count for stream in done for at, count in stream.arrivals if begin < at <= end)
            total = sum(count for stream in done for _, count in stream.arrivals)
            tokens = events * sum(stream.num_tokens for stream in done) / total
            steady.append(tokens / (end - begin))
    per_token = [(stream.last - stream.first) / (stream.num_tokens - 1) for stream in good if stream.num_tokens > 1]
    return found | {
        "tok_s": round(median(whole), 1),
        "steady_tok_s": round(median(steady), 1) if steady else None,
        "ttft_ms": _percentiles([stream.first - stream.sent for stream in good]),
        "tpot_ms": _percentiles(per_token),
        "itl_ms": _percentiles([gap for stream in good for gap in stream.gaps()]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 3)

    return {"p50": at(0.5), "p99": at(0.99), "mean": round(sum(ordered) / len(ordered) * 1e3, 3)}


def describe(line: dict[str, Any]) -> str:
    """A case as a line for a person."""
    text = f"{line['concurrency']:4} × ({line['prompt_tokens']} in, {line['output_tokens']} out)"
    if "tok_s" in line:
        ttft, tpot, itl = (line[name] or {"p50": 0.0, "p99": 0.0} for name in ("ttft_ms", "tpot_ms", "itl_ms"))
        steady = "-" if line["steady_tok_s"] is None else f"{line['steady_tok_s']:,.0f}"
        text += (
            f": {line['tok_s']:,.0f} tok/s ({steady} steady); TTFT {ttft['p50']:.1f} / {ttft['p99']:.1f} ms, TPOT "
            f"{tpot['p50']:.2f} / {tpot['p99']:.2f}, ITL {itl['p50']:.2f} / {itl['p99']:.2f}; client "
            f"{line['client_cpu']:.0%} of a core"
        )
    text += f"; {line['failures']} of {line['requests']} failed"
    return text + (f": {line['errors'][0]}" if line["errors"] else "")
