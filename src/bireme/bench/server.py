"""A Bireme server for experiments on ranks: while a certain file exists, every plan is run as one-row plans.

    python -m bireme.bench.server FOLDER --port 8000 --tp 2 --device cuda --one-row-file /tmp/one-row

It is ``bireme serve`` with another executor in front of the same ranks, so that batched and per-request decoding are
compared in one process with one set of weights. The ranks also tell their memory (``BIREME_BENCH_REPORT``).
"""

from __future__ import annotations

import argparse
import functools
import os
import sys

from bireme.bench.decode import PlanRelay
from bireme.bench.runner import FACTORY
from bireme.config import EngineConfig
from bireme.executor.launcher import create_executor
from bireme.executor.protocol import Executor
from bireme.types import StepPlan


class SwitchedRelay(PlanRelay):
    """Cuts plans into one-row plans while ``path`` exists; looked up only where no plan is outstanding."""

    def __init__(self, inner: Executor, path: str) -> None:
        super().__init__(inner)
        self._path = path

    def submit(self, plan: StepPlan) -> None:
        if not self._outstanding:
            self.one_row = os.path.exists(self._path)
        super().submit(plan)

    def shutdown(self) -> None:
        self.inner.shutdown()


def make_executor(config: EngineConfig, *, path: str) -> Executor:
    """The ranks of ``config`` behind the switch."""
    return SwitchedRelay(create_executor(config, FACTORY), path)


def main() -> None:
    """The command line."""
    from bireme.engine_args import build_engine_config
    from bireme.server.serve import run_server
    from bireme.server.settings import ServerSettings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--one-row-file", default="/nonexistent")
    options = parser.parse_args()
    config = build_engine_config(
        options.folder,
        tensor_parallel_size=options.tp,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        enforce_eager=options.eager,
        load_format="dummy",
    )
    settings = ServerSettings(served_model_names=("bench",), port=options.port)
    factory = functools.partial(make_executor, path=options.one_row_file)
    sys.exit(run_server(config, settings, executor_factory=factory))


if __name__ == "__main__":
    # The engine's process unpickles the factory by its module's name, which __main__ is not.
    from bireme.bench import server

    server.main()
