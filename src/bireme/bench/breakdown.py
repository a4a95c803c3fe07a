"""Where a step's time goes: kernels by kind, from torch's profiler."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bireme import kernels

MODULE_KINDS = {
    "attention": "attention",
    "embedding": "norm",
    "gated_delta": "gdn",
    "linear": "gemm",
    "mlp": "norm",
    "norm": "norm",
    "sampling": "sampling",
    "token_mask": "sampling",
}
"""Module of ``kernels.triton`` (or how its name begins) → kind of its kernels; another module is a kind of its own."""

PATTERNS = (
    ("sampling", r"argmax|top_?k|sort|philox"),
    ("glue", r"at::native|memcpy|memset|elementwise|catarray|^aten::(?!mm|addmm|bmm|linear|matmul|_scaled)"),
    ("collective", r"nccl|all_?reduce|all_?gather|symm_mem|multimem"),
    ("gemm", r"gemm|gemv|nvjet|cutlass|xmma|matmul|split_?k|stream_?k|cublas|aten::(?:mm|addmm|bmm)"),
    ("attention", r"attn|attention|flash"),
    ("gdn", r"gated_delta|delta_rule|causal_conv1d"),
    ("norm", r"norm|silu"),
)
"""Kind → pattern of names of kernels that are not this package's; the first that matches counts. What fits none is
"other", and listed."""

_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in PATTERNS)
_JIT_FUNCTION = re.compile(r"^@triton\.jit\b.*\n(?:@.*\n)*def (\w+)", re.MULTILINE)
_MAX_NAME = 100


@functools.cache
def own_kernels() -> dict[str, str]:
    """Name → kind of every Triton kernel of this package, read off the source.

    Raises:
        ValueError: two modules of different kinds have a kernel of one name, which a profile could not tell apart.
    """
    found: dict[str, str] = {}
    for path in sorted((Path(kernels.__file__).parent / "triton").glob("*.py")):
        kind = next((kind for module, kind in MODULE_KINDS.items() if path.stem.startswith(module)), path.stem)
        for name in _JIT_FUNCTION.findall(path.read_text(encoding="utf-8")):
            if found.setdefault(name, kind) != kind and name.endswith("_kernel"):
                raise ValueError(f"{path.name}: a kernel of kind {found[name]} is called {name}, too")
    return found


def kind_of(name: str) -> str:
    """The kind of a kernel (or on the CPU an operator) by its name."""
    own = own_kernels().get(name)
    return own or next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def attribute(spans: list[tuple[float, float, str]]) -> tuple[dict[str, float], float]:
    """Time by name from kernels that may overlap, and the idle time between them.

    Kernels of one stream overlap where a kernel starts before the one before it has ended; each moment belongs to the
    kernel that started first, so that all parts and the idle time add up to the whole.

    Args:
        spans: (start, end, name) of each kernel.
    """
    by_name: dict[str, float] = {}
    idle = 0.0
    reached: float | None = None
    for start, end, name in sorted(spans):
        if reached is not None and start > reached:
            idle += start - reached
        begin = start if reached is None else max(start, reached)
        by_name[name] = by_name.get(name, 0.0) + max(0.0, end - begin)
        reached = end if reached is None else max(end, reached)
    return by_name, idle


def profile(work: Callable[[], object], num_steps: int, *, on_cuda: bool) -> dict[str, Any]:
    """Run ``work``, which is ``num_steps`` steps, under the profiler.

    Returns:
        ``kinds``: ms a step by kind; ``gap_ms``: the device's idle time a step, between kernels (absent on the CPU);
        ``kernels``: launches a step; ``top``: the costliest names; ``other``: those of no known kind, with their ms.
    """
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_cuda else activity.CPU]) as profiler:
        work()
        if on_cuda:
            torch.cuda.synchronize()
    if on_cuda:
        spans = _device_spans(profiler)
        by_name, idle = attribute(spans)
        result: dict[str, Any] = {"gap_ms": round(idle / num_steps / 1e3, 4)}
        num_kernels = len(spans)
    else:
        events = profiler.key_averages()
        by_name = {event.key: event.self_cpu_time_total for event in events}
        result = {}
        num_kernels = sum(event.count for event in events)
    return result | summarize(by_name, num_steps, num_kernels)


def summarize(by_name: dict[str, float], num_steps: int, num_kernels: int) -> dict[str, Any]:
    """The figures of ``profile`` from microseconds by name."""

    def per_step(microseconds: float) -> float:
        return round(microseconds / num_steps / 1e3, 4)

    kinds: dict[str, float] = {}
    for name, microseconds in by_name.items():
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + microseconds
    ranked = sorted(by_name.items(), key=lambda item: -item[1])
    return {
        "kinds": {kind: per_step(value) for kind, value in sorted(kinds.items(), key=lambda item: -item[1])},
        "kernels": round(num_kernels / num_steps, 1),
        "top": {name[:_MAX_NAME]: per_step(value) for name, value in ranked[:12]},
        "other": {name[:_MAX_NAME]: per_step(value) for name, value in ranked if kind_of(name) == "other"},
    }


def _device_spans(profiler: Any) -> list[tuple[float, float, str]]:
    """(start, end, name) in µs of all that ran on the device."""
    with tempfile.TemporaryDirectory(prefix="bireme-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return [
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event
    ]
