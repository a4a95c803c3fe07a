"""What the server's tests share: a tokenizer, and servers on the simulated engine in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from bireme.server.tokenizer import Tokenizer

SERVER = str(Path(__file__).with_name("server_sim.py"))

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|say|>", "<|said|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TEMPLATE = """\
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and not loop.first -%}
        {{- raise_exception('the system message must come first') -}}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}
    {{- message.content -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
        {%- for key, value in call.function.arguments.items() -%}
            {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' -}}
        {%- endfor -%}
        {{- '</function>\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if style == 'bare' -%}
    {%- elif enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- else -%}
        {{- '<think>\\n' -}}
    {%- endif -%}
{%- endif -%}
"""

CORPUS = """\
The quick brown fox jumps over the lazy dog, and the dog does not mind at all. hello world, hello there.
Stop here. Stop there. One two three four five six seven eight nine ten eleven twelve.
船は夜明け前に港を出た。배는 새벽이 되기 전에 항구를 떠났다. Ship: 🚢 and a wave.
"""


def build_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer and a chat template in Qwen's manner into ``folder``."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "chat_template": "unused"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


class RunningServer:
    """A server process of the tests' own.

    Attributes:
        process: the HTTP process; the engine is its child.
        scratch: its folder for temporary files.
        port: where it listens.
    """

    def __init__(self, folder: Path, log: Path, options: dict[str, Any], settings: dict[str, Any]) -> None:
        self.log = log
        command = [sys.executable, SERVER, str(folder), json.dumps(options), json.dumps(settings)]
        self._output = log.open("w")
        # Short: the engine's sockets lie there, and their paths must not be long.
        self.scratch = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
        environment = {**os.environ, "TMPDIR": str(self.scratch)}
        self.process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, env=environment)
        self._http = httpx.Client(timeout=10)
        self.port = 0
        deadline = time.monotonic() + 30
        while not self.port and self.process.poll() is None and time.monotonic() < deadline:
            for line in log.read_text().splitlines():
                if "listening on http://127.0.0.1:" in line:
                    self.port = int(line.split("127.0.0.1:")[1].split(";")[0])
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, seconds: float = 30.0) -> None:
        """Wait until /health is 200."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if self.health() == 200:
                    return
            time.sleep(0.02)
        raise AssertionError(f"not ready: {self.log.read_text()[-2000:]}")

    def health(self) -> int:
        """The status of /health."""
        return self.get("/health").status_code

    def get(self, path: str) -> httpx.Response:
        """GET over a kept connection."""
        return self._http.get(self.url + path)

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        """POST over a kept connection."""
        return self._http.post(self.url + path, json=body)

    def family(self) -> list[int]:
        """Ids of the process and of all its descendants that are alive."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    if stat[0] != "Z":
                        children.setdefault(int(stat[1]), []).append(int(entry.name))
        found, queue = [], [self.process.pid]
        while queue:
            pid = queue.pop()
            found.append(pid)
            queue += children.get(pid, [])
        return found

    def engine_pid(self) -> int:
        """The engine process."""
        for pid in self.family()[1:]:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"spawn_main" in command:
                return pid
        raise AssertionError("there is no engine process")

    def metric(self, name: str) -> float:
        """One sample of /metrics."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + "{"):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"there is no metric {name}")

    def wait_for(self, name: str, value: float, seconds: float = 10.0) -> None:
        """Wait until a metric has a value."""
        deadline = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.01)

    def end(self) -> None:
        """Whatever happened: leave nothing behind."""
        for pid in self.family():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._http.close()
        self._output.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


@contextlib.contextmanager
def running_server(folder: Path, tmp_path: Path, *, ready: bool = True, **options: Any) -> Iterator[RunningServer]:
    """A server on the simulated engine. Options of ``make_executor``; those of ServerSettings as ``settings``."""
    settings = options.pop("settings", {})
    server = RunningServer(folder, tmp_path / f"server-{time.monotonic_ns()}.log", options, settings)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.end()


def pull(trip: Path, how: str) -> None:
    """Make the simulated executor fail (see ``StoppableExecutor``); the file appears with its content."""
    draft = trip.with_suffix(".draft")
    draft.write_text(how)
    draft.rename(trip)


def raw_post(port: int, path: str, body: dict[str, Any] | bytes, *, read: bool = False) -> socket.socket:
    """Send a request over a bare socket; with ``read``, return once the first byte of the answer is there."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    if read:
        assert sock.recv(1)
    return sock


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


FLIGHT_TOOL = {
    "type": "function",
    "function": {
        "name": "find_flight",
        "description": "Find a flight between two cities.",
        "parameters": {
            "type": "object",
            "properties": {"origin": {"type": "string"}, "destination": {"type": "string"}},
            "required": ["origin", "destination"],
        },
    },
}
"""A function that the pocket model calls when it is asked for a flight."""
