"""The pocket model behind ``bireme serve``, for clients that are not this project's own.

``make clients-test`` runs these in an environment that has the clients; BIREME_SERVER_PYTHON then names the interpreter
that has the package. Without a client its tests are skipped.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients_support import API_KEY

START_SECONDS = 120.0


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of a server of the pocket model that wants API_KEY."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = os.environ.get("BIREME_SERVER_PYTHON", sys.executable)
    flags = ("--port", str(port), "--served-model-name", "pocket", "--dtype", "float32", "--api-key", API_KEY)
    log = Path(tmp_path_factory.mktemp("clients") / "server.log")
    with log.open("wb") as out:
        process = subprocess.Popen([python, "-m", "bireme", "serve", "pocket", *flags], stdout=out, stderr=out)
        try:
            _wait_healthy(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server did not start: {log.read_text()[-2000:]}")
