"""Time of one all_reduce between CPU ranks: shared memory against gloo, alternating, in one run.

    python bench/all_reduce.py [--ranks 2] [--seconds 1]

Prints a table to stderr and one JSON line: microseconds per call by size (float32), the median and the least of the
rounds. Ranks run one thread each. On a loaded machine only the least says something about the wire.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from bireme.config import CacheCapacity, EngineConfig, ModelConfig, ParallelConfig
from bireme.distributed import TpGroup
from bireme.executor.launcher import create_executor
from bireme.types import StepOutput, StepPlan

SIZES = [(1, 256), (1, 1024), (4, 1024), (16, 256), (16, 1024), (64, 1024)]


class AllReduceRunner:
    """A runner whose plans are rounds: ``decode_slots`` = (index into SIZES, calls). Rank 0 returns nanoseconds."""

    def __init__(self, config: EngineConfig, group: TpGroup, device: torch.device) -> None:
        self.group = group

    def load(self) -> CacheCapacity:
        return CacheCapacity(
            num_slots=1, num_blocks=1, block_size=64, max_model_len=64, bytes_per_slot=1, bytes_per_block=1
        )

    def allocate(self, capacity: CacheCapacity) -> None:
        return None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput | None:
        index, calls = plan.decode_slots
        x = torch.zeros(SIZES[index])
        for _ in range(5):
            self.group.all_reduce(x)
        started = time.perf_counter_ns()
        for _ in range(calls):
            self.group.all_reduce(x)
        elapsed = time.perf_counter_ns() - started
        return StepOutput(plan.seq, [elapsed]) if self.group.rank == 0 else None

    def close(self) -> None:
        return None


def make_config(ranks: int, backend: str) -> EngineConfig:
    model = ModelConfig(
        model_type="qwen3_5_text",
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        layer_types=("full_attention",),
        num_attention_heads=ranks,
        num_key_value_heads=ranks,
        head_dim=64,
        rotary_dim=16,
        rope_theta=1e4,
        linear_num_key_heads=ranks,
        linear_num_value_heads=ranks,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    return EngineConfig(model_path="", model=model, parallel=ParallelConfig(tp_size=ranks, backend=backend))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each size and backend")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    rounds = 100
    factory = "all_reduce:AllReduceRunner"
    backends = {name: create_executor(make_config(options.ranks, name), factory) for name in ("shm", "gloo")}
    next_seq = dict.fromkeys(backends, 0)

    def measure(backend: str, index: int, calls: int) -> float:
        executor = backends[backend]
        executor.submit(StepPlan(next_seq[backend], [], [index, calls], []))
        next_seq[backend] += 1
        return executor.collect().token_ids[0] / calls / 1000

    results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in backends}
    try:
        print(f"{'size':>10}  {'shm µs':>16}  {'gloo µs':>16}   (median, least)", file=sys.stderr)
        for index, (rows, width) in enumerate(SIZES):
            times: dict[str, list[float]] = {name: [] for name in backends}
            calls = {
                name: max(5, int(options.seconds / rounds / (measure(name, index, 20) * 1e-6))) for name in backends
            }
            for _ in range(rounds):
                for name in backends:
                    times[name].append(measure(name, index, calls[name]))
            size = f"{rows}x{width}"
            for name in backends:
                results[name][size] = {
                    "median_us": round(statistics.median(times[name]), 2),
                    "least_us": round(min(times[name]), 2),
                }
            shown = [f"{results[n][size]['median_us']:8.1f}{results[n][size]['least_us']:8.1f}" for n in backends]
            print(f"{size:>10}  {shown[0]}  {shown[1]}", file=sys.stderr)
    finally:
        for executor in backends.values():
            executor.shutdown()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    print(
        json.dumps(
            {
                "bench": "all_reduce",
                "commit": commit.stdout.strip() if commit.returncode == 0 else "",
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "torch": torch.__version__,
                "load_average": round(os.getloadavg()[0], 2),
                "ranks": options.ranks,
                "dtype": "float32",
                **results,
            }
        )
    )


if __name__ == "__main__":
    main()
