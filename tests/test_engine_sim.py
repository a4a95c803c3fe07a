"""The simulated executor catches plans that ranks could not run, so that tests on it test the plans."""

from __future__ import annotations

import time

import pytest

from bireme.errors import ExecutorError
from bireme.sim import PlanViolation, SimExecutor, sim_capacity
from bireme.types import NewRequest, PrefillRow, SamplingParams, StepPlan


def new(slot: int = 1, num_prompt: int = 3, blocks: list[int] | None = None, **params) -> NewRequest:
    params = {"max_tokens": 4, "seed": 0} | params
    return NewRequest(slot, list(range(num_prompt)), [1] if blocks is None else blocks, SamplingParams(**params), [])


def plan(seq: int, news=(), decode=(), prefill=()) -> StepPlan:
    return StepPlan(seq, list(news), list(decode), [PrefillRow(*row) for row in prefill])


FIRST = plan(0, [new()], [], [(1, 0, 3, True)])
TWO = plan(0, [new(), new(2, blocks=[2])], [], [(1, 0, 3, True), (2, 0, 3, True)])

VIOLATIONS = {
    "a gap in the numbers": ([FIRST, plan(2, decode=[1])], "came where 1 was due"),
    "a repeat": ([FIRST, plan(0, decode=[1])], "came where 1 was due"),
    "no rows": ([plan(0)], "no rows"),
    "an unknown slot": ([plan(0, decode=[1])], "never had any"),
    "slot 0": ([plan(0, [new(0)], [], [(0, 0, 3, True)])], r"slot 0 is not in \[1, 4\]"),
    "a slot past the last": ([plan(0, [new(5)], [], [(5, 0, 3, True)])], r"slot 5 is not in \[1, 4\]"),
    "two rows in a slot": ([FIRST, plan(1, decode=[1], prefill=[(1, 3, 1, True)])], "two rows"),
    "decode slots out of order": ([TWO, plan(1, decode=[2, 1])], "do not ascend"),
    "decode before the prompt is done": (
        [plan(0, [new(num_prompt=70, blocks=[1, 2])], [], [(1, 0, 64, False)]), plan(1, decode=[1])],
        "decodes before its prompt",
    ),
    "a new request without a chunk": ([FIRST, plan(1, [new(2, blocks=[2])], [1])], "slot 2 is new but has no chunk"),
    "a chunk that skips": ([plan(0, [new()], [], [(1, 1, 2, True)])], r"chunk \[1, 3\)"),
    "a chunk past the prompt": ([plan(0, [new()], [], [(1, 0, 4, True)])], r"chunk \[0, 4\)"),
    "an empty chunk": ([plan(0, [new()], [], [(1, 0, 0, False)])], r"chunk \[0, 0\)"),
    "a last chunk that does not say so": ([plan(0, [new()], [], [(1, 0, 3, False)])], "is_last"),
    "a chunk that ends off the alignment": (
        [plan(0, [new(num_prompt=70, blocks=[1, 2])], [], [(1, 0, 65, False)])],
        "off the alignment",
    ),
    "too few blocks": ([plan(0, [new(max_tokens=70)], [], [(1, 0, 3, True)])], "1 blocks for 3 \\+ 70 tokens"),
    "too many blocks": ([plan(0, [new(blocks=[1, 2])], [], [(1, 0, 3, True)])], "2 blocks for 3 \\+ 4 tokens"),
    "block 0": ([plan(0, [new(blocks=[0])], [], [(1, 0, 3, True)])], "bad block table"),
    "a block past the last": ([plan(0, [new(blocks=[9])], [], [(1, 0, 3, True)])], "bad block table"),
    "a block twice": ([plan(0, [new(max_tokens=70, blocks=[1, 1])], [], [(1, 0, 3, True)])], "bad block table"),
    "blocks taken from a live request": (
        [FIRST, plan(1, [new(2, blocks=[1])], [], [(2, 0, 3, True)]), plan(2, decode=[1, 2])],
        "lost its slot or blocks",
    ),
    "a row past max_tokens": ([FIRST, *[plan(seq, decode=[1]) for seq in range(1, 5)]], "past its max_tokens 4"),
    "no seed": ([plan(0, [new(seed=None)], [], [(1, 0, 3, True)])], "no seed"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_plan_that_ranks_could_not_run_is_a_violation(name):
    bad, message = VIOLATIONS[name]
    sim = SimExecutor(sim_capacity(num_slots=4, num_blocks=8))
    for good in bad[:-1]:
        sim.submit(good)
        sim.collect()
    with pytest.raises(PlanViolation, match=message):
        sim.submit(bad[-1])


def test_more_plans_than_its_depth_are_a_violation():
    sim = SimExecutor(depth=2)
    sim.submit(FIRST)
    sim.submit(plan(1, decode=[1]))
    with pytest.raises(PlanViolation, match="depth is 2"):
        sim.submit(plan(2, decode=[1]))


def test_results_come_back_in_order_with_one_token_per_sampled_row():
    sim = SimExecutor(depth=2)
    sim.submit(TWO)
    sim.submit(plan(1, decode=[1, 2]))
    first, second = sim.collect(), sim.collect()
    assert (first.seq, first.token_ids, second.seq, second.token_ids) == (0, [0, 0], 1, [1, 1])


def test_an_injected_fault_poisons_it_for_good():
    sim = SimExecutor(fail_collect_seq=0)
    sim.submit(FIRST)
    for call in (sim.collect, sim.collect, sim.check, lambda: sim.submit(plan(1, decode=[1]))):
        with pytest.raises(ExecutorError, match="died in step 0"):
            call()
    sim.shutdown()


def test_collecting_with_nothing_outstanding_is_an_error():
    with pytest.raises(ExecutorError, match="no step is outstanding"):
        SimExecutor().collect()


def test_two_steps_of_a_simulated_device_follow_one_another():
    sim = SimExecutor(depth=2, step_seconds=0.02)
    started = time.perf_counter()
    sim.submit(FIRST)
    sim.submit(plan(1, decode=[1]))
    sim.collect()
    sim.collect()
    assert time.perf_counter() - started >= 0.04
