"""Requests whose answer's form has to be compiled first, in the engine's loop on the simulated executor."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from scheduler_helpers import drain, model_config, plans, request, terminals

from bireme.config import EngineConfig, SchedulerConfig
from bireme.engine import EngineCore
from bireme.errors import InvalidRequestError
from bireme.sim import SimExecutor, sim_capacity
from bireme.types import FinishReason, RequestOutput, SamplingParams, StepOutput, StructuredOutputsParams

FORM = StructuredOutputsParams(regex="a+")


class SlowExecutor(SimExecutor):
    """Compiles when the test says so, notes which slots it was told are free, and fails a slot at a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(sim_capacity(num_slots=options.pop("num_slots", 4)), keep_plans=True, **options)
        self.futures: list[Future[object]] = []
        self.released: list[int] = []
        self.fails_at: int | None = None

    def prepare(self, params: SamplingParams) -> Future[object]:
        assert params.structured_outputs == FORM
        self.futures.append(Future())
        return self.futures[-1]

    def release(self, slot: int) -> None:
        self.released.append(slot)

    def collect(self) -> StepOutput:
        output = super().collect()
        if output.seq == self.fails_at:
            output.failed_slots = {1: "its form is too much"}
        return output


def build(executor: SlowExecutor, **limits: int) -> EngineCore:
    scheduler = SchedulerConfig(**{"max_num_seqs": 4, "max_waiting": 64} | limits)
    return EngineCore(EngineConfig(model_path="none", model=model_config(), scheduler=scheduler), executor)


def step(core: EngineCore, number: int) -> list[RequestOutput]:
    return [output for _ in range(number) for output in core.step()]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_waits_for_its_form_and_overtakes_nobody_that_is_free(depth: int) -> None:
    executor = SlowExecutor(depth=depth)
    core = build(executor)
    core.add_request(request("bound", max_tokens=3, structured_outputs=FORM))
    assert core.has_unfinished and core.step() == [] and plans(core) == []  # nothing to run, and nothing spins
    core.add_request(request("free", max_tokens=5))
    seen = step(core, 3)
    assert {output.request_id for output in seen} == {"free"}
    assert core.stats().num_waiting == 1
    executor.futures[0].set_result(None)
    outputs = drain(core)
    assert [len(outputs[name]) for name in ("bound", "free")] == [3, 2]
    assert executor.released == [2]


def test_a_form_that_cannot_be_followed_is_a_400_and_any_other_failure_an_error() -> None:
    executor = SlowExecutor()
    core = build(executor)
    for name in ("bad", "worse", "good"):
        core.add_request(request(name, max_tokens=2, structured_outputs=FORM))
    executor.futures[0].set_exception(InvalidRequestError("form cannot be followed", "guided_regex"))
    executor.futures[1].set_exception(RuntimeError("secret"))
    executor.futures[2].set_result(None)
    outputs = drain(core)
    (bad,), (worse,) = outputs["bad"], outputs["worse"]
    assert (bad.finish_reason, bad.is_invalid, bad.error_param) == (FinishReason.ERROR, True, "guided_regex")
    assert (worse.finish_reason, worse.is_invalid) == (FinishReason.ERROR, False)
    assert worse.error is not None and "secret" not in worse.error
    assert terminals(outputs["good"])[0].finish_reason is FinishReason.LENGTH


def test_a_request_may_leave_while_its_form_is_compiled_or_while_it_runs() -> None:
    executor = SlowExecutor(depth=2)
    core = build(executor)
    for name in ("early", "late"):
        core.add_request(request(name, max_tokens=50, structured_outputs=FORM))
    core.abort("early")
    executor.futures[0].set_result(None)
    executor.futures[1].set_result(None)
    seen = step(core, 4)
    assert [output.finish_reason for output in seen if output.request_id == "early"] == [FinishReason.ABORT]
    assert executor.released == []
    core.abort("late")
    drain(core)
    assert executor.released == [1]


def test_a_full_queue_is_a_429_also_after_the_form_was_compiled() -> None:
    executor = SlowExecutor(num_slots=1)
    core = build(executor, max_num_seqs=1, max_waiting=0)
    core.add_request(request("running", max_tokens=9))
    step(core, 1)
    core.add_request(request("bound", max_tokens=2, structured_outputs=FORM))
    executor.futures[0].set_result(None)
    refused = [output for output in step(core, 2) if output.request_id == "bound"]
    assert [(output.finish_reason, output.is_overloaded) for output in refused] == [(FinishReason.ERROR, True)]
    drain(core)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_cannot_follow_its_form_any_further_ends_with_the_reason(depth: int) -> None:
    executor = SlowExecutor(depth=depth)
    executor.fails_at = 3
    core = build(executor)
    core.add_request(request("bound", max_tokens=20, structured_outputs=FORM))
    executor.futures[0].set_result(None)
    core.step()
    core.add_request(request("free", max_tokens=20))
    outputs = drain(core)
    last = outputs["bound"][-1]
    assert (last.finish_reason, last.token_ids, last.is_invalid) == (FinishReason.ERROR, [], True)
    assert last.error == "its form is too much"
    assert terminals(outputs["free"])[0].finish_reason is FinishReason.LENGTH
    assert executor.released == [1]


def test_an_engine_that_shuts_down_ends_the_requests_whose_form_is_being_compiled() -> None:
    executor = SlowExecutor()
    core = build(executor)
    core.add_request(request("bound", structured_outputs=FORM))
    assert [output.finish_reason for output in core.shutdown()] == [FinishReason.ABORT]
    assert not core.has_unfinished


def test_an_end_token_ends_an_answer_with_a_form_whatever_min_tokens_says() -> None:
    end = model_config().eos_token_ids[0]
    for form, length in ((FORM, 3), (None, 20)):
        executor = SlowExecutor(script=lambda prompt, position: end if position == 2 else 7)
        core = build(executor)
        core.add_request(request("a", max_tokens=20, min_tokens=10, structured_outputs=form))
        for future in executor.futures:
            future.set_result(None)
        assert len(drain(core)["a"]) == length
