"""``lm-eval`` scores the tasks that are kept in ``pocket/lm_eval``: generation and log-likelihoods."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clients_support import API_KEY

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = shutil.which("lm-eval", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(PROGRAM is None, reason="lm-eval is not installed (make clients-test)")
def test_lm_eval_scores_generation_and_likelihoods(url: str) -> None:
    assert PROGRAM is not None
    arguments = {
        "model": "pocket",
        "base_url": f"{url}/v1/completions",
        "tokenizer": "src/bireme/pocket/model",
        "num_concurrent": "8",
        "max_length": "8192",
    }
    command = [PROGRAM, "run", "--model", "local-completions", "--model_args"]
    command += [",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", "pocket/lm_eval", "--tasks", "pocket_answers,pocket_facts", "--limit", "12"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OPENAI_API_KEY": API_KEY}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if "exact_match" in line or "|acc" in line]
    assert len(rows) >= 2, done.stdout
    assert all(float(row.split("|")[7]) >= 0.9 for row in rows), rows
