"""Decode throughput: one batched forward per step against one-row plans through the same code, in one run.

Four ways of running, all on one executor with the same weights, alternating round by round so that a machine that slows
down slows all of them:

* batched: N concurrent completions, every step one plan over all of them (what the engine does);
* per request: the same requests and steps, each plan cut into one-row plans, run one after another;
* single: one completion through the engine;
* bare: one completion by a loop that hands the executor one-row plans and nothing else: no scheduler, no queues.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bireme.bench.record import median
from bireme.config import EngineConfig
from bireme.engine import EngineCore
from bireme.errors import ConfigError
from bireme.executor.launcher import create_executor
from bireme.executor.protocol import Executor
from bireme.pocket import NAME, resolve
from bireme.types import FinishReason, NewRequest, PrefillRow, Request, SamplingParams, StepOutput, StepPlan

BARE_SLOT = 1


class PlanRelay:
    """An executor in front of another: renumbers plans, so that several engines can take turns on one set of ranks.

    With ``one_row`` every plan is cut into plans of one row each, run one after another with as many in flight as the
    executor takes, and their outputs are joined.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.capacity = inner.capacity
        self.depth = inner.depth
        self.one_row = False
        self._next_seq = 0
        self._outstanding: deque[tuple[int, StepOutput | None]] = deque()

    def prepare(self, params: SamplingParams) -> Future[object]:
        return self.inner.prepare(params)

    def release(self, slot: int) -> None:
        self.inner.release(slot)

    def submit(self, plan: StepPlan) -> None:
        if not self.one_row:
            self._send(plan)
            self._outstanding.append((plan.seq, None))
            return
        outputs = []
        in_flight = 0
        for part in split_rows(plan):
            if in_flight == self.inner.depth:
                outputs.append(self.inner.collect())
                in_flight -= 1
            self._send(part)
            in_flight += 1
        outputs += [self.inner.collect() for _ in range(in_flight)]
        joined = StepOutput(
            seq=plan.seq,
            token_ids=[token_id for output in outputs for token_id in output.token_ids],
            model_seconds=sum(output.model_seconds for output in outputs),
        )
        self._outstanding.append((plan.seq, joined))

    def collect(self) -> StepOutput:
        seq, output = self._outstanding.popleft()
        if output is None:
            output = self.inner.collect()
            output.seq = seq
        return output

    def check(self) -> None:
        self.inner.check()

    def shutdown(self) -> None:
        """The ranks outlive the engines that take turns on them; their owner ends them."""

    def _send(self, plan: StepPlan) -> None:
        self.inner.submit(msgspec.structs.replace(plan, seq=self._next_seq))
        self._next_seq += 1


def split_rows(plan: StepPlan) -> list[StepPlan]:
    """``plan`` as one-row plans in row order; a new request travels with its first row. Sequence numbers are kept."""
    news = {new.slot: new for new in plan.new_requests}
    parts = [StepPlan(plan.seq, [], [slot], []) for slot in plan.decode_slots]
    for row in plan.prefill_rows:
        new = news.pop(row.slot, None)
        parts.append(StepPlan(plan.seq, [new] if new is not None else [], [], [row]))
    return parts


@dataclass
class Timings:
    """Seconds of each round by way of running, and what came out."""

    batched: list[float] = field(default_factory=list)
    per_request: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    num_equal: int = 0


def run_engine(
    executor: Executor, config: EngineConfig, prompts: list[list[int]], num_tokens: int
) -> tuple[float, float, float, list[list[int]]]:
    """Complete ``prompts`` at once with a fresh engine.

    Returns:
        seconds from the first submission to the last token; host and total seconds per decode step, over the steps in
        which every request decodes; the token ids of each prompt.
    """
    engine = EngineCore(config, executor)
    params = greedy(num_tokens)
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, params))
    steady_from: tuple[float, float, int] | None = None
    host = step = 0.0
    while engine.has_unfinished:
        ended = False
        for output in engine.step():
            if output.finish_reason is FinishReason.ERROR:
                raise ConfigError(f"the benchmark's request was refused: {output.error}")
            tokens[output.request_id] += output.token_ids
            ended = ended or output.finish_reason is not None
        if steady_from is None and all(tokens.values()):
            stats = engine.stats()
            steady_from = time.perf_counter(), stats.host_seconds, stats.num_steps
        if ended and steady_from is not None and host == 0.0:
            stats = engine.stats()
            steps = max(1, stats.num_steps - steady_from[2])
            host = (stats.host_seconds - steady_from[1]) / steps
            step = (time.perf_counter() - steady_from[0]) / steps
    return time.perf_counter() - started, host, step, [tokens[str(index)] for index in range(len(prompts))]


def run_bare(executor: Executor, prompt: list[int], num_tokens: int) -> tuple[float, list[int]]:
    """Complete one prompt by one-row plans written out by hand; seconds and token ids."""
    num_blocks = -(-(len(prompt) + num_tokens - 1) // executor.capacity.block_size)
    params = msgspec.structs.replace(greedy(num_tokens), seed=0)
    new = NewRequest(BARE_SLOT, prompt, list(range(1, num_blocks + 1)), params, [])
    tokens: list[int] = []
    started = time.perf_counter()
    executor.submit(StepPlan(0, [new], [], [PrefillRow(BARE_SLOT, 0, len(prompt), True)]))
    for seq in range(1, num_tokens):
        if executor.depth == 1:
            tokens += executor.collect().token_ids
        executor.submit(StepPlan(seq, [], [BARE_SLOT], []))
        if executor.depth > 1:
            tokens += executor.collect().token_ids
    tokens += executor.collect().token_ids
    return time.perf_counter() - started, tokens


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def bench_prompts(vocab_size: int, rows: int, length: int) -> list[list[int]]:
    """Prompts that differ from one another, of ids that every vocabulary of this family has as plain tokens."""
    span = min(vocab_size, 256)
    return [[(7 * row + 3 * position + 1) % span for position in range(length)] for row in range(rows)]


@contextlib.contextmanager
def model_folder(given: str | Path | None) -> Iterator[tuple[str, bool]]:
    """The checkpoint to measure and whether it is the built-in tiny one, written to a temporary folder."""
    if given is not None:
        yield str(given), False
        return
    from bireme.dummy import write_dummy_checkpoint

    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        write_dummy_checkpoint(folder, tokenizer=False)
        yield folder, True


def measure(config: EngineConfig, *, rows: int, num_tokens: int, prompt_tokens: int, rounds: int) -> Timings:
    """Run every way once to warm up, then ``rounds`` times in turn.

    Raises:
        ConfigError: the ranks' memory holds fewer than ``rows`` such requests at once.
    """
    ranks = create_executor(config)
    try:
        capacity = ranks.capacity
        blocks = -(-(prompt_tokens + num_tokens - 1) // capacity.block_size)
        if capacity.num_slots < rows or capacity.num_blocks < rows * blocks:
            raise ConfigError(
                f"bench decode wants {rows} requests of {blocks} blocks at once; memory holds {capacity.num_slots} "
                f"requests and {capacity.num_blocks} blocks (--rows, --tokens, --kv-cache-memory-bytes)"
            )
        return _measure(PlanRelay(ranks), config, rows, num_tokens, prompt_tokens, rounds)
    finally:
        ranks.shutdown()


def _measure(
    relay: PlanRelay, config: EngineConfig, rows: int, num_tokens: int, prompt_tokens: int, rounds: int
) -> Timings:
    prompts = bench_prompts(config.model.vocab_size, rows, prompt_tokens)
    timings = Timings()
    for number in range(-1, rounds):  # round -1 warms up and is not counted
        tokens = num_tokens if number >= 0 else min(16, num_tokens)
        counted = timings if number >= 0 else Timings()
        relay.one_row = False
        seconds, host, step, batched_ids = run_engine(relay, config, prompts, tokens)
        counted.batched.append(seconds)
        counted.host_ms.append(host * 1e3)
        counted.step_ms.append(step * 1e3)
        for swap in (False, True):  # both orders, so that a drift within the round favours neither
            for bare in (swap, not swap):
                if bare:
                    seconds, bare_ids = run_bare(relay, prompts[0], tokens)
                    counted.bare.append(seconds)
                else:
                    seconds, _, _, single_ids = run_engine(relay, config, prompts[:1], tokens)
                    counted.single.append(seconds)
        relay.one_row = True
        seconds, _, _, one_row_ids = run_engine(relay, config, prompts, tokens)
        counted.per_request.append(seconds)
        counted.num_equal = sum(a == b for a, b in zip(batched_ids, one_row_ids, strict=True))
        if bare_ids != single_ids[0]:
            raise RuntimeError("the engine and the bare loop drew different tokens from the same one-row plans")
    return timings


def summarize(timings: Timings, rows: int, num_tokens: int) -> dict[str, Any]:
    """The figures of a run: medians over rounds; rates in tokens per second over all requests together."""
    batched, per_request = median(timings.batched), median(timings.per_request)
    single, bare = median(timings.single), median(timings.bare)
    return {
        "batched_tok_s": round(rows * num_tokens / batched, 1),
        "per_request_tok_s": round(rows * num_tokens / per_request, 1),
        "batched_over_per_request": round(per_request / batched, 2),
        "single_tok_s": round(num_tokens / single, 1),
        "bare_tok_s": round(num_tokens / bare, 1),
        "single_over_bare": round(bare / single, 4),
        "decode_step_ms": round(median(timings.step_ms), 3),
        "host_ms_per_step": round(median(timings.host_ms), 4),
        "equal_completions": timings.num_equal,
    }


def describe(config: EngineConfig, builtin: bool) -> dict[str, Any]:
    """The model's geometry for the record."""
    model = config.model
    return {
        "name": "tiny" if builtin else NAME if config.model_path == resolve(NAME) else Path(config.model_path).name,
        "hidden_size": model.hidden_size,
        "layers": model.num_layers,
        "head_dim": model.head_dim,
        "linear_head_dim": model.linear_value_head_dim,
        "vocab_size": model.vocab_size,
    }


def print_table(figures: dict[str, Any], title: str, console: Console) -> None:
    """The figures for a person."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("way of running")
    for name in ("tokens/s", "against"):
        table.add_column(name, justify="right")
    ratio, single = figures["batched_over_per_request"], figures["single_over_bare"]
    table.add_row("per request (one-row plans)", f"{figures['per_request_tok_s']:,.0f}", "1.00 ×")
    table.add_row("batched", f"{figures['batched_tok_s']:,.0f}", f"{ratio:.2f} × per request")
    table.add_section()
    table.add_row("bare one-row loop", f"{figures['bare_tok_s']:,.0f}", "1.00 ×")
    table.add_row("single request", f"{figures['single_tok_s']:,.0f}", f"{single:.3f} × bare")
    console.print(table)
    console.print(
        f"decode step {figures['decode_step_ms']:.2f} ms, of which host (schedule, plan, commit) "
        f"{figures['host_ms_per_step']:.3f} ms; batched and per-request tokens equal in "
        f"{figures['equal_completions']} of {figures['rows']} completions",
        highlight=False,
    )


def run(
    config: EngineConfig, *, builtin: bool, rows: int, num_tokens: int, prompt_tokens: int, rounds: int
) -> dict[str, Any]:
    """Measure and return the fields of the JSON line."""
    timings = measure(config, rows=rows, num_tokens=num_tokens, prompt_tokens=prompt_tokens, rounds=rounds)
    return {
        "model": describe(config, builtin),
        "tp": config.parallel.tp_size,
        "device": config.device,
        "dtype": config.dtype,
        "rows": rows,
        "tokens": num_tokens,
        "prompt_tokens": prompt_tokens,
        "rounds": rounds,
        **summarize(timings, rows, num_tokens),
    }
