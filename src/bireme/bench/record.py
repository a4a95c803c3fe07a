"""The JSON line of a measurement: what ran, where, and from which commit."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bireme import __version__


def machine() -> dict[str, Any]:
    """This machine in figures: processor, usable cores, memory in GiB, GPU if any, and the versions that matter."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(num_gpus)],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of this source tree, "+" behind it when files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _program() -> str:
    path = Path(sys.argv[0])
    return "bireme" if path.name in ("bireme", "__main__.py") else f"python {path.parent.name}/{path.name}"


def record(bench: str, **fields: Any) -> str:
    """One JSON line: ``bench``, version, commit, date (UTC), machine, command line, then ``fields``."""
    line = {
        "bench": bench,
        "version": __version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "command": " ".join([_program(), *sys.argv[1:]]),
        **fields,
    }
    return json.dumps(line, ensure_ascii=False)


def emit(line: str, append_to: Path | None = None) -> None:
    """Print the line on stdout and, when asked, append it to a file (its folder is made)."""
    print(line, flush=True)
    if append_to is not None:
        append_to.parent.mkdir(parents=True, exist_ok=True)
        with append_to.open("a", encoding="utf-8") as out:
            out.write(line + "\n")


def median(values: list[float]) -> float:
    return statistics.median(values)
