"""The Triton kernels without a GPU: their tests again, each file in a process of its own with Triton's interpreter on.

The interpreter is chosen by an environment variable that Triton reads once: it cannot be switched on in this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, which has wheels for x86-64 Linux only")
TESTS = Path(__file__).resolve().parent
FILES = sorted(path.name for path in TESTS.glob("test_*triton*.py") if path != Path(__file__).resolve())


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_kernels_agree_with_the_reference_in_triton_s_interpreter(name: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-W",
            "ignore",
            "-p",
            "no:cacheprovider",
            "-m",
            "not gpu",
            str(TESTS / name),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout or "100%" in done.stdout, done.stdout[-2000:]
