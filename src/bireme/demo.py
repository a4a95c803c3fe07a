"""``make demo``: a server on two ranks, sixteen streams at once, what came back, and what batching buys.

The model is a tiny random one, so its text means nothing; what can be checked is that every stream is complete, and
that each prompt gets the answer it gets alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import openai
from rich.console import Console
from rich.table import Table

from bireme.dummy import write_dummy_checkpoint

NUM_STREAMS = 16
MAX_TOKENS = 48
TP_SIZE = 2
START_SECONDS = 120.0
STOP_SECONDS = 60.0

PROMPTS = (
    "The two banks of oars",
    "A galley leaves harbour",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "The capital of France is",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "Il était une fois",
    "昔々あるところに",
    "옛날 옛적에",
    "🚣 🚣 🚣",
    "SELECT name FROM",
    "In the beginning",
    "E = mc",
    "To be, or not",
)


@dataclass
class Stream:
    """One streamed completion: its text, tokens, finish reason, and seconds to the first and the last token."""

    text: str
    num_tokens: int
    finish_reason: str | None
    first: float
    last: float


@dataclass
class RunningServer:
    """A ``bireme serve`` process that answers."""

    process: subprocess.Popen[bytes]
    url: str

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


@contextlib.contextmanager
def running_server(model: str | Path, *flags: str, log: IO[bytes] | None = None) -> Iterator[RunningServer]:
    """Start ``bireme serve`` on a free port and wait until it is healthy; it is gone when the block ends.

    Args:
        log: where its output goes; None for this process's own.

    Raises:
        RuntimeError: it ended, or was not healthy in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bireme", "serve", str(model), "--port", str(port), *flags]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    server = RunningServer(process, f"http://127.0.0.1:{port}")
    try:
        _wait_healthy(server)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_healthy(server: RunningServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(verify=False, timeout=5.0) as client:
        while time.monotonic() < deadline:
            code = server.process.poll()
            if code is not None:
                raise RuntimeError(f"the server ended with code {code} before it was healthy")
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{server.url}/health").status_code == 200:
                    return
            time.sleep(0.1)
    raise RuntimeError(f"the server was not healthy within {START_SECONDS:g} s")


async def stream_all(url: str, model: str) -> list[Stream]:
    """All prompts at once, each as a stream of its own."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(prompt: str) -> Stream:
            started = time.perf_counter()
            first = 0.0
            pieces: list[str] = []
            reason, num_tokens = None, 0
            chunks = await client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in chunks:
                first = first or time.perf_counter() - started
                for choice in chunk.choices:
                    pieces.append(choice.text)
                    reason = choice.finish_reason or reason
                if chunk.usage is not None:
                    num_tokens = chunk.usage.completion_tokens
            return Stream("".join(pieces), num_tokens, reason, first, time.perf_counter() - started)

        return list(await asyncio.gather(*(one(prompt) for prompt in PROMPTS)))


def alone(url: str, model: str) -> list[str]:
    """The same prompts one after another, not streamed."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        texts = []
        for prompt in PROMPTS:
            done = client.completions.create(model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0.0)
            texts.append(done.choices[0].text)
        return texts


def show(streams: list[Stream], texts_alone: list[str], console: Console) -> bool:
    """Print what came back; True when every stream is complete and equals its solo run."""
    table = Table(title=f"{NUM_STREAMS} streams at once, TP{TP_SIZE}", title_justify="left", expand=True)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", ratio=2)
    table.add_column("answer (random weights)", no_wrap=True, overflow="ellipsis", ratio=3)
    for name in ("tok", "first", "last", "ended", "alone"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    all_good = True
    for prompt, stream, text in zip(PROMPTS, streams, texts_alone, strict=True):
        complete = stream.finish_reason == "stop" or (
            stream.finish_reason == "length" and stream.num_tokens == MAX_TOKENS
        )
        equal = stream.text == text
        all_good = all_good and complete and equal
        table.add_row(
            prompt,
            repr(stream.text)[1:-1],
            str(stream.num_tokens),
            f"{stream.first:.2f} s",
            f"{stream.last:.2f} s",
            stream.finish_reason or "[red]nothing[/red]",
            "same" if equal else "[red]other[/red]",
        )
    console.print(table)
    total = sum(stream.num_tokens for stream in streams)
    seconds = max(stream.last for stream in streams)
    console.print(f"{total} tokens in {seconds:.2f} s through HTTP: {total / seconds:,.0f} tokens/s", highlight=False)
    return all_good


def main() -> int:
    """Run the demo; 0 when everything checked out."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    with tempfile.TemporaryDirectory(prefix="bireme-demo-") as folder:
        write_dummy_checkpoint(folder)
        console.print(f"a tiny random model, served on {TP_SIZE} ranks: bireme serve {folder} --tp {TP_SIZE}")
        with running_server(folder, "--tp", str(TP_SIZE), "--served-model-name", "demo") as server:
            streams = asyncio.run(stream_all(server.url, "demo"))
            texts_alone = alone(server.url, "demo")
            code = server.stop()
        good = show(streams, texts_alone, console)
        if code != 0:
            console.print(f"[red]the server ended with code {code}[/red]")
        bench = [sys.executable, "-m", "bireme", "bench", "decode", folder, "--tp", str(TP_SIZE)]
        bench_code = subprocess.run([*bench, "--tokens", "64", "--rounds", "1"], env=os.environ).returncode
    console.print("[green]all good[/green]" if good and code == bench_code == 0 else "[red]something is wrong[/red]")
    return 0 if good and code == bench_code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
