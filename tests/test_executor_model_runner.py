"""The whole engine in one process on a tiny random model: no request depends on those who share its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bireme.engine import EngineCore
from bireme.engine_args import build_engine_config
from bireme.executor.launcher import LocalExecutor, create_executor
from bireme.executor.model_runner import ModelRunner
from bireme.executor.slot_tables import covering_range
from bireme.types import Request, SamplingParams

NUM_SLOTS = 12


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Iterator[EngineCore]:
    folder = checkpoint(hidden_size=64, intermediate_size=64, num_hidden_layers=4, head_dim=32)
    config = build_engine_config(
        str(folder), dtype="float32", max_num_seqs=NUM_SLOTS, max_num_batched_tokens=64, max_model_len=256
    )
    core = EngineCore(config, create_executor(config))
    yield core
    core.shutdown()


def requests(temperature: float) -> dict[str, Request]:
    """Sixteen requests of uneven prompts and lengths, so that slots fall free between live ones."""
    return {
        str(index): Request(
            str(index),
            [(7 * index + 3 * at) % 500 for at in range(1 + 9 * index)],
            SamplingParams(
                temperature=temperature,
                seed=index,
                top_p=0.9 if index % 3 == 1 else 1.0,
                presence_penalty=0.7 if index % 3 == 2 else 0.0,
                max_tokens=4 + (11 * index) % 17,
                ignore_eos=True,
            ),
        )
        for index in range(16)
    }


def run(engine: EngineCore, wanted: list[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    for request in wanted:
        engine.add_request(request)
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    engine.assert_idle()
    return tokens


def runner_of(engine: EngineCore) -> ModelRunner:
    executor = engine.executor
    assert isinstance(executor, LocalExecutor)
    runner = executor._runner
    assert isinstance(runner, ModelRunner)
    return runner


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_gets_the_same_tokens_alone_and_among_fifteen_others(engine: EngineCore, temperature: float) -> None:
    together = run(engine, list(requests(temperature).values()))
    for request in requests(temperature).values():
        assert run(engine, [request])[request.request_id] == together[request.request_id]


def test_nan_in_every_freed_slot_and_block_is_inherited_by_nobody(engine: EngineCore) -> None:
    wanted = list(requests(1.0).values())
    clean = run(engine, wanted)
    runner = runner_of(engine)
    for pool in (runner.kv.k, runner.kv.v, runner.state.recurrent, runner.state.conv):
        pool[:, 1:] = torch.nan  # all free; index 0 is the padding rows'
    assert run(engine, wanted) == clean


def test_logprobs_ask_for_nothing_that_changes_tokens(engine: EngineCore) -> None:
    plain = list(requests(1.0).values())
    asked = [
        Request(request.request_id, request.prompt_token_ids, scored(request.params, index))
        for index, request in enumerate(plain)
    ]
    assert run(engine, asked) == run(engine, plain)


def scored(params: SamplingParams, index: int) -> SamplingParams:
    import msgspec

    return msgspec.structs.replace(params, logprobs=index % 4, prompt_logprobs=index % 3 or None)


def test_a_view_of_slots_is_taken_where_it_wastes_little() -> None:
    assert covering_range([]) == (None, True)
    assert covering_range([3]) == ((3, 4), True)
    assert covering_range([1, 2, 3, 4]) == ((1, 5), True)
    assert covering_range([1, 2, 4, 5]) == ((1, 6), False)
    assert covering_range([2, 1]) == ((1, 3), False)
    assert covering_range([1, 9]) == (None, True)
    assert covering_range([0, 1]) == (None, True), "slot 0 is shared by padding rows"
