"""Which kernel for which product: measures candidates for all projections of Qwen3.5 models on this GPU.

    python bench/tune_linear.py [--seconds 100] [--geometry 27b,9b,4b] [--out FILE.jsonl] [--write TABLE.json]

A candidate is timed where it will stand: behind the small kernel that makes its input and in front of the one that
takes its output, in a CUDA graph, with weights rotated past the L2 cache. One JSON line a case goes to stdout (and
``--out``): ``us`` is the median of that unit, ``limit_us`` what reading the weights must take, ``share`` their ratio.
``--write`` keeps the winners as a table for ``bireme/kernels/triton/tuning``; it is rewritten after every shape, so a
run that is cut off leaves the shapes it got to. Then the small kernels alone, and at last whole layers as chains:
cuBLAS, the winners, and the winners without early launches.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.bench.geometry import geometry_fields
from bireme.kernels.triton.launch import num_sms, pdl_off
from bireme.kernels.triton.mlp import silu_and_mul
from bireme.kernels.triton.norm import add_rms_norm, rms_norm

tiled = importlib.import_module("bireme.kernels.triton.linear")
Tiling = tiled.Tiling

READ_BYTES_PER_US = 4.52e6
ROTATED_BYTES = 200 << 20
EPS = 1e-6
ROWS = (16, 64)
DEVICE = "cuda"
TILINGS = [
    Tiling(64, 128, num_stages=4),
    Tiling(64, 128, num_stages=3),
    Tiling(64, 128, num_stages=4, tma=True),
    Tiling(64, 64, num_stages=6),
    Tiling(128, 64, num_stages=4),
    Tiling(128, 128, num_stages=4, tma=True),
    Tiling(64, 256, num_stages=3),
    Tiling(64, 128, num_stages=6, tma=True),
    Tiling(128, 64, num_stages=6, tma=True),
    Tiling(64, 256, num_stages=3, tma=True),
    Tiling(128, 128, num_warps=8, num_stages=3),
    Tiling(32, 128, num_stages=4),
    Tiling(128, 64, num_warps=8, num_stages=5),
    Tiling(32, 256, num_stages=3),
]


@dataclass(frozen=True)
class Shape:
    """A product and where it stands: behind a norm ("in"), between two small kernels ("out", "down"), or "head"."""

    name: str
    role: str
    out_size: int
    in_size: int

    @property
    def num_bytes(self) -> int:
        return 2 * self.out_size * self.in_size

    @property
    def limit_us(self) -> float:
        return self.num_bytes / READ_BYTES_PER_US

    @property
    def key(self) -> str:
        return f"{self.out_size}x{self.in_size}"


def shapes_of(geometry: str) -> list[Shape]:
    fields = geometry_fields(geometry)
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    values = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
    keys = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    query = fields["num_attention_heads"] * fields["head_dim"]
    kv = fields["num_key_value_heads"] * fields["head_dim"]
    mixed = 2 * keys + 2 * values + 2 * fields["linear_num_value_heads"]
    return [
        Shape(f"{geometry} down", "down", hidden, inner),
        Shape(f"{geometry} gate_up", "in", 2 * inner, hidden),
        Shape(f"{geometry} in_proj", "in", mixed, hidden),
        Shape(f"{geometry} out_proj", "out", hidden, values),
        Shape(f"{geometry} qkv", "in", 2 * (query + kv), hidden),
        *([Shape(f"{geometry} o_proj", "out", hidden, query)] if query != values else []),
        Shape(f"{geometry} lm_head", "head", fields["vocab_size"], hidden),
    ]


# Timing.


def time_graph(run: Callable[[int], None], count: int, rounds: int = 5) -> float:
    """Microseconds of one of ``count`` consecutive ``run(i)`` in a graph: the median over rounds of replays."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            run(i)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000.0 / count)
    return statistics.median(times)


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).mul_(scale)


class Unit:
    """One shape at one number of rows, with its neighbours."""

    def __init__(self, shape: Shape, weights: list[Tensor], rows: int) -> None:
        self.shape, self.weights, self.rows = shape, weights, rows
        width = 2 * shape.in_size if shape.role == "down" else shape.in_size
        self.input = randn(rows, width)
        self.block, self.stream = randn(rows, shape.in_size), randn(rows, shape.in_size)
        self.residual = randn(rows, shape.out_size) if shape.role in ("out", "down") else None
        self.ones = torch.ones(max(shape.in_size, shape.out_size), device=DEVICE)
        self.count = max(2 * len(weights), 12) if shape.role != "head" else 3
        x = silu_and_mul(self.input) if shape.role == "down" else self.input
        self.expected = F.linear(x, weights[0])

    def product(self, x: Tensor, weight: Tensor, tiling: Any) -> Tensor:
        dtype = torch.float32 if self.shape.role == "head" else torch.bfloat16
        if tiling is None:
            result = F.linear(x, weight)
            return result.float() if self.shape.role == "head" else result
        return tiled.run_tiled(x, weight, tiling, dtype, raw=self.residual is not None)

    def run(self, i: int, tiling: Any) -> None:
        role, weight = self.shape.role, self.weights[i % len(self.weights)]
        if role == "down":
            y = self.product(silu_and_mul(self.input), weight, tiling)
        elif role == "in":
            x, _ = add_rms_norm(self.block, self.stream, self.ones[: self.shape.in_size], EPS)
            y = self.product(x, weight, tiling)
        else:
            y = self.product(rms_norm(self.input, self.ones[: self.shape.in_size], EPS), weight, tiling)
        if self.residual is not None:
            add_rms_norm(y, self.residual, self.ones[: self.shape.out_size], EPS)

    def error(self, tiling: Any) -> float:
        """The largest difference to cuBLAS, relative to the largest value."""
        x = silu_and_mul(self.input) if self.shape.role == "down" else self.input
        y = self.product(x, self.weights[0], tiling)
        y = y.sum(0) if y.dim() == 3 else y
        return ((y.float() - self.expected.float()).abs().max() / self.expected.float().abs().max()).item()

    def alone(self, tiling: Any) -> float:
        x = self.input[:, : self.shape.in_size].contiguous()
        return time_graph(
            lambda i: void(self.product(x, self.weights[i % len(self.weights)], tiling)), self.count, rounds=3
        )


def void(_: object) -> None:
    return None


def with_parts(tiling: Any, shape: Shape, sms: int, programs: int) -> Any:
    """``tiling`` split into parts so that there are about ``programs`` programs for each multiprocessor."""
    if shape.role not in ("out", "down"):
        return tiling
    tiles = -(-shape.out_size // tiling.block_out)
    parts = max(1, min(programs * sms // tiles, tiled.MAX_PARTS, shape.in_size // tiling.block_in // 3))
    return dataclasses.replace(tiling, parts=parts)


# The search.


class Tuner:
    def __init__(self, report: Callable[[dict[str, Any]], None], deadline: float) -> None:
        self.report = report
        self.deadline = deadline
        self.sms = num_sms(torch.device(DEVICE, 0))

    def measure(self, unit: Unit, tiling: Any, **extra: Any) -> float:
        """Time a candidate and report it; infinity if it fails or is wrong."""
        record: dict[str, Any] = {
            "case": unit.shape.name,
            "out": unit.shape.out_size,
            "in": unit.shape.in_size,
            "rows": unit.rows,
            "limit_us": round(unit.shape.limit_us, 2),
            **describe(tiling),
            **extra,
        }
        try:
            error = unit.error(tiling)
            if not error < 0.02:
                raise ArithmeticError(f"differs from cuBLAS by {error:.3g} of the largest value")
            us = time_graph(lambda i: unit.run(i, tiling), unit.count)
        except Exception as error:
            self.report(record | {"error": f"{type(error).__name__}: {error}"[:200]})
            return float("inf")
        self.report(record | {"us": round(us, 2), "share": round(unit.shape.limit_us / us, 3)})
        return us

    def tune(self, shape: Shape, until: float) -> dict[int, Any]:
        """The winner for each number of rows: {rows: tiling or None for cuBLAS}."""
        copies = max(1, -(-ROTATED_BYTES // shape.num_bytes))
        weights = [randn(shape.out_size, shape.in_size, scale=shape.in_size**-0.5) for _ in range(copies)]
        units = {rows: Unit(shape, weights, rows) for rows in ROWS}
        times: dict[int, dict[Any, float]] = {rows: {None: self.measure(unit, None)} for rows, unit in units.items()}

        def attempt(rows: int, tiling: Any) -> None:
            if tiling not in times[rows] and time.monotonic() < until:
                times[rows][tiling] = self.measure(units[rows], tiling)

        def best(rows: int, count: int) -> list[Any]:
            return sorted((t for t in times[rows] if t is not None), key=times[rows].__getitem__)[:count]

        few, many = ROWS
        for base in TILINGS:
            attempt(few, with_parts(base, shape, self.sms, 3))
        for tiling in best(few, 3):
            for programs in (2, 4, 6):
                attempt(few, with_parts(tiling, shape, self.sms, programs))
        for tiling in best(few, 6):
            attempt(many, tiling)
        for base in TILINGS[4:7]:  # wide tiles: many rows are read once for each
            attempt(many, with_parts(base, shape, self.sms, 2))
        chosen = choose(times)
        for rows in ROWS:
            alone = round(units[rows].alone(chosen[rows]), 2)
            self.measure(units[rows], chosen[rows], winner=True, alone_us=alone)
        one = Unit(shape, weights, 1)
        for tiling in {None, chosen[ROWS[0]]}:
            self.measure(one, tiling, winner=tiling == chosen[ROWS[0]])
        return chosen


def describe(tiling: Any) -> dict[str, Any]:
    return {"backend": "cublas"} if tiling is None else {"backend": "triton", **dataclasses.asdict(tiling)}


def choose(times: dict[int, dict[Any, float]]) -> dict[int, Any]:
    """The fastest for each number of rows, or one way to add up for all of them where that costs 2 % at most.

    The order of a product's sums is set by ``block_in`` and ``parts``; rows then do not depend on how many there are.
    """
    best = {rows: min(found, key=found.__getitem__) for rows, found in times.items()}

    def order(tiling: Any) -> Any:
        return None if tiling is None else (tiling.block_in, tiling.parts)

    candidates = []
    for kept in {order(tiling) for found in times.values() for tiling in found} - {None}:
        same = {rows: [t for t in found if order(t) == kept] for rows, found in times.items()}
        if all(same.values()):
            picked = {rows: min(tilings, key=times[rows].__getitem__) for rows, tilings in same.items()}
            ratios = [times[rows][picked[rows]] / times[rows][best[rows]] for rows in times]
            candidates.append((max(ratios), sum(ratios), picked))
    worst, _, picked = min(candidates, key=lambda item: item[:2], default=(float("inf"), 0.0, best))
    return picked if worst <= 1.02 else best


def write_table(path: Path, table: dict[str, dict[str, Any]]) -> None:
    content = {"device": torch.cuda.get_device_name(), "shapes": table}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# Small kernels, and whole layers.


def _call(call: Callable[[], object], _: int) -> None:
    call()


def measure_small(report: Callable[[dict[str, Any]], None], hidden: int, inner: int) -> None:
    """Norms and SwiGLU alone: few rows (their latency) and 16,384 (their share of the memory's speed)."""
    ones = torch.ones(hidden, device=DEVICE)
    for rows in (1, 16, 64, 16384):
        x, residual, gate_up = randn(rows, hidden), randn(rows, hidden), randn(rows, 2 * inner)
        cases: list[tuple[str, int, Callable[[], object]]] = [
            ("rms_norm", 4 * x.numel(), partial(rms_norm, x, ones, EPS)),
            ("add_rms_norm", 8 * x.numel(), partial(add_rms_norm, x, residual, ones, EPS)),
            ("silu_and_mul", 3 * gate_up.numel(), partial(silu_and_mul, gate_up)),
        ]
        if rows <= 64:
            parts = torch.randn(4, rows, hidden, device=DEVICE)
            cases.append(("add_rms_norm of 4 parts", 22 * x.numel(), partial(add_rms_norm, parts, residual, ones, EPS)))
        for name, num_bytes, call in cases:
            us = time_graph(partial(_call, call), 20 if rows <= 64 else 4)
            record = {"case": name, "rows": rows, "hidden": hidden, "inner": inner, "us": round(us, 2)}
            report(record | {"limit_us": round(num_bytes / READ_BYTES_PER_US, 2)})


def chain_us(shapes: dict[str, Shape], chosen: dict[str, dict[int, Any]], rows: int, variant: str) -> float:
    """Microseconds of a linear layer's products, norms and SwiGLU, a norm standing for conv and delta rule."""
    names = ("in_proj", "out_proj", "gate_up", "down")
    weights = {name: randn(shapes[name].out_size, shapes[name].in_size, scale=0.02) for name in names}
    hidden, values = shapes["out_proj"].out_size, shapes["out_proj"].in_size
    ones = torch.ones(max(hidden, values), device=DEVICE)
    residual, mixed = randn(rows, hidden), randn(rows, values)
    bucket = next(bucket for bucket in ROWS if rows <= bucket)

    def product(name: str, x: Tensor, *, raw: bool = False) -> Tensor:
        tiling = None if variant == "cublas" else chosen[name][bucket]
        return (
            F.linear(x, weights[name])
            if tiling is None
            else tiled.run_tiled(x, weights[name], tiling, x.dtype, raw=raw)
        )

    state = {"x": randn(rows, hidden)}

    def layer(_: int) -> None:
        product("in_proj", state["x"])
        y = product("out_proj", rms_norm(mixed, ones[:values], EPS), raw=True)
        x, _residual = add_rms_norm(y, residual, ones[:hidden], EPS)
        gate_up = product("gate_up", x)
        y = product("down", silu_and_mul(gate_up), raw=True)
        state["x"], _residual = add_rms_norm(y, residual, ones[:hidden], EPS)

    with pdl_off(variant == "no pdl"):
        return time_graph(layer, 6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100.0, help="time for all of it, compiling included")
    parser.add_argument("--geometry", default="27b,9b,4b", help="comma-separated names")
    parser.add_argument("--out", type=Path, help="also append the JSON lines to this file")
    parser.add_argument("--write", type=Path, help="write the winners' table to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_linear: no CUDA device here", file=sys.stderr)
        return 2
    started = time.monotonic()
    lines = args.out.open("a", encoding="utf-8") if args.out else None

    def report(record: dict[str, Any]) -> None:
        text = json.dumps({"bench": "tune_linear", "t": round(time.monotonic() - started, 1), **record})
        print(text, flush=True)
        if lines:
            print(text, file=lines, flush=True)

    torch.manual_seed(0)
    geometries = args.geometry.split(",")
    shapes = {geometry: shapes_of(geometry) for geometry in geometries}
    tuner = Tuner(report, started + args.seconds)
    chains_from = started + args.seconds * 0.9
    todo = list(dict.fromkeys(shape for geometry in geometries for shape in shapes[geometry]))
    table: dict[str, dict[str, Any]] = {}
    chosen: dict[str, dict[int, Any]] = {}
    with torch.inference_mode():
        for number, shape in enumerate(todo):
            left = chains_from - time.monotonic()
            if shape.key in table:
                chosen[shape.name] = chosen[next(s.name for s in todo if s.key == shape.key)]
                continue
            try:
                chosen[shape.name] = tuner.tune(shape, time.monotonic() + left / (len(todo) - number) - 1.0)
            except Exception as error:
                report({"case": shape.name, "error": f"{type(error).__name__}: {error}"[:300]})
                continue
            table[shape.key] = {str(rows): describe(tiling) for rows, tiling in chosen[shape.name].items()}
            if args.write:
                write_table(args.write, table)
        for geometry in geometries:
            by_part = {shape.name.split()[1]: shape for shape in shapes[geometry]}
            parts = ("in_proj", "out_proj", "gate_up", "down")
            winners = {part: chosen.get(by_part[part].name) for part in parts}
            if not all(winners.values()):
                continue
            limit = sum(by_part[part].limit_us for part in parts)
            try:
                measure_small(report, by_part["down"].out_size, by_part["down"].in_size)
            except Exception as error:
                report({"case": f"{geometry} small kernels", "error": f"{type(error).__name__}: {error}"[:300]})
            for rows in (1, 16, 64):
                for variant in ("cublas", "winners", "no pdl"):
                    record = {
                        "case": f"{geometry} chain",
                        "rows": rows,
                        "variant": variant,
                        "limit_us": round(limit, 1),
                    }
                    try:
                        us = chain_us(by_part, winners, rows, variant)  # type: ignore[arg-type]
                    except Exception as error:
                        report(record | {"error": f"{type(error).__name__}: {error}"[:200]})
                        continue
                    report(record | {"us": round(us, 1), "share": round(limit / us, 3)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
