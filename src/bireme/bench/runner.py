"""The model runner as benchmarks start it: caches full of noise, and an account of each rank's memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from bireme.config import CacheCapacity
from bireme.executor.model_runner import ModelRunner

REPORT_FOLDER = "BIREME_BENCH_REPORT"
"""Environment variable: the folder where each rank writes ``rank<N>.json``."""

FACTORY = "bireme.bench.runner:BenchRunner"


class BenchRunner(ModelRunner):
    """A model runner that serves the same plans; rows may start in the middle of a context that nobody computed."""

    def allocate(self, capacity: CacheCapacity) -> None:
        super().allocate(capacity)
        # Zeros cost less power than values, and a chip at its power limit then runs faster than it would in service.
        for pool, scale in ((self.kv.k, 1.0), (self.kv.v, 1.0), (self.state.recurrent, 0.1), (self.state.conv, 1.0)):
            for layer in pool:
                layer.normal_(std=scale)
        folder = os.environ.get(REPORT_FOLDER)
        if folder:
            path = Path(folder) / f"rank{self.group.rank}.json"
            path.write_text(json.dumps(self.memory()), encoding="utf-8")

    def memory(self) -> dict[str, Any]:
        """Bytes of this rank, as they are."""
        found: dict[str, Any] = {
            "rank": self.group.rank,
            "weight_bytes": sum(weight.nbytes for weight in self.model.weights()),
            "state_bytes": self.state.recurrent.nbytes + self.state.conv.nbytes,
            "kv_bytes": self.kv.k.nbytes + self.kv.v.nbytes,
        }
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            found |= {
                "allocated_bytes": torch.cuda.memory_allocated(self.device),
                "peak_bytes": torch.cuda.max_memory_allocated(self.device),
                "reserved_bytes": torch.cuda.memory_reserved(self.device),
                "device_used_bytes": total - free,
                "device_total_bytes": total,
            }
        return found


def read_reports(folder: str | Path) -> list[dict[str, Any]]:
    """What the ranks wrote, in rank order."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("rank*.json")]
    return sorted(reports, key=lambda report: report["rank"])
