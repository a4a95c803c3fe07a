"""Time of one sampling pass over [rows, 248320] logits on a GPU: the kernels against the same draw in plain torch.

    python bench/sampling.py --out sampling.jsonl

One JSON line a case: device µs (median over runs between two events, launches included), the time in which the logits
could be read once at 4.52 TB/s, and the ratio of plain torch to the kernels in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bireme.kernels.triton.sampling import draw_tokens
from bireme.sampling.draw import draw_among, draw_full
from bireme.sampling.philox import key_schedule
from bireme.sampling.processors import top_k_top_p, weights_of

VOCAB = 248_320
READ_BYTES_PER_SECOND = 4.52e12


def microseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median device time of a call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # the host gets ahead, as it is during a step: launches are not what is timed
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000.0)
    return statistics.median(times)


def cases(num_rows: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """name → (kernels, plain torch)."""
    logits = torch.randn(num_rows, VOCAB, device="cuda") * 3
    temperature = torch.full((num_rows, 1), 0.8, device="cuda")
    low = torch.arange(num_rows, device="cuda").unsqueeze(1)
    high = torch.zeros_like(low)
    positions = torch.arange(num_rows, device="cuda")
    keys = key_schedule(low.squeeze(1), high.squeeze(1))

    def filtered(k: int, p: float) -> tuple[Callable[[], object], Callable[[], object]]:
        top_k = torch.full((num_rows, 1), k, device="cuda")
        top_p = torch.full((num_rows, 1), p, dtype=torch.float64, device="cuda")

        def kernels() -> Tensor:
            return draw_tokens(
                logits, temperature, low, high, positions, top_k=top_k, top_p=top_p, smallest_k=k, largest_k=k
            )

        def plain() -> Tensor:
            return draw_among(*top_k_top_p(logits, temperature, top_k, top_p, k), keys, positions)

        return kernels, plain

    return {
        "greedy": (lambda: logits.argmax(dim=-1), lambda: logits.argmax(dim=-1)),
        "temperature": (
            lambda: draw_tokens(logits, temperature, low, high, positions),
            lambda: draw_full(weights_of(logits, temperature), keys, positions),
        ),
        "top_k 20, top_p 0.95": filtered(20, 0.95),
        "top_k 200, top_p 0.95": filtered(200, 0.95),
        "top_p 0.95": filtered(VOCAB, 0.95),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = []
    for num_rows in arguments.rows:
        for name, (kernels, plain) in cases(num_rows).items():
            limit = num_rows * VOCAB * 4 / READ_BYTES_PER_SECOND * 1e6
            ours = microseconds(kernels)
            theirs = microseconds(plain, 5) if num_rows <= 64 else None
            line = {
                "bench": "sampling",
                "case": name,
                "rows": num_rows,
                "kernels_us": round(ours, 1),
                "torch_us": None if theirs is None else round(theirs, 1),
                "ratio": None if theirs is None else round(theirs / ours, 2),
                "read_once_us": round(limit, 1),
                "device": torch.cuda.get_device_name(),
            }
            lines.append(json.dumps(line))
            print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
