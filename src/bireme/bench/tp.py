"""Two ranks against one: throughput over HTTP, batched and per request; all-reduces; memory; logits; a rank killed.

    python -m bireme.bench.tp [--geometry 27b,4b] [--out FILE] [--budget 540]

Everything runs on as many GPUs as there are: two ranks take one each, or share the only one; without any, the CPU.
Each result is a JSON line as soon as it is known; one table and the bars come last. What does not fit the time budget
or cannot run here is a line that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bireme.bench.geometry import geometry_folder, write_weights
from bireme.bench.record import emit, record
from bireme.bench.runner import REPORT_FOLDER, read_reports
from bireme.bench.serve import Case, Client
from bireme.bench.step import memory_line
from bireme.engine import EngineCore
from bireme.engine_args import build_engine_config
from bireme.errors import BiremeError, ExecutorError
from bireme.executor.launcher import create_executor
from bireme.local_server import RunningServer, running_server
from bireme.types import Request, SamplingParams, TokenLogprobs

BOUNDS = {"mean": 0.06, "p99": 0.20}
"""Nats: the golden gate's, for the log-probabilities of two ranks against one."""

TOP = 20
KILL_TOKENS = 512
"""Output of the streams that run while a rank is killed."""

RETURN_SECONDS = 15.0
RETURNED_BYTES = 300 << 20
"""After a kill, the GPU's memory must be within this of what it was, before so many seconds have passed."""


@dataclass
class Settings:
    """What to run.

    Attributes:
        geometries: for throughput; the first also for the kill.
        logits: a cut geometry for logits, written to disk.
        budget: seconds for everything; a part that would overrun is skipped.
        concurrency, prompt_tokens, output_tokens: of a burst.
        per_request_tokens: output of a burst of one-row plans, which take long; rates are of decode alone.
        device: "cuda" or "cpu".
    """

    geometries: list[str] = field(default_factory=lambda: ["27b", "4b"])
    logits: str = "27b:8"
    budget: float = 540.0
    concurrency: int = 16
    prompt_tokens: int = 128
    output_tokens: int = 256
    per_request_tokens: int = 32
    device: str = "cuda"
    out: Path | None = None

    @property
    def num_gpus(self) -> int:
        return torch.cuda.device_count() if self.device == "cuda" else 0

    def device_for(self, tp_size: int) -> str:
        """``--device`` of a server of so many ranks: a GPU each, or all on the first, or the CPU."""
        if self.num_gpus == 0:
            return "cpu"
        return "cuda" if tp_size <= self.num_gpus else "cuda:0"

    @property
    def cache_bytes(self) -> int:
        return 128 << 20 if self.num_gpus == 0 else 6 << 30


class Experiment:
    """Runs the parts one after another and keeps their lines. A part that fails does not stop the others."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self.settings = settings
        self.log = log
        self.lines: list[dict[str, Any]] = []
        self.console = Console(stderr=True)
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._begun

    def tell(self, **fields: Any) -> None:
        fields["at_s"] = round(self.seconds, 1)
        self.lines.append(fields)
        emit(record("tp", **fields), self.settings.out)

    def part(self, name: str, least_seconds: float, work: Callable[[], None]) -> None:
        """Run ``work`` if so many seconds are left."""
        left = self.settings.budget - self.seconds
        if left < least_seconds:
            self.tell(
                kind="skipped", part=name, why=f"{left:.0f} s of the budget are left, it may take {least_seconds:g}"
            )
            return
        self.console.print(f"[{self.seconds:5.0f} s] {name}", highlight=False, markup=False)
        try:
            work()
        except Exception as error:
            self.tell(kind="failed", part=name, error=f"{type(error).__name__}: {error}"[:500])
        gc.collect()
        if self.settings.num_gpus:
            torch.cuda.empty_cache()

    # ---- parts ----

    def run(self) -> int:
        """Everything. 0 unless a part failed; a bar that is missed is a result."""
        settings = self.settings
        gpus = [torch.cuda.get_device_name(index) for index in range(settings.num_gpus)]
        self.tell(kind="machine", gpus=gpus, two_ranks_on=settings.device_for(2))
        if settings.num_gpus >= 2:
            self.part("all-reduce", 30, self.all_reduce)
        else:
            self.tell(kind="skipped", part="all-reduce over nccl and symmetric memory", why="it needs two GPUs")
        for geometry in settings.geometries:
            with geometry_folder(geometry, tokenizer=True) as folder:
                for tp_size in (1, 2):
                    for eager in (False, True):
                        why = self.same_as_eager(tp_size)
                        name = f"{geometry} on {tp_size} rank(s), {'eager' if eager else 'graphs'}"
                        if why is not None and not eager:
                            self.tell(kind="skipped", part=name, why=why)
                            continue
                        kill = eager and tp_size == 2 and geometry == settings.geometries[0]
                        self.part(name, 60, functools.partial(self.serve, geometry, folder, tp_size, eager, kill))
        self.part(f"logits of {settings.logits}", 75, self.logits)
        self.print_table()
        failed = any(line["kind"] == "failed" for line in self.lines)
        self.tell(kind="end", seconds=round(self.seconds, 1), ok=not failed)
        return int(failed)

    def same_as_eager(self, tp_size: int) -> str | None:
        """Why such a server would have no graphs anyway, or None."""
        if self.settings.num_gpus == 0:
            return "a CPU has no graphs"
        if tp_size > self.settings.num_gpus:
            return "ranks that share a GPU sum through host memory, which no graph can hold"
        return None

    def all_reduce(self) -> None:
        from bireme.bench.collectives import measure

        for line in measure(2, [(1, 5120), (16, 5120), (64, 5120), (16, 2560), (512, 5120), (8192, 5120)]):
            self.tell(kind="all_reduce", **line)

    def serve(self, geometry: str, folder: Path, tp_size: int, eager: bool, kill: bool) -> None:
        settings = self.settings
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bireme-tp-")))
            one_row = scratch / "one-row"
            used = device_used_bytes(settings.num_gpus)
            flags = {
                "--tp": tp_size,
                "--device": settings.device_for(tp_size),
                "--max-num-seqs": settings.concurrency,
                "--max-model-len": settings.prompt_tokens + max(settings.output_tokens, KILL_TOKENS),
                "--kv-cache-memory-bytes": settings.cache_bytes,
                "--one-row-file": one_row,
            }
            given = [str(part) for name, value in flags.items() for part in (name, value)]
            given += ["--eager"] if eager else []
            log = stack.enter_context(self.log.open("ab"))
            before = time.perf_counter()
            server = stack.enter_context(
                _environment(
                    running_server(folder, *given, log=log, program=("bireme.bench.server",)),
                    {REPORT_FOLDER: str(scratch)},
                )
            )
            ready = time.perf_counter() - before
            common = {"geometry": geometry, "tp": tp_size, "eager": eager, "device": settings.device_for(tp_size)}
            self.tell(kind="ready", **common, ready_s=round(ready, 2))
            if not eager or self.same_as_eager(tp_size):
                config = build_engine_config(
                    folder, tensor_parallel_size=tp_size, device=settings.device_for(tp_size), load_format="dummy"
                )
                self.tell(**common, **memory_line(config, read_reports(scratch)))
            client = Client(server.url)
            cases = {
                "batched": (False, settings.concurrency, settings.output_tokens),
                "single": (False, 1, settings.output_tokens),
                "per_request": (True, settings.concurrency, settings.per_request_tokens),
                "single_per_request": (True, 1, settings.output_tokens // 2),
            }
            for way, (cut, count, tokens) in cases.items():
                if cut:
                    one_row.touch()
                else:
                    one_row.unlink(missing_ok=True)
                line = client.measure(Case(count, settings.prompt_tokens, tokens, 1))
                self.tell(**common, way=way, **line)
            one_row.unlink(missing_ok=True)
            if kill:
                self.kill(server, client, used, common)

    def kill(self, server: RunningServer, client: Client, used_before: list[int], common: dict[str, Any]) -> None:
        """kill −9 of rank 1 in the middle of a burst: what clients see, the exit code, what is left."""
        settings = self.settings
        victim = find_rank(server.process.pid, 1)
        if victim is None:
            raise ExecutorError("the server has no process of rank 1 to kill")
        streams: list[Any] = []
        burst = threading.Thread(
            target=lambda: streams.extend(client.burst(settings.concurrency // 2, settings.prompt_tokens, KILL_TOKENS))
        )
        burst.start()
        time.sleep(1.0 if settings.num_gpus else 0.3)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        burst.join(60)
        answered = time.monotonic() - killed
        try:
            code: int | None = server.process.wait(30)
        except Exception:
            code = None
        exited = time.monotonic() - killed
        deadline = time.monotonic() + RETURN_SECONDS
        while True:
            left = processes_below(server.process.pid)
            kept = [now - old for now, old in zip(device_used_bytes(settings.num_gpus), used_before, strict=True)]
            if (not left and all(more < RETURNED_BYTES for more in kept)) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        errors = sorted({stream.error for stream in streams if stream.error is not None})
        self.tell(
            kind="kill",
            **common,
            streams=len(streams),
            failed_streams=sum(stream.error is not None for stream in streams),
            errors=errors[:3],
            answered_s=round(answered, 2),
            exit_code=code,
            exited_s=round(exited, 2),
            processes_left=len(left),
            device_bytes_kept=kept,
            memory_returned=all(more < RETURNED_BYTES for more in kept),
        )

    def logits(self) -> None:
        """Prompt log-probabilities on two ranks against one, from one checkpoint."""
        settings = self.settings
        on_gpu = settings.num_gpus > 0
        lengths = [5, 64, 200, 1000] if on_gpu else [5, 64, 100]
        with tempfile.TemporaryDirectory(prefix="bireme-tp-weights-") as folder:
            write_weights(Path(folder), settings.logits, device="cuda:0" if on_gpu else "cpu")
            scores = []
            for tp_size in (1, 2):
                config = build_engine_config(
                    folder,
                    tensor_parallel_size=tp_size,
                    device=settings.device_for(tp_size),
                    dtype="bfloat16",
                    max_num_seqs=4,
                    max_model_len=max(lengths) + 8,
                    kv_cache_memory_bytes=settings.cache_bytes // 2,
                )
                generator = torch.Generator().manual_seed(3)
                prompts = [
                    torch.randint(0, config.model.vocab_size, (length,), generator=generator).tolist()
                    for length in lengths
                ]
                engine = EngineCore(config, create_executor(config))
                try:
                    scores.append(score_prompts(engine, prompts))
                finally:
                    engine.shutdown()
                    del engine
                    gc.collect()
        one, two = scores
        distances = torch.tensor(
            [
                abs(ours[token] - theirs[token])
                for ours, theirs in zip(one, two, strict=True)
                for token in ours.keys() & theirs.keys()
            ]
        )
        mean, p99 = distances.mean().item(), distances.quantile(0.99).item()
        self.tell(
            kind="logits",
            geometry=settings.logits,
            positions=len(one),
            compared=len(distances),
            mean=round(mean, 5),
            p99=round(p99, 5),
            worst=round(distances.max().item(), 5),
            within_bounds=mean <= BOUNDS["mean"] and p99 <= BOUNDS["p99"],
        )

    # ---- the end ----

    def rate(self, geometry: str, tp_size: int, eager: bool, way: str) -> float | None:
        """tok/s of decode alone, if that was measured without a failure."""
        for line in self.lines:
            if (
                line["kind"] == "serve"
                and (line["geometry"], line["tp"], line["eager"], line["way"]) == (geometry, tp_size, eager, way)
                and not line["failures"]
            ):
                rate: float | None = line["steady_tok_s"]
                return rate
        return None

    def print_table(self) -> None:
        """One table of rates, and the bars of the issue."""
        table = Table(title="tokens/s while all streams decode", title_justify="left")
        for name in ("model", "ranks", "steps"):
            table.add_column(name)
        for name in ("16 batched", "16 per request", "ratio", "1 batched", "1 per request"):
            table.add_column(name, justify="right")
        for geometry in self.settings.geometries:
            for tp_size in (1, 2):
                for eager in (False, True):
                    rates = [
                        self.rate(geometry, tp_size, eager, way)
                        for way in ("batched", "per_request", "single", "single_per_request")
                    ]
                    batched, one_row = rates[:2]
                    ratio = f"{batched / one_row:.2f} ×" if batched and one_row else "-"
                    shown = ["-" if rate is None else f"{rate:,.0f}" for rate in rates]
                    table.add_row(
                        geometry, str(tp_size), "eager" if eager else "graphs", shown[0], shown[1], ratio, *shown[2:]
                    )
        self.console.print(table)
        for line in self.lines:
            if line["kind"] in ("skipped", "failed"):
                self.console.print(
                    f"{line['kind']}: {line['part']}: {line.get('why') or line.get('error')}", markup=False
                )
        self.bars()

    def bars(self) -> None:
        """What the issue asks for, against what was measured (None: it was not)."""
        first = self.settings.geometries[0]
        eager_ratio = _quotient(self.rate(first, 2, True, "batched"), self.rate(first, 2, True, "per_request"))
        self.bar(f"{first}: batched at least 11.7 × per request, eager, two ranks", eager_ratio, 11.7, least=True)
        for geometry in self.settings.geometries:
            alone = _quotient(
                self.rate(geometry, 2, True, "single"), self.rate(geometry, 2, True, "single_per_request")
            )
            self.bar(f"{geometry}: a single request is no slower in the batched engine", alone, 0.97, least=True)
            gain = None
            if self.settings.num_gpus >= 2:
                gain = _quotient(self.rate(geometry, 2, False, "batched"), self.rate(geometry, 1, False, "batched"))
            self.bar(f"{geometry}: two ranks at least 1.75 × one, 16 rows, graphs", gain, 1.75, least=True)
        sums = [line for line in self.lines if line["kind"] == "all_reduce" and line["rows"] == 16]
        times = [
            line[name]
            for line in sums
            if line["width"] == 5120
            for name in ("nccl_graph_us", "one_shot_graph_us")
            if name in line
        ]
        self.bar("all-reduce of 16 × 5120 in at most 12 µs", min(times, default=None), 12.0, least=False)
        for line in [line for line in self.lines if line["kind"] == "kill"]:
            clean = (
                line["failed_streams"] == line["streams"] > 0
                and line["exit_code"] not in (0, None)
                and line["processes_left"] == 0
                and line["memory_returned"]
            )
            self.bar("a killed rank: errors, an exit code, nothing left", float(clean), 1.0, least=True)
        for line in [line for line in self.lines if line["kind"] == "logits"]:
            self.bar("logits of two ranks within the golden bounds", float(line["within_bounds"]), 1.0, least=True)

    def bar(self, name: str, value: float | None, bound: float, *, least: bool) -> None:
        holds = None if value is None else (value >= bound if least else value <= bound)
        self.tell(kind="bar", name=name, value=None if value is None else round(value, 3), bound=bound, holds=holds)
        verdict = "not measured" if holds is None else "holds" if holds else "MISSED"
        shown = "" if value is None else f" ({value:.2f})"
        self.console.print(f"bar: {name}{shown}: {verdict}", markup=False, highlight=False)


def score_prompts(engine: EngineCore, prompts: list[list[int]]) -> list[dict[int, float]]:
    """The log-probabilities of the most likely tokens at every prompt position, prompts after one another."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=TOP)
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, params))
    entries: dict[str, list[TokenLogprobs | None]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.error is not None:
                raise ExecutorError(output.error)
            if output.prompt_logprobs is not None:
                entries[output.request_id] = output.prompt_logprobs
    return [
        dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
        for index in range(len(prompts))
        for entry in entries[str(index)]
        if entry is not None
    ]


@contextlib.contextmanager
def _environment(
    server: contextlib.AbstractContextManager[RunningServer], values: dict[str, str]
) -> Iterator[RunningServer]:
    """Enter ``server`` with ``values`` in the environment of what it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        with server as running:
            yield running
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def device_used_bytes(num_gpus: int) -> list[int]:
    """Bytes in use on each GPU, by anybody."""
    pairs = [torch.cuda.mem_get_info(index) for index in range(num_gpus)]
    return [total - free for free, total in pairs]


def parents() -> dict[int, int]:
    """pid → parent's pid of every process that can be seen and is no zombie."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(path.parent.name)] = int(fields[1])
    return found


def processes_below(ancestor: int) -> list[int]:
    """Descendants of ``ancestor``."""
    tree = parents()

    def is_below(pid: int) -> bool:
        while pid in tree:
            pid = tree[pid]
            if pid == ancestor:
                return True
        return False

    return [pid for pid in tree if is_below(pid)]


def find_rank(server: int, rank: int) -> int | None:
    """The process of ``rank`` below the process ``server``; ranks say their number on their command line."""
    for pid in processes_below(server):
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if f"rank{rank}".encode() in arguments:
                return pid
    return None


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def main() -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Settings()
    parser.add_argument("--geometry", default=",".join(defaults.geometries))
    parser.add_argument("--logits", default=defaults.logits)
    parser.add_argument("--budget", type=float, default=defaults.budget, help="seconds for everything")
    parser.add_argument("--output-tokens", type=int, default=defaults.output_tokens)
    parser.add_argument("--per-request-tokens", type=int, default=defaults.per_request_tokens)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "bireme-tp-servers.log")
    options = parser.parse_args()
    settings = Settings(
        geometries=options.geometry.split(","),
        logits=options.logits,
        budget=options.budget,
        output_tokens=options.output_tokens,
        per_request_tokens=options.per_request_tokens,
        device=options.device,
        out=options.out,
    )
    try:
        sys.exit(Experiment(settings, options.log).run())
    except BiremeError as error:
        sys.exit(f"bireme: error: {error}")


if __name__ == "__main__":
    main()
