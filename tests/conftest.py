"""What tests of several areas share."""

from __future__ import annotations

import os
import signal

# Before torch is imported anywhere, and for every process that a test starts: tests of small models on few cores are
# quickest with one thread each, and ranks must not fight over cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and processes started from here would inherit it: tests of
    interruption would then fail by where they were started from."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny random checkpoint (once per set of arguments) and returns its folder."""
    written: dict[str, Path] = {}

    def write(**options: Any) -> Path:
        from bireme.dummy import write_dummy_checkpoint

        key = repr(sorted(options.items()))
        if key not in written:
            folder = tmp_path_factory.mktemp("checkpoint")
            write_dummy_checkpoint(folder, **options)
            written[key] = folder
        return written[key]

    return write


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none, so that a plain ``pytest`` is right everywhere."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
