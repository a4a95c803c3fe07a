"""Steps on the fixed buffers of graphs give the tokens of plain steps: Triton's interpreter in place of a device.

A recorder that runs the step again stands in for CUDA graphs: same buffers, same padding rows, same bounds, and the
kernels that would be captured. Only the capture itself needs a GPU (tests/test_gpu_graphs.py).
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from model_tools import write_model
from triton_tools import INTERPRETED, mend_interpreter

from bireme import kernels
from bireme.engine import EngineCore
from bireme.engine_args import build_engine_config
from bireme.executor.graphs import Shape, StepGraphs
from bireme.executor.launcher import LocalExecutor, create_executor
from bireme.executor.model_runner import ModelRunner
from bireme.types import Request, SamplingParams

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
mend_interpreter()
pytestmark = pytest.mark.slow

SHAPES = [Shape(4, 64), Shape(0, 64), Shape(4, 16), Shape(0, 16), Shape(4, 0), Shape(2, 0), Shape(1, 0)]


def engine_on(folder: Path, chosen: object, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineCore, ModelRunner]:
    monkeypatch.setattr(kernels, "for_device", lambda device: chosen)
    config = build_engine_config(
        str(folder), dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=192
    )
    core = EngineCore(config, create_executor(config))
    executor = core.executor
    assert isinstance(executor, LocalExecutor)
    runner = executor._runner
    assert isinstance(runner, ModelRunner)
    return core, runner


def wanted() -> list[Request]:
    """Six requests on four slots, so that slots are used again; prompts of one token up to more than a chunk."""
    return [
        Request(
            str(index),
            [(7 * index + 3 * at) % 290 for at in range(length)],
            SamplingParams(temperature=temperature, seed=index, max_tokens=3 + index % 3, ignore_eos=True),
        )
        for index, (length, temperature) in enumerate([(1, 0.0), (70, 0.0), (9, 1.0), (20, 0.0), (3, 1.0), (64, 0.0)])
    ]


def run(engine: EngineCore, requests: list[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while waiting or engine.has_unfinished:
        if waiting:  # they come one a step: prefill meets decode
            engine.add_request(waiting.pop(0))
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    engine.assert_idle()
    return tokens


def test_steps_on_a_graph_s_buffers_give_the_tokens_of_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "kv2_group4_ratio2_tied_7_layers", seed=3)
    plain, _ = engine_on(tmp_path, importlib.import_module("bireme.kernels.reference"), monkeypatch)
    expected = run(plain, wanted())
    plain.shutdown()

    engine, runner = engine_on(tmp_path, importlib.import_module("bireme.kernels.triton"), monkeypatch)
    used: list[Shape] = []
    graphs = StepGraphs(runner._forward_captured, runner.tables, SHAPES)
    with torch.inference_mode():
        graphs.capture(lambda step: step, lambda done, of: None)
    replay = graphs.replay

    def noted(shape: Shape, plan: object) -> object:
        used.append(shape)
        return replay(shape, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "replay", noted)
    # What nobody owns must not matter to anybody.
    for pool in (runner.kv.k, runner.kv.v, runner.state.recurrent, runner.state.conv):
        pool.fill_(torch.nan)
    runner.graphs = graphs
    assert run(engine, wanted()) == expected
    engine.shutdown()
    assert {Shape(4, 64), Shape(0, 16), Shape(4, 0), Shape(2, 0)} <= set(used)
