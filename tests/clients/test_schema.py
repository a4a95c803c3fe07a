"""``schemathesis`` reads /openapi.json and sends what it makes of it: the server must never be at fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from clients_support import API_KEY

PROGRAM = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
EXAMPLES = os.environ.get("BIREME_SCHEMA_EXAMPLES", "50")


@pytest.mark.timeout(900)
@pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not installed (make clients-test)")
def test_schemathesis_finds_no_fault_of_the_server(url: str) -> None:
    assert PROGRAM is not None
    command = [PROGRAM, "run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {API_KEY}"]
    command += ["--checks", "not_a_server_error", "--max-examples", EXAMPLES, "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        assert answer.status == 200
