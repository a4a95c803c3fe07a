"""Calls of one LLM that overlap, on a scripted executor that echoes the prompt: streams, generate calls, threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bireme.llm
from bireme import LLM, SamplingParams
from bireme.errors import EngineDeadError
from bireme.llm import TextPiece
from bireme.sim import SimExecutor, sim_capacity

pytestmark = pytest.mark.timeout(20)
A, B = [5, 6, 7], [8, 9]


@pytest.fixture
def llm(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    folder = checkpoint(hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=16)
    executor = SimExecutor(sim_capacity(max_model_len=512), keep_plans=True)
    monkeypatch.setattr(bireme.llm, "create_executor", lambda config: executor)
    with LLM(str(folder)) as made:
        yield made


def greedy(num_tokens: int = 12, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **fields)


def ids_of(pieces: list[TextPiece]) -> list[int]:
    return [token_id for piece in pieces for token_id in piece.token_ids]


def echo(prompt: list[int], num_tokens: int = 12) -> list[int]:
    return (prompt * num_tokens)[:num_tokens]


def test_a_generate_call_while_a_stream_is_open_leaves_both_whole(llm: LLM) -> None:
    stream = llm.stream(A, greedy())
    first = next(stream)
    result = llm.generate(B, greedy(), use_tqdm=False)[0]
    assert result.outputs[0].token_ids == echo(B)
    rest = list(stream)
    assert ids_of([first, *rest]) == echo(A)
    assert [piece.finish_reason for piece in (first, *rest)] == [None] * len(rest) + ["length"]
    llm._engine.assert_idle()


def test_two_streams_read_in_turns_run_in_the_same_steps(llm: LLM) -> None:
    pairs = list(zip(llm.stream(A, greedy()), llm.stream(B, greedy()), strict=True))
    assert ids_of([one for one, _ in pairs]) == echo(A)
    assert ids_of([other for _, other in pairs]) == echo(B)
    assert len(llm._engine.executor.plans) < 20
    llm._engine.assert_idle()


def test_a_stream_that_is_not_read_on_does_not_stop_another(llm: LLM) -> None:
    waiting = llm.stream(A, greedy())
    next(waiting)
    assert ids_of(list(llm.stream(B, greedy(40)))) == echo(B, 40)
    assert len(ids_of(list(waiting))) == 11
    llm._engine.assert_idle()


def test_closing_one_of_two_streams_frees_its_row_and_spares_the_other(llm: LLM) -> None:
    kept, dropped = llm.stream(A, greedy()), llm.stream(B, greedy(400))
    first = next(kept)
    next(dropped)
    dropped.close()
    rest = list(kept)
    assert ids_of([first, *rest]) == echo(A)
    assert len(llm._engine.executor.plans) < 20
    llm._engine.assert_idle()


def test_a_stream_collected_in_the_middle_of_a_step_is_aborted_by_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = llm.stream(A, greedy())
    held = [llm.stream(B, greedy(400))]
    first, _ = next(kept), next(held[0])
    schedule = llm._engine.scheduler.schedule

    def drop_and_schedule() -> object:
        held.clear()
        gc.collect()
        return schedule()

    monkeypatch.setattr(llm._engine.scheduler, "schedule", drop_and_schedule)
    assert ids_of([first, *kept]) == echo(A)
    llm._engine.assert_idle()


def test_a_stop_string_of_a_stream_that_is_not_read_frees_its_row(llm: LLM) -> None:
    stream = llm.stream("ab!", greedy(400, stop=["!"]))
    first = next(stream)
    llm.generate(B, greedy(40), use_tqdm=False)
    assert llm._engine.stats().num_running == 0
    pieces = [first, *stream]
    assert "".join(piece.text for piece in pieces) == "ab"
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "!")


def test_a_stream_of_an_llm_that_was_closed_meanwhile_says_so(llm: LLM) -> None:
    stream = llm.stream(A, greedy())
    next(stream)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        list(stream)


def test_a_request_that_the_engine_lost_is_an_error_and_no_endless_loop(llm: LLM) -> None:
    stream = llm.stream(A, greedy())
    next(stream)
    llm._engine.abort("0")
    while llm._engine.has_unfinished:
        llm._engine.step()
    with pytest.raises(EngineDeadError, match="nothing left to do"):
        list(stream)


def test_threads_that_share_an_llm_take_turns(llm: LLM) -> None:
    found: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        found[index] = []
        for _ in range(5):
            found[index].append(ids_of(list(llm.stream([index, index + 1], greedy(60)))))
            found[index].append(llm.generate([index], greedy(60), use_tqdm=False)[0].outputs[0].token_ids)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert found == {index: [echo([index, index + 1], 60), echo([index], 60)] * 5 for index in range(1, 5)}
    llm.generate([1], greedy(1), use_tqdm=False)
    llm._engine.assert_idle()
