"""Full attention's kernels on this GPU: decode against the memory limit, prefill against library kernels.

    python bench/attention.py [--seconds 60] [--only decode,prefill,norm,tune-decode,tune-prefill] [--out FILE.jsonl]

Every call runs in a CUDA graph; decode's caches are rotated past the L2 cache. One JSON line a case goes to stdout (and
``--out``). decode: ``limit_us`` is what reading K and V once must take at 4.52 TB/s, ``share`` their ratio. prefill:
``tflops`` counts visible (query, key) pairs only; "gathered" is cuDNN behind the copies of K and V out of the paged
cache and before the gate, as an engine would have to use it. "tune" measures other tile sizes. ``error`` is the largest
difference to the first kernel of the case, where there is something to compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bireme.kernels.triton import attention_decode, attention_inputs, attention_prefill

READ_BYTES_PER_US = 4.52e6
ROTATED_BYTES = 200 << 20
BLOCK_SIZE = 64
DIM = 256
DEVICE = "cuda"
MAX_CONTEXT = 1 << 18
HEADS = {"27b": (24, 4), "9b,4b": (16, 4)}
DECODE = [(1, 256), (16, 256), (64, 256), (256, 256), (1, 1024), (16, 1024), (64, 1024), (256, 1024)]
DECODE += [(1, 8192), (16, 8192), (64, 8192), (256, 8192)]
PREFILL = [([8192], [0]), ([1024] * 8, [0] * 8), ([32_768], [0]), ([2048], [6144]), ([128], [0]), ([128], [8064])]


def time_graph(run: Callable[[int], Any], count: int, rounds: int = 5) -> float:
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


class Caches:
    """K and V of as many layers as it takes to outgrow the L2 cache, and block tables of rows of one length."""

    def __init__(self, num_rows: int, context: int, kv_heads: int, *, rotate: bool = True) -> None:
        blocks = -(-context // BLOCK_SIZE)
        shape = (num_rows * blocks + 1, kv_heads, BLOCK_SIZE, DIM)
        num_bytes = 4 * num_rows * blocks * kv_heads * BLOCK_SIZE * DIM
        self.layers = max(1, min(32, -(-ROTATED_BYTES // num_bytes))) if rotate else 1
        self.k = torch.empty(self.layers, *shape, dtype=torch.bfloat16, device=DEVICE).normal_()
        self.v = torch.empty_like(self.k).normal_()
        order = torch.randperm(num_rows * blocks, device=DEVICE).to(torch.int32) + 1
        self.tables = torch.zeros(num_rows, MAX_CONTEXT // BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
        self.tables[:, :blocks] = order.view(num_rows, blocks)


def fused(num: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(projection, queries, gates inside the projection) of ``num`` tokens."""
    qkv = torch.randn(num, 2 * (heads + kv_heads) * DIM, dtype=torch.bfloat16, device=DEVICE)
    query = torch.randn(num, heads, DIM, dtype=torch.bfloat16, device=DEVICE)
    return qkv, query, qkv[:, : 2 * heads * DIM].view(num, heads, 2, DIM).select(2, 1)


class Bench:
    """Runs cases one by one until time is up; a case that fails is a line with its error."""

    def __init__(self, seconds: float, out: Path | None) -> None:
        self.deadline = time.monotonic() + seconds
        self.out = out

    def report(self, **fields: Any) -> None:
        line = json.dumps(fields)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    @contextmanager
    def case(self, **fields: Any) -> Iterator[dict[str, Any]]:
        """Fields to fill; the line is printed at the end. Nothing is printed when time is up."""
        results: dict[str, Any] = {}
        try:
            yield results
        except TimeoutError:
            return
        except Exception as error:
            results["error_text"] = f"{type(error).__name__}: {error}"[:300]
        rounded = {name: round(x, 4) if isinstance(x, float) else x for name, x in results.items()}
        self.report(**fields, **rounded)

    def time(self, run: Callable[[int], Any], count: int) -> float:
        """``time_graph``, or TimeoutError when time is up."""
        if time.monotonic() > self.deadline:
            raise TimeoutError
        return time_graph(run, count)

    def decode(self, name: str, heads: int, kv_heads: int, rows: int, context: int) -> None:
        caches = Caches(rows, context, kv_heads)
        _, query, gate = fused(rows, heads, kv_heads)
        lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
        limit = (rows * context * kv_heads * DIM * 4 + rows * heads * DIM * 6) / READ_BYTES_PER_US
        options = {
            "span": attention_decode.SPAN,
            "keys": attention_decode.DECODE_KEYS,
            "stages": attention_decode.DECODE_STAGES,
            "programs_per_sm": attention_decode.PROGRAMS_PER_SM,
        }
        with self.case(case="decode", heads=name, rows=rows, context=context, **options) as result:

            def run(i: int) -> Tensor:
                layer = i % caches.layers
                return attention_decode.paged_decode_attention(
                    query, gate, caches.k[layer], caches.v[layer], caches.tables, lens, MAX_CONTEXT
                )

            us = self.time(run, max(16, caches.layers))
            result |= {"us": us, "limit_us": limit, "share": limit / us}

    def prefill(
        self, name: str, heads: int, kv_heads: int, seq_lens: list[int], starts: list[int], rivals: bool
    ) -> None:
        length, start = seq_lens[0], starts[0]
        num_rows, total = len(seq_lens), sum(seq_lens)
        caches = Caches(num_rows, length + start, kv_heads, rotate=False)
        k_cache, v_cache = caches.k[0], caches.v[0]
        _, query, gate = fused(total, heads, kv_heads)
        offsets = torch.tensor([0, *seq_lens]).cumsum(0).to(torch.int32).to(DEVICE)
        contexts = torch.tensor([0, *([length + start] * num_rows)]).cumsum(0).to(torch.int32).to(DEVICE)
        row_starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        blocks = caches.tables[:, : -(-(length + start) // BLOCK_SIZE)]
        flops = 4 * heads * DIM * num_rows * (length * start + length * (length + 1) // 2)
        count = max(1, min(20, int(4e13 // flops)))
        what = {"case": "prefill", "heads": name, "seq_lens": seq_lens[:1] * num_rows, "starts": starts}
        reference: Tensor | None = None

        def contiguous(cache: Tensor) -> Tensor:
            """[rows, Hkv, context, D] out of the blocks."""
            found = cache[blocks.long()].transpose(1, 2).reshape(num_rows, kv_heads, -1, DIM)
            return found[:, :, : length + start]

        def measure(kernel: str, run: Callable[[], Tensor], **options: Any) -> None:
            nonlocal reference
            with self.case(**what, kernel=kernel, **options) as result:
                us = self.time(lambda _: run(), count)
                result |= {"us": us, "tflops": flops / us / 1e6}
                out = run().reshape(total, -1)
                if kernel not in ("triton", "gathered"):
                    out = out * torch.sigmoid(gate.reshape(total, -1))
                if reference is None:
                    reference = out
                result["error"] = (out.float() - reference.float()).abs().max().item()

        def own() -> Tensor:
            return attention_prefill.paged_prefill_attention(
                query, gate, k_cache, v_cache, caches.tables, offsets, row_starts, seq_lens, starts
            )

        tile = attention_prefill.prefill_tile(total, query.dtype)
        measure("triton", own, **dataclasses.asdict(tile))
        if not rivals:
            return
        keys, values = contiguous(k_cache), contiguous(v_cache)
        packed_k, packed_v = (x.transpose(1, 2).reshape(-1, kv_heads, DIM) for x in (keys, values))

        def flash() -> Tensor:
            return torch.ops.aten._flash_attention_forward(
                query, packed_k, packed_v, offsets, contexts, length, length + start, 0.0, True, False, scale=DIM**-0.5
            )[0]

        measure("torch flash varlen", flash)
        if start:
            return
        batched = query.view(num_rows, length, heads, DIM).transpose(1, 2)

        def sdpa(backend: SDPBackend, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(batched, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2)

        measure("sdpa flash", lambda: sdpa(SDPBackend.FLASH_ATTENTION, keys, values))
        measure("sdpa cudnn", lambda: sdpa(SDPBackend.CUDNN_ATTENTION, keys, values))

        def gathered() -> Tensor:
            out = sdpa(SDPBackend.CUDNN_ATTENTION, contiguous(k_cache), contiguous(v_cache))
            return out.reshape(total, heads, DIM).mul_(torch.sigmoid(gate))

        measure("gathered", gathered)

    def norm(self, name: str, heads: int, kv_heads: int, num: int) -> None:
        qkv, _, _ = fused(num, heads, kv_heads)
        weight = torch.ones(heads + kv_heads, DIM, device=DEVICE)
        positions = torch.arange(num, device=DEVICE)
        frequencies = 1.0 / 1e7 ** (torch.arange(0, 64, 2, device=DEVICE) / 64)
        caches = Caches(1, num, kv_heads, rotate=False)
        indices = torch.arange(num, device=DEVICE) + BLOCK_SIZE
        angles = attention_inputs.rotary_cos_sin(positions, frequencies)
        limit = (num * 2 * (heads + 2 * kv_heads) * DIM * 2 + num * 256) / READ_BYTES_PER_US
        with self.case(case="qk_norm", heads=name, tokens=num) as result:
            us = self.time(
                lambda _: attention_inputs.qk_norm_rope_write_kv(
                    qkv, weight, *angles, caches.k[0], caches.v[0], indices, 1e-6
                ),
                20,
            )
            result |= {"us": us, "limit_us": limit, "share": limit / us}
        with self.case(case="rotary", tokens=num) as result:
            result["us"] = self.time(lambda _: attention_inputs.rotary_cos_sin(positions, frequencies), 20)

    def tune_decode(self) -> None:
        """Other spans, tiles and numbers of programs, for 27B's heads."""
        settings = [
            (span, keys, stages, programs)
            for span in (128, 256, 64)
            for keys, stages, programs in ((32, 4, 2), (32, 3, 2), (64, 3, 1), (64, 2, 2), (32, 6, 1), (16, 6, 2))
        ]
        names = ("SPAN", "DECODE_KEYS", "DECODE_STAGES", "PROGRAMS_PER_SM")
        before = [getattr(attention_decode, name) for name in names]
        for rows, context in ((16, 256), (1, 8192), (64, 1024), (1, 256), (64, 256)):
            for values in settings:
                for name, value in zip(names, values, strict=True):
                    setattr(attention_decode, name, value)
                self.decode("27b", 24, 4, rows, context)
        for name, value in zip(names, before, strict=True):
            setattr(attention_decode, name, value)

    def tune_prefill(self) -> None:
        """Other tiles, for 27B's heads."""
        before = attention_prefill.LONG_TILE, attention_prefill.SHORT_TILE
        tiles = [(128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (128, 64, 8, 1), (64, 64, 4, 2), (64, 32, 4, 2)]
        tiles += [(64, 32, 4, 3), (128, 32, 8, 2), (64, 32, 8, 3)]
        for seq_lens, starts in PREFILL[:2]:
            for values in tiles:
                attention_prefill.LONG_TILE = attention_prefill.PrefillTile(*values)
                self.prefill("27b", 24, 4, seq_lens, starts, rivals=False)
        attention_prefill.LONG_TILE = before[0]
        for seq_lens, starts in PREFILL[4:]:
            for values in [(64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (64, 32, 8, 3), (16, 64, 4, 2)]:
                attention_prefill.SHORT_TILE = attention_prefill.PrefillTile(*values)
                self.prefill("27b", 24, 4, seq_lens, starts, rivals=False)
        attention_prefill.SHORT_TILE = before[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="no case begins after so long")
    parser.add_argument(
        "--only", default="decode,prefill,norm", help="of decode, prefill, norm, tune-decode, tune-prefill"
    )
    parser.add_argument("--out", type=Path, default=None, help="append the lines to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/attention.py measures a CUDA device, and there is none", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    bench = Bench(options.seconds, options.out)
    chosen = options.only.split(",")
    with torch.inference_mode():
        if "prefill" in chosen:
            for name, (heads, kv_heads) in HEADS.items():
                for seq_lens, starts in PREFILL:
                    if name == "27b" or len(seq_lens) == 1:
                        bench.prefill(name, heads, kv_heads, seq_lens, starts, rivals=name == "27b")
        if "decode" in chosen:
            for name, (heads, kv_heads) in HEADS.items():
                for rows, context in DECODE:
                    bench.decode(name, heads, kv_heads, rows, context)
        if "norm" in chosen:
            for name, (heads, kv_heads) in HEADS.items():
                for num in (1, 16, 64, 512, 8192):
                    bench.norm(name, heads, kv_heads, num)
        if "tune-decode" in chosen:
            bench.tune_decode()
        if "tune-prefill" in chosen:
            bench.tune_prefill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
