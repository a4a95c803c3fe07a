"""Gated DeltaNet's kernels alone on a GPU, by CUDA-graph replay: decode over its candidate shapes, prefill by kernel.

    python bench/gated_delta.py --seconds 60 --out results.jsonl

One JSON line a case: measured µs, and beside it what the bytes that must move cost at the read ceiling. Every replay
runs over several layers' states, so that neither state nor input is found in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from bireme.kernels import reference
from bireme.kernels.triton import gated_delta_decode, gated_delta_prefill
from bireme.kernels.triton.gated_delta_decode import DecodeShape

CEILING = 4.52e12
"""Bytes a second that a streaming read reached on an H200."""
L2_BYTES = 50 << 20
EPS = 1e-6
DIM = 128
GEOMETRIES = {"27b": (16, 3), "9b": (16, 2)}
"""Key heads, value heads a key head; 4B has 9B's."""
DECODE_SHAPES = [
    DecodeShape(*shape)
    for shape in (
        (1, 4), (2, 4), (4, 2), (8, 2),
        (1, 4, 32, 2), (1, 4, 32, 3), (1, 4, 64, 2), (1, 8, 32, 3), (1, 2, 16, 3), (1, 2, 32, 3), (1, 4, 16, 4),
    )
]  # fmt: skip
PREFILLS = {
    "1x128": [128],
    "1x512": [512],
    "1x1024": [1024],
    "1x8192": [8192],
    "8x1024": [1024] * 8,
    "1x32768": [32768],
}
PREPARE_OPTIONS: list[dict[str, Any]] = [
    {"invert_warps": 2},
    {"invert_registers": 128},
    {"invert_warps": 2, "invert_registers": 128},
    {"convolve_warps": 4},
    {"convolve_warps": 16},
    {"precision": "tf32x3"},
]
SCAN_OPTIONS: list[dict[str, Any]] = [
    {"block_v": block_v, "scan_stages": stages, "scan_warps": warps}
    for block_v in (32, 64)
    for stages in (2, 3)
    for warps in (4, 8)
]
OUTPUT_OPTIONS: list[dict[str, Any]] = [{"output_warps": 4}, {"output_warps": 8}]


class Layer:
    """Weights and ``copies`` states of one layer."""

    def __init__(self, num_k_heads: int, group: int, num_slots: int, copies: int) -> None:
        heads = num_k_heads * group
        self.channels = 2 * num_k_heads * DIM + heads * DIM
        self.width = self.channels + heads * DIM + 2 * heads
        self.heads = heads
        self.weights = (
            torch.randn(4, self.channels, device="cuda"),
            torch.randn(heads, device="cuda"),
            -torch.rand(heads, device="cuda"),
            torch.randn(DIM, device="cuda"),
        )
        self.states = [
            (
                torch.randn(num_slots, heads, DIM, DIM, device="cuda") * 0.1,
                torch.randn(num_slots, 3, self.channels, device="cuda").bfloat16(),
            )
            for _ in range(copies)
        ]

    def rows(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.width, device="cuda").bfloat16()


def replay_us(launches: list[Callable[[], Any]], seconds: float = 0.05) -> float:
    """Median µs of one launch, over replays of a graph that holds them all."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < seconds and len(times) < 200):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return sorted(times)[len(times) // 2]


class Log:
    """Prints and keeps one JSON line a case; a case that fails is a line too. Stops asking for cases after a time."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.file = path.open("a", encoding="utf-8") if path else None
        self.deadline = time.perf_counter() + seconds

    def case(self, measure: Callable[[], dict[str, Any]], **labels: Any) -> dict[str, Any] | None:
        if time.perf_counter() > self.deadline:
            return None
        found: dict[str, Any]
        try:
            found = measure()
        except Exception as error:  # the other cases are still worth their time
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        line = json.dumps({**labels, **found})
        print(line, flush=True)
        if self.file:
            self.file.write(line + "\n")
            self.file.flush()
        return found if "us" in found else None


def decode_cases(log: Log, name: str, num_rows: int, shapes: list[DecodeShape | None]) -> None:
    num_k_heads, group = GEOMETRIES[name]
    state_bytes = num_rows * num_k_heads * group * DIM * DIM * 4
    copies = max(2, min(32, -(-2 * L2_BYTES // state_bytes)))
    layer = Layer(num_k_heads, group, num_rows + 1, copies)
    rows = layer.rows(num_rows)
    slots = torch.randperm(num_rows, device="cuda") + 1
    moved = 2 * state_bytes + rows.nbytes + num_rows * (6 * layer.channels * 2 + layer.heads * DIM * 2)
    for shape in shapes:

        def measure(shape: DecodeShape | None = shape) -> dict[str, Any]:
            def step(states: tuple[torch.Tensor, torch.Tensor]) -> None:
                gated_delta_decode.gdn_decode(rows, *layer.weights, *states, slots, None, False, EPS, shape=shape)

            us = replay_us([lambda states=states: step(states) for states in layer.states])
            return {"us": round(us, 2), "limit_us": round(moved / CEILING * 1e6, 2), "TB/s": round(moved / us / 1e6, 2)}

        label = "chosen" if shape is None else "x".join(map(str, shape))
        log.case(measure, kernel="decode", geometry=name, rows=num_rows, shape=label)


def prefill_inputs(seq_lens: list[int]) -> tuple[torch.Tensor, ...]:
    offsets = [0]
    for length in seq_lens:
        offsets.append(offsets[-1] + length)
    chunks = [
        (row, offsets[row] + at, min(64, length - at), at)
        for row, length in enumerate(seq_lens)
        for at in range(0, length, 64)
    ]
    return (
        torch.arange(1, len(seq_lens) + 1, device="cuda"),
        torch.tensor(offsets, dtype=torch.int32, device="cuda"),
        torch.zeros(len(seq_lens), dtype=torch.int32, device="cuda"),
        torch.tensor(chunks, dtype=torch.int32, device="cuda"),
    )


def kernel_times(run: Callable[[], Any], repeats: int = 3) -> dict[str, float]:
    """µs of each kernel, from the profiler; a kernel that starts early counts its wait for the one before it."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        for kernel in ("convolve", "invert", "scan", "output"):
            if f"_{kernel}_kernel" in event.key:
                found[f"{kernel}_us"] = round(event.device_time_total / repeats, 1)
    return found


def prefill_cases(log: Log, name: str, prompts: str, options: list[dict[str, Any]]) -> None:
    num_k_heads, group = GEOMETRIES[name]
    seq_lens = PREFILLS[prompts]
    num_tokens = sum(seq_lens)
    copies = 8 if num_tokens <= 1024 else 2
    layer = Layer(num_k_heads, group, len(seq_lens) + 1, copies)
    inputs = prefill_inputs(seq_lens)
    batches = [layer.rows(num_tokens) for _ in range(copies)]
    moved = batches[0].nbytes + num_tokens * layer.heads * DIM * 2
    for chosen in options:

        def measure(chosen: dict[str, Any] = chosen) -> dict[str, Any]:
            def run(copy: int) -> None:
                gated_delta_prefill.gdn_prefill(
                    batches[copy], *layer.weights, *layer.states[copy], *inputs, [], [], EPS, **chosen
                )

            us = replay_us([lambda copy=copy: run(copy) for copy in range(copies)])
            return {"us": round(us, 1), "limit_us": round(moved / CEILING * 1e6, 1), **kernel_times(lambda: run(0))}

        log.case(measure, kernel="prefill", geometry=name, prompts=prompts, **chosen)


def precision_case(log: Log) -> None:
    """Errors of the choices of precision against the float32 reference, on random rows and on a repeated one."""
    for repeated in (False, True):
        for precision in ("tf32", "bf16x3", "tf32x3"):

            def measure(repeated: bool = repeated, precision: str = precision) -> dict[str, Any]:
                torch.manual_seed(0)
                layer = Layer(16, 2, 2, 2)
                rows = layer.rows(1).expand(1024, -1).contiguous() if repeated else layer.rows(1024)
                inputs = prefill_inputs([1024])
                arguments = (*inputs, [1024], [0], EPS)
                want = reference.gdn_prefill(rows, *layer.weights, *layer.states[0], *arguments).float()
                got = gated_delta_prefill.gdn_prefill(
                    rows, *layer.weights, *layer.states[1], *arguments, precision=precision
                ).float()
                exact, found = layer.states[0][0][1], layer.states[1][0][1]
                return {
                    "output_error": float((got - want).norm() / want.norm()),
                    "state_error": float((found - exact).norm() / exact.norm()),
                }

            log.case(measure, kernel="precision", repeated_token=repeated, precision=precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no case after this long")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    log = Log(args.out, args.seconds)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}))
    with torch.inference_mode():
        for rows in (16, 64, 1):
            decode_cases(log, "27b", rows, [None, *DECODE_SHAPES])
        for prompts in ("1x8192", "1x128", "8x1024", "1x1024", "1x512"):
            prefill_cases(log, "27b", prompts, [{}])
        prefill_cases(log, "27b", "1x8192", PREPARE_OPTIONS + SCAN_OPTIONS + OUTPUT_OPTIONS)
        precision_case(log)
        for rows in (4, 256):
            decode_cases(log, "27b", rows, [None, *DECODE_SHAPES])
        for rows in (1, 4, 16, 64, 256):
            decode_cases(log, "9b", rows, [None, *DECODE_SHAPES])
        for prompts in ("1x8192", "1x128", "8x1024", "1x1024"):
            prefill_cases(log, "9b", prompts, [{}])
        prefill_cases(log, "27b", "1x32768", [{}])


if __name__ == "__main__":
    main()
