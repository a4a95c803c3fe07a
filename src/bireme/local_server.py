"""A ``bireme serve`` process of one's own on a free port of this machine: for the demo, evaluations and tests."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from bireme.errors import EngineDeadError

START_SECONDS = 120.0
STOP_SECONDS = 60.0


@dataclass
class RunningServer:
    """A ``bireme serve`` process that answers."""

    process: subprocess.Popen[bytes]
    url: str

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


def exit_on_sigterm() -> None:
    """From now on SIGTERM ends this process as an exception does, so that its server goes with it. Main thread only."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextlib.contextmanager
def running_server(
    model: str | Path, *flags: str, log: IO[bytes] | None = None, program: tuple[str, ...] = ("bireme", "serve")
) -> Iterator[RunningServer]:
    """Start ``bireme serve`` on a free port and wait until it is healthy; it is gone when the block ends.

    Args:
        model: a checkpoint folder, or ``pocket``.
        log: where its output goes; None for this process's own.
        program: the module that is run, and what comes before the model on its command line.

    Raises:
        EngineDeadError: it ended, or was not healthy in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", *program, str(model), "--port", str(port), *flags]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    server = RunningServer(process, f"http://127.0.0.1:{port}")
    try:
        _wait_healthy(server)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_healthy(server: RunningServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    # Certificates take long to load, and nothing here is encrypted.
    with httpx.Client(verify=False, timeout=5.0) as client:
        while time.monotonic() < deadline:
            code = server.process.poll()
            if code is not None:
                raise EngineDeadError(f"the server ended with code {code} before it was healthy")
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{server.url}/health").status_code == 200:
                    return
            time.sleep(0.1)
    raise EngineDeadError(f"the server was not healthy within {START_SECONDS:g} s")
