"""Steps of the real runner on random weights, against what the memory allows: decode, prefill, the loop, memory.

Every figure is of one executor, loaded once a geometry; plans are written out by hand, but for the loop's. Decode rows
start in the middle of a context whose K, V and state are noise, so that no context has to be computed first.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from bireme.bench import limits
from bireme.bench.breakdown import profile
from bireme.bench.decode import PlanRelay, bench_prompts
from bireme.bench.record import median
from bireme.bench.runner import FACTORY, REPORT_FOLDER, BenchRunner, read_reports
from bireme.cache.capacity import kv_bytes_per_token, state_bytes_per_slot
from bireme.config import CHUNK_ALIGNMENT, EngineConfig
from bireme.engine import EngineCore
from bireme.errors import ConfigError
from bireme.executor.deferred import DeferredOutput
from bireme.executor.launcher import LocalExecutor, create_executor
from bireme.executor.protocol import Executor
from bireme.types import FinishReason, NewRequest, PrefillRow, Request, SamplingParams, StepOutput, StepPlan

WARM_UP_STEPS = 4
PROFILED_STEPS = 8
LOOP_TOKENS = 48
MEMORY_SLOTS = 16
MEMORY_TOKENS = 32_768
CARD_BYTES = 48e9
"""The memory line's question: do 16 requests and 32k tokens of KV fit beside the weights on a 48 GB card?"""

Emit = Callable[[dict[str, Any]], None]


@dataclass
class Cases:
    """What to measure.

    Attributes:
        decode: (rows, context) pairs.
        prefill: prompts of equal length, as (number, tokens) pairs.
        loop: (rows, context) pairs to run through the engine's own loop, for the host's share.
        steps: timed decode steps of a round.
        rounds: of decode, and repeats of a prefill; medians count.
        with_profile: break a step's time down by kind.
        temperature: of every row; 0 takes the largest logit.
    """

    decode: list[tuple[int, int]] = field(default_factory=list)
    prefill: list[tuple[int, int]] = field(default_factory=list)
    loop: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 32
    rounds: int = 3
    with_profile: bool = True
    temperature: float = 0.0

    @property
    def max_rows(self) -> int:
        """Slots that the largest case needs."""
        return max([rows for rows, _ in self.decode + self.prefill + self.loop], default=1)

    @property
    def max_context(self) -> int:
        """Tokens that the longest request has."""
        contexts = [context + self.steps_per_round for _, context in self.decode]
        contexts += [length + 1 for _, length in self.prefill]
        contexts += [context + LOOP_TOKENS + self.steps_per_round for _, context in self.loop]
        return max(contexts, default=1)

    @property
    def steps_per_round(self) -> int:
        """Steps that a row of a decode case makes before it is set back."""
        return WARM_UP_STEPS + max(self.steps, PROFILED_STEPS)


@contextlib.contextmanager
def started(config: EngineConfig) -> Iterator[tuple[LocalExecutor, dict[str, Any]]]:
    """Ranks that are ready for plans, with the figures of their start: seconds, kernel cache, memory by rank."""
    cache = os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")
    num_cached = sum(1 for path in Path(cache).glob("*") if path.is_dir())
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        before = os.environ.get(REPORT_FOLDER)
        os.environ[REPORT_FOLDER] = folder
        begun = time.perf_counter()
        try:
            executor = create_executor(config, FACTORY)
        finally:
            os.environ.pop(REPORT_FOLDER)
            if before is not None:
                os.environ[REPORT_FOLDER] = before
        start = {
            "start_s": round(time.perf_counter() - begun, 2),
            "process_s": _process_seconds(),
            "kernel_cache": "warm" if num_cached else "cold",
            "kernels_cached": num_cached,
            "ranks": read_reports(folder),
        }
    try:
        yield executor, start
    finally:
        executor.shutdown()
        del executor
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _process_seconds() -> float | None:
    """Seconds since this process began, imports included; None where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return round(uptime - ticks / os.sysconf("SC_CLK_TCK"), 2)


class Bench:
    """Runs cases on one executor. Rows live in slots 1 … N, with KV blocks dealt at random.

    Args:
        executor: ranks that run plans; this object sends all of them.
        config: theirs.
        cases: what to measure.
        bytes_per_second: of the memory, for the limits.
    """

    def __init__(self, executor: Executor, config: EngineConfig, cases: Cases, bytes_per_second: float) -> None:
        self.executor = executor
        self.relay = PlanRelay(executor)
        self.config, self.cases, self.bytes_per_second = config, cases, bytes_per_second
        self.on_cuda = config.device.startswith("cuda")
        self._seq = 0
        blocks = list(range(1, executor.capacity.num_blocks + 1))
        random.Random(0).shuffle(blocks)
        self._blocks = blocks

    @property
    def runner(self) -> BenchRunner | None:
        """Rank 0's runner, where it is the only rank and in this process."""
        runner = getattr(self.executor, "_runner", None)
        return runner if isinstance(runner, BenchRunner) and runner.group.size == 1 else None

    # plans

    def plan(self, new: list[NewRequest], decode: list[int], prefill: list[PrefillRow]) -> StepPlan:
        self._seq += 1
        return StepPlan(self._seq, new, decode, prefill)

    def run(self, plan: StepPlan) -> StepOutput:
        self.relay.submit(plan)
        return self.relay.collect()

    def new(self, slot: int, num_tokens: int, max_tokens: int) -> NewRequest:
        """A request of ``num_tokens`` prompt tokens in ``slot``, with blocks of its own for ``max_tokens`` in all."""
        count = -(-max_tokens // self.executor.capacity.block_size)
        first = (slot - 1) * count
        (prompt,) = bench_prompts(self.config.model.vocab_size, 1, num_tokens)
        params = SamplingParams(temperature=self.cases.temperature, max_tokens=None, ignore_eos=True, seed=slot)
        return NewRequest(slot, prompt, self._blocks[first : first + count], params, [])

    def lack(self, rows: int, num_tokens: int) -> str | None:
        """Why ``rows`` requests of ``num_tokens`` do not fit, or None if they do."""
        capacity = self.executor.capacity
        needed = rows * -(-num_tokens // capacity.block_size)
        if rows > capacity.num_slots or needed > capacity.num_blocks or num_tokens > capacity.max_model_len:
            return (
                f"needs {rows} slots, {needed} blocks and {num_tokens} tokens a request; memory holds "
                f"{capacity.num_slots}, {capacity.num_blocks} and {capacity.max_model_len}"
            )
        return None

    def place(self, rows: int, context: int) -> list[int]:
        """Make slots 1 … rows decode rows with ``context`` tokens behind them; only the last few are computed."""
        start = (context - 1) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
        slots = list(range(1, rows + 1))
        per_plan = max(1, self.config.scheduler.max_num_batched_tokens // CHUNK_ALIGNMENT)
        for first in range(0, rows, per_plan):
            part = slots[first : first + per_plan]
            news = [self.new(slot, context, context + self.cases.steps_per_round) for slot in part]
            self.run(self.plan(news, [], [PrefillRow(slot, start, context - start, True) for slot in part]))
        return slots

    def decode_steps(self, slots: list[int], count: int) -> tuple[list[float], list[float]]:
        """``count`` decode steps with as many plans in flight as the executor takes: (when each was collected, the
        seconds that rank 0 measured for each)."""
        collected: list[float] = []
        measured: list[float] = []
        in_flight = 0
        for number in range(count + self.executor.depth - 1):
            if number < count:
                self.relay.submit(self.plan([], slots, []))
                in_flight += 1
            if in_flight == self.executor.depth or number >= count:
                measured.append(self.relay.collect().model_seconds)
                collected.append(time.perf_counter())
                in_flight -= 1
        return collected, measured

    def device_step_seconds(self, slots: list[int], count: int) -> float | None:
        """Seconds a decode step when nobody waits for its tokens, so that the device is never short of work; None
        where ranks must answer every plan."""
        runner = self.runner
        if runner is None or not self.on_cuda:
            return None
        outputs = [runner.execute(self.plan([], slots, [])) for _ in range(count)]
        first, last = outputs[0], outputs[-1]
        assert isinstance(first, DeferredOutput) and isinstance(last, DeferredOutput)
        last.result()
        return first.seconds_until(last) / (count - 1)

    # cases

    def decode(self, rows: int, context: int) -> dict[str, Any]:
        """Medians over the rounds' timed steps."""
        found: dict[str, Any] = {"kind": "decode", "rows": rows, "context": context}
        lack = self.lack(rows, context + self.cases.steps_per_round)
        if lack is not None:
            return found | {"skipped": lack}
        gaps: list[float] = []
        measured: list[float] = []
        for _ in range(self.cases.rounds):
            slots = self.place(rows, context)
            self.decode_steps(slots, WARM_UP_STEPS)
            collected, seconds = self.decode_steps(slots, self.cases.steps)
            gaps += [after - before for before, after in pairwise(collected)]
            measured += seconds
        slots = self.place(rows, context)
        device = self.device_step_seconds(slots, self.cases.steps)
        config = self.config
        mean_context = context + WARM_UP_STEPS + (self.cases.steps + 1) / 2
        limit = limits.decode_limit_seconds(
            config.model,
            config.parallel.tp_size,
            config.dtype,
            rows=rows,
            context=mean_context,
            bytes_per_second=self.bytes_per_second,
        )
        step = median(gaps)
        found |= {
            "ms": round(step * 1e3, 4),
            "limit_ms": round(limit * 1e3, 4),
            "ratio": round(step / limit, 3),
            "tok_s": round(rows / step, 1),
            "ms_p10_p90": [round(_quantile(gaps, share) * 1e3, 4) for share in (0.1, 0.9)],
            "rank0_ms": round(median(measured) * 1e3, 4),
            "device_ms": None if device is None else round(device * 1e3, 4),
        }
        if self.cases.with_profile:
            slots = self.place(rows, context)
            self.decode_steps(slots, WARM_UP_STEPS)
            found["profile"] = profile(
                lambda: self.decode_steps(slots, PROFILED_STEPS), PROFILED_STEPS, on_cuda=self.on_cuda
            )
        return found

    def prefill(self, rows: int, length: int) -> dict[str, Any]:
        """``rows`` fresh prompts of ``length`` tokens, until each has its first token: the steps that the scheduler
        would make of them, one after another."""
        found: dict[str, Any] = {"kind": "prefill", "rows": rows, "tokens": length}
        lack = self.lack(rows, length + 1)
        if lack is not None:
            return found | {"skipped": lack}
        chunks = prefill_chunks(rows, length, self.config.scheduler.max_num_batched_tokens)

        def once() -> None:
            waiting: deque[int] = deque()
            for chunk in chunks:
                news = [self.new(row.slot, length, length + 1) for row in chunk if row.start == 0]
                self.relay.submit(self.plan(news, [], chunk))
                waiting.append(1)
                if len(waiting) == self.executor.depth:
                    self.relay.collect()
                    waiting.popleft()
            for _ in waiting:
                self.relay.collect()

        once()
        seconds = []
        for _ in range(self.cases.rounds):
            begun = time.perf_counter()
            once()
            seconds.append(time.perf_counter() - begun)
        flops = limits.prefill_flops(self.config.model, [length] * rows)
        took = median(seconds)
        found |= {
            "ms": round(took * 1e3, 3),
            "least_ms": round(min(seconds) * 1e3, 3),
            "steps": len(chunks),
            "tok_s": round(rows * length / took, 1),
            "tflop_s": round(flops / took / 1e12, 2),
        }
        if self.cases.with_profile:
            found["profile"] = profile(once, 1, on_cuda=self.on_cuda)
        return found

    def loop(self, rows: int, context: int) -> dict[str, Any]:
        """The engine's own loop with ``rows`` requests: its step against the device's, and the host's share."""
        found: dict[str, Any] = {"kind": "loop", "rows": rows, "context": context}
        lack = self.lack(rows, context + LOOP_TOKENS + self.cases.steps_per_round)
        if lack is not None:
            return found | {"skipped": lack}
        prompts = bench_prompts(self.config.model.vocab_size, rows, context)
        params = SamplingParams(temperature=self.cases.temperature, max_tokens=LOOP_TOKENS, ignore_eos=True, seed=1)
        gaps: list[float] = []
        host: list[float] = []
        first_token = []
        for number in range(1 + self.cases.rounds):  # the first warms up
            step_seconds, host_seconds, first = self._run_loop(prompts, params)
            if number:
                gaps += step_seconds
                host.append(host_seconds)
                first_token.append(first)
        step = median(gaps)
        slots = self.place(rows, context + LOOP_TOKENS // 2) if self.runner is not None else []
        device = self.device_step_seconds(slots, self.cases.steps) if slots else None
        found |= {
            "ms": round(step * 1e3, 4),
            "device_ms": None if device is None else round(device * 1e3, 4),
            "host_gap": None if device is None else round(max(0.0, step - device) / step, 4),
            "scheduling_ms": round(median(host) * 1e3, 4),
            "first_token_ms": round(median(first_token) * 1e3, 3),
            "tok_s": round(rows / step, 1),
        }
        return found

    def _run_loop(self, prompts: list[list[int]], params: SamplingParams) -> tuple[list[float], float, float]:
        """(seconds between results while all requests decode, host seconds a step of those, until the first token)."""
        engine = EngineCore(self.config, self.relay)
        begun = time.perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add_request(Request(str(index), prompt, params))
        have: set[str] = set()
        gaps: list[float] = []
        first_token: float | None = None
        last: float | None = None
        host_before, steps_before = 0.0, 0
        host = 0.0
        while engine.has_unfinished:
            outputs = engine.step()
            now = time.perf_counter()
            if any(output.finish_reason is FinishReason.ERROR for output in outputs):
                raise ConfigError(f"the benchmark's request was refused: {outputs[0].error}")
            have.update(output.request_id for output in outputs if output.token_ids)
            if have and first_token is None:
                first_token = now - begun
            ended = any(output.finish_reason is not None for output in outputs)
            if len(have) == len(prompts) and not ended:
                stats = engine.stats()
                if last is None:
                    host_before, steps_before = stats.host_seconds, stats.num_steps
                else:
                    gaps.append(now - last)
                    host = (stats.host_seconds - host_before) / max(1, stats.num_steps - steps_before)
                last = now
            elif ended:
                last = None
        return gaps[1:] or gaps, host, first_token or 0.0


def prefill_chunks(rows: int, length: int, max_tokens: int) -> list[list[PrefillRow]]:
    """Plans' rows for prompts in slots 1 … rows: the oldest prompts first, up to ``max_tokens`` a step, cut at
    multiples of 64."""
    plans: list[list[PrefillRow]] = [[]]
    room = max_tokens
    for slot in range(1, rows + 1):
        start = 0
        while start < length:
            take = min(room, length - start)
            if take < length - start:
                take -= take % CHUNK_ALIGNMENT
            if take == 0:
                plans.append([])
                room = max_tokens
                continue
            plans[-1].append(PrefillRow(slot, start, take, start + take == length))
            start += take
            room -= take
    return [plan for plan in plans if plan]


def memory_line(config: EngineConfig, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Does a rank with 16 slots and 32k tokens of KV fit a 48 GB card? Weights as measured, the rest by arithmetic.

    ``overhead_bytes``: what the rank's allocator held beside weights, state and KV once it was ready (graphs and
    workspaces); the driver's own memory is not in it.
    """
    model, size = config.model, config.parallel.tp_size
    slot = state_bytes_per_slot(model, size, config.dtype)
    token = kv_bytes_per_token(model, size, config.dtype)
    state = (MEMORY_SLOTS + 1) * slot
    kv = (MEMORY_TOKENS + config.cache.block_size) * token
    lines = []
    for rank in ranks:
        held = rank["weight_bytes"] + rank["state_bytes"] + rank["kv_bytes"]
        overhead = max(0, rank.get("reserved_bytes", held) - held)
        total = rank["weight_bytes"] + state + kv + overhead
        lines.append(rank | {"overhead_bytes": overhead, "needed_bytes": total, "fits_48_gb": total <= CARD_BYTES})
    return {
        "kind": "memory",
        "slots": MEMORY_SLOTS,
        "kv_tokens": MEMORY_TOKENS,
        "bytes_per_slot": slot,
        "bytes_per_kv_token": token,
        "state_bytes": state,
        "kv_bytes": kv,
        "computed_weight_bytes": limits.weight_bytes(model, size, config.dtype),
        "ranks": lines,
    }


def run(config: EngineConfig, cases: Cases, bytes_per_second: float, emit: Emit) -> None:
    """Start, measure every case, and hand each result to ``emit`` as soon as it is known."""
    with started(config) as (executor, start):
        emit({"kind": "start"} | {name: value for name, value in start.items() if name != "ranks"})
        emit(memory_line(config, start["ranks"]))
        bench = Bench(executor, config, cases, bytes_per_second)
        for rows, context in cases.decode:
            emit(bench.decode(rows, context))
        for rows, context in cases.loop:
            emit(bench.loop(rows, context))
        for rows, length in cases.prefill:
            emit(bench.prefill(rows, length))


def engine_config(
    folder: str, cases: Cases, *, enforce_eager: bool, max_num_batched_tokens: int | None, **options: Any
) -> EngineConfig:
    """The configuration under which all of ``cases`` can run, as far as memory goes."""
    from bireme.engine_args import build_engine_config

    config = build_engine_config(
        folder,
        load_format="dummy",
        enforce_eager=enforce_eager,
        max_num_seqs=cases.max_rows,
        max_num_batched_tokens=max_num_batched_tokens,
        **options,
    )
    longest = min(cases.max_context, config.model.max_position_embeddings)
    limits_ = msgspec.structs.replace(config.scheduler, max_model_len=longest)
    return msgspec.structs.replace(config, scheduler=limits_)


def parse_counts(flag: str, text: str) -> list[int]:
    """``1,4,16`` → [1, 4, 16].

    Raises:
        ConfigError: anything but positive integers.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{flag} is {text!r}: it must be positive integers, separated by commas")
    return [int(part) for part in parts]


def parse_prefill(text: str) -> list[tuple[int, int]]:
    """``1x8192,8x1024`` → [(1, 8192), (8, 1024)].

    Raises:
        ConfigError: anything else.
    """
    cases = []
    for part in text.split(","):
        rows, _, length = part.strip().partition("x")
        if not part.strip():
            continue
        if not (rows.isdecimal() and length.isdecimal() and int(rows) and int(length)):
            raise ConfigError(f"--prefill is {text!r}: it must be like 1x8192,8x1024 (prompts x tokens)")
        cases.append((int(rows), int(length)))
    return cases


def describe(line: dict[str, Any]) -> str:
    """A result as a line for a person."""
    kind = line["kind"]
    if "skipped" in line:
        case = f"{line['rows']} × {line.get('tokens', line.get('context'))}"
        return f"{kind:8} {case:>12}  skipped: {line['skipped']}"
    if kind == "start":
        return (
            f"start    ready in {line['start_s']} s ({line['process_s']} s after the process began), kernel cache "
            f"{line['kernel_cache']} ({line['kernels_cached']} entries)"
        )
    if kind == "memory":
        parts = [
            f"memory   rank {rank['rank']}: {_gb(rank['weight_bytes'])} weights + {_gb(line['state_bytes'])} "
            f"({line['slots']} + 1 slots) + {_gb(line['kv_bytes'])} ({line['kv_tokens']} tokens) + "
            f"{_gb(rank['overhead_bytes'])} overhead = {_gb(rank['needed_bytes'])}, 48 GB card: "
            f"{'fits' if rank['fits_48_gb'] else 'does not fit'}"
            for rank in line["ranks"]
        ]
        return "\n".join(parts)
    if kind == "decode":
        device = "" if line["device_ms"] is None else f", device {line['device_ms']:.3f}"
        text = (
            f"decode   {line['rows']:4} rows at {line['context']:6}: {line['ms']:8.3f} ms = {line['ratio']:.2f} × "
            f"{line['limit_ms']:.3f}{device}; {line['tok_s']:,.0f} tok/s"
        )
    elif kind == "loop":
        gap = "" if line["host_gap"] is None else f", device {line['device_ms']:.3f}: host gap {line['host_gap']:.1%}"
        text = (
            f"loop     {line['rows']:4} rows at {line['context']:6}: {line['ms']:8.3f} ms{gap}; scheduling "
            f"{line['scheduling_ms']:.3f}; first token {line['first_token_ms']:.1f} ms; {line['tok_s']:,.0f} tok/s"
        )
    else:
        text = (
            f"prefill  {line['rows']:4} × {line['tokens']:6} tokens: {line['ms']:8.2f} ms, {line['tflop_s']:.1f} "
            f"TFLOP/s, {line['tok_s']:,.0f} tok/s in {line['steps']} step(s)"
        )
    found = line.get("profile")
    if found:
        kinds = ", ".join(f"{name} {value:.3f}" for name, value in found["kinds"].items())
        gap = f", idle {found['gap_ms']:.3f}" if "gap_ms" in found else ""
        text += f"\n           by kind: {kinds}{gap} ms; {found['kernels']:.0f} kernels"
        if found["other"]:
            text += f"\n           other: {', '.join(list(found['other'])[:6])}"
    return text


def print_line(line: dict[str, Any], console: Console) -> None:
    """``describe`` on the console."""
    console.print(describe(line), highlight=False, markup=False, soft_wrap=True)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
