"""Time of one all-reduce between GPUs, each with a process of its own: nccl, and torch's symmetric memory.

NVLink multicast stays off (NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1): nothing here needs it.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CALLS = 20
REPLAYS = 10


def measure(num_gpus: int, shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Microseconds of an all-reduce of bfloat16 [rows, width] over ``num_gpus`` GPUs, one entry a shape.

    Each way is timed as single launches and within a CUDA graph. ``one_shot`` and ``two_shot`` include the copy into
    the symmetric buffer. A way that does not run says why, in ``<way>_error``.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="bireme-collectives-") as folder:
        path = Path(folder) / "result.json"
        torch.multiprocessing.spawn(_rank, (num_gpus, port, shapes, str(path)), nprocs=num_gpus)
        result: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return result


def _rank(rank: int, size: int, port: int, shapes: list[tuple[int, int]], path: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=device)
    found = [_measure_shape(rows, width, device) for rows, width in shapes]
    if rank == 0:
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _measure_shape(rows: int, width: int, device: torch.device) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((rows, width), float(rank + 1), dtype=torch.bfloat16, device=device)
    expected = float(size * (size + 1) // 2)
    found: dict[str, Any] = {"rows": rows, "width": width, "kib": rows * width * 2 / 1024, "ranks": size}

    def nccl() -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    ways: dict[str, Callable[[], Tensor]] = {"nccl": nccl}
    try:
        ways |= _symmetric_ways(x, rows, width, device)
    except Exception as error:
        found["symmetric_error"] = f"{type(error).__name__}: {error}"[:300]
    for name, way in ways.items():
        try:
            if not bool((way() == expected).all()):
                found[f"{name}_error"] = "wrong sum"
                continue
            found[f"{name}_us"] = _time(way)
            found[f"{name}_graph_us"] = _time_graph(way)
        except Exception as error:
            found[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
    return found


def _symmetric_ways(x: Tensor, rows: int, width: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    buffer = symmetric.empty((rows, width), dtype=x.dtype, device=device)
    symmetric.rendezvous(buffer, name)

    def one_shot() -> Tensor:
        buffer.copy_(x)
        result: Tensor = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", name)
        return result

    def two_shot() -> Tensor:
        buffer.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", name)
        return buffer

    return {"one_shot": one_shot, "two_shot": two_shot}


def _time(way: Callable[[], Tensor]) -> float:
    for _ in range(5):
        way()
    return _elapsed(way, CALLS, CALLS)


def _time_graph(way: Callable[[], Tensor]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            way()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            way()
    graph.replay()
    return _elapsed(graph.replay, REPLAYS, CALLS * REPLAYS)


def _elapsed(work: Callable[[], object], times: int, calls: int) -> float:
    """Microseconds a call where ``work`` is run so many times and makes ``calls`` in all; the ranks begin together."""
    dist.barrier()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) / calls * 1e3, 2)
