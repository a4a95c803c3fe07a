"""``guidellm`` at 32 streams for BIREME_LOAD_SECONDS (60): no request may fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clients_support import API_KEY

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = shutil.which("guidellm", path=str(Path(sys.executable).parent))
SECONDS = int(os.environ.get("BIREME_LOAD_SECONDS", "60"))


@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.skipif(PROGRAM is None, reason="guidellm is not installed (make clients-test)")
def test_32_streams_of_guidellm_see_no_failure(url: str, tmp_path: Path) -> None:
    assert PROGRAM is not None
    report = tmp_path / "report.json"
    command = [
        PROGRAM,
        "run",
        "--disable-console-interactive",
        f"--backend=kind=openai_http,target={url},model=pocket,api_key={API_KEY}",
        "--profile=kind=concurrent,streams=32",
        f"--constraint=kind=max_duration,seconds={SECONDS}",
        f"--tokenizer=kind=huggingface_auto,model={ROOT / 'src/bireme/pocket/model'}",
        "--data=kind=synthetic_text,prompt_tokens=128,output_tokens=64",
        f"--output=kind=json,path={report}",
    ]
    done = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=SECONDS + 200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(report.read_text())["benchmarks"][0]["scheduler_metrics"]["requests_made"]
    print(made)
    assert made["errored"] == 0
    assert made["successful"] > 32
