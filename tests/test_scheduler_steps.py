"""What goes into a step: order, budget, chunks, admission. Every plan is also checked by the simulated executor."""

from __future__ import annotations

import pytest
from scheduler_helpers import EOS, drain, engine, plans, request, tokens

from bireme.config import SchedulerConfig
from bireme.errors import ExecutorError, InvalidRequestError, QueueFullError
from bireme.scheduler.scheduler import Scheduler
from bireme.sim import sim_capacity
from bireme.types import FinishReason, PrefillRow, StepOutput


def chunks(core, slot: int) -> list[tuple[int, int]]:
    return [(row.start, row.length) for plan in plans(core) for row in plan.prefill_rows if row.slot == slot]


def test_a_prompt_is_computed_and_then_decoded_to_its_last_token():
    core = engine()
    core.add_request(request("a", 3, max_tokens=5))
    outputs = drain(core)["a"]
    assert tokens(outputs) == [1, 2, 3, 1, 2]
    assert [plan.num_scheduled_tokens for plan in plans(core)] == [3, 1, 1, 1, 1]
    assert plans(core)[0].prefill_rows == [PrefillRow(1, 0, 3, True)]
    assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]


def test_a_new_request_travels_whole_and_only_once():
    core = engine()
    core.add_request(request("a", 100, max_tokens=30))
    drain(core)
    (new,) = [new for plan in plans(core) for new in plan.new_requests]
    assert (new.slot, len(new.prompt_token_ids), new.block_table) == (1, 100, [1, 2, 3])


def test_prompts_are_packed_into_one_step_while_the_budget_lasts():
    core = engine(budget=256)
    for name, length in (("a", 65), ("b", 1), ("c", 63), ("d", 200)):
        core.add_request(request(name, length, max_tokens=1))
    drain(core)
    rows = [[(row.slot, row.start, row.length) for row in plan.prefill_rows] for plan in plans(core)]
    assert rows == [[(1, 0, 65), (2, 0, 1), (3, 0, 63), (4, 0, 64)], [(4, 64, 136)]]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (64, [(0, 64), (64, 64), (128, 64), (192, 8)]),
        (65, [(0, 64), (64, 64), (128, 64), (192, 8)]),
        (128, [(0, 128), (128, 72)]),
        (512, [(0, 200)]),
        (2048, [(0, 200)]),
    ],
)
def test_a_long_prompt_is_cut_on_multiples_of_64(budget, expected):
    core = engine(budget=budget)
    core.add_request(request("a", 200, max_tokens=2))
    drain(core)
    assert chunks(core, 1) == expected


def test_decode_rows_come_first_and_share_their_step_with_prompt_chunks():
    core = engine(budget=128)
    core.add_request(request("a", 3, max_tokens=20))
    core.step()
    core.add_request(request("b", 300, max_tokens=2))
    drain(core)
    mixed = [plan for plan in plans(core) if plan.decode_slots and plan.prefill_rows]
    # One decode row leaves 127 of 128: chunks of 64 until the 108 that remain fit whole.
    assert [plan.num_scheduled_tokens for plan in mixed] == [65, 65, 65, 109]
    assert all(plan.decode_slots == [1] and plan.prefill_rows[0].slot == 2 for plan in mixed)
    assert mixed[-1].sampled_slots == [1, 2]


def test_a_prompt_moves_on_though_decode_rows_use_the_whole_budget():
    core = engine(num_slots=65, num_blocks=200, budget=64)
    for index in range(64):
        core.add_request(request(f"r{index}", 1, max_tokens=50))
    core.step()
    core.add_request(request("late", 64, max_tokens=1))
    core.step()
    assert len(plans(core)[-1].decode_slots) == 64
    assert [row.length for row in plans(core)[-1].prefill_rows] == [64]
    drain(core)


def test_decode_slots_ascend_and_a_freed_slot_goes_to_the_next_request():
    core = engine(num_slots=4)
    for index, length in enumerate((9, 2, 9, 9, 4)):
        core.add_request(request(f"r{index}", 2, max_tokens=length))
    drain(core)
    assert [plan.decode_slots for plan in plans(core)][:4] == [[], [1, 2, 3, 4], [1, 3, 4], [1, 2, 3, 4]]
    assert [new.slot for plan in plans(core) for new in plan.new_requests] == [1, 2, 3, 4, 2]


def test_a_finished_request_gives_its_slot_to_one_that_waits():
    core = engine(num_slots=1)
    core.add_request(request("a", 2, max_tokens=3))
    core.add_request(request("b", 2, max_tokens=1))
    seen = drain(core)
    assert tokens(seen["b"]) == [1]
    assert [new.slot for plan in plans(core) for new in plan.new_requests] == [1, 1]


def test_a_request_that_does_not_fit_now_is_not_overtaken_by_one_that_would():
    core = engine(num_slots=8, num_blocks=4, max_model_len=256)
    core.add_request(request("first", 64, max_tokens=65))  # 2 blocks
    core.add_request(request("big", 128, max_tokens=65))  # 3 blocks: waits
    core.add_request(request("small", 1, max_tokens=1))  # 1 block: would fit, waits behind big
    ended = []
    while core.has_unfinished:
        ended += [output.request_id for output in core.step() if output.finish_reason is not None]
        core.scheduler.check_invariants()
    core.assert_idle()
    assert [new.slot for plan in plans(core) for new in plan.new_requests] == [1, 1, 2]
    assert ended == ["first", "small", "big"]


def test_blocks_for_the_whole_life_are_taken_at_admission_so_decode_never_runs_out():
    core = engine(num_slots=8, num_blocks=4, block_size=16, max_model_len=64)
    core.add_request(request("a", 16, max_tokens=33))  # 48 tokens of life: 3 blocks, 1 for the prompt alone
    core.add_request(request("b", 16, max_tokens=2))  # 17 tokens: 2 blocks
    core.step()
    assert core.scheduler.blocks.num_free == 1
    assert core.stats().num_waiting == 1
    drain(core)


def test_no_max_tokens_reserves_up_to_the_context_limit_and_ends_there():
    core = engine(max_model_len=100, block_size=16)
    core.add_request(request("a", 90, max_tokens=None))
    outputs = drain(core)["a"]
    assert len(tokens(outputs)) == 10
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(plans(core)[0].new_requests[0].block_table) == 7


@pytest.mark.parametrize("depth", [1, 2])
def test_no_row_is_scheduled_past_max_tokens(depth):
    core = engine(depth=depth)
    core.add_request(request("a", 70, max_tokens=4))
    drain(core)
    assert sum(len(plan.decode_slots) for plan in plans(core)) == 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [64, 65, 512, 2048])
def test_the_same_arrivals_give_the_same_plans_and_chunks_break_only_at_aligned_positions(depth, budget):
    def run():
        core = engine(num_slots=5, budget=budget, depth=depth, num_blocks=300)
        for index, length in enumerate((130, 1, 700, 64, 65, 3, 400, 63)):
            core.add_request(request(f"r{index}", length, max_tokens=1 + 7 * index % 11))
            core.step()
        drain(core)
        return plans(core)

    first, second = run(), run()
    assert first == second
    for plan in first:
        assert plan.num_scheduled_tokens <= max(budget, len(plan.decode_slots) + 64)
        assert all(row.is_last or (row.start + row.length) % 64 == 0 for row in plan.prefill_rows)


def test_neighbours_move_a_requests_chunk_ends_by_whole_alignments_only():
    def ends(num_neighbours: int) -> list[int]:
        core = engine(num_slots=16, budget=200)
        for index in range(num_neighbours):
            core.add_request(request(f"n{index}", 5, max_tokens=100))
            core.step()
        core.add_request(request("a", 500, max_tokens=1))
        drain(core)
        return [start + length for start, length in chunks(core, num_neighbours + 1)]

    assert ends(0) == [192, 384, 500]
    assert ends(8) == [192, 384, 500]
    assert ends(9) == [128, 256, 384, 500]


def test_a_row_that_ended_unseen_costs_one_discarded_row():
    core = engine(depth=2, script=lambda prompt, position: EOS if position == 2 else 7)
    core.add_request(request("a", 3, max_tokens=50))
    outputs = drain(core)["a"]
    assert tokens(outputs) == [7, 7, EOS]
    assert sum(len(plan.decode_slots) for plan in plans(core)) == 3  # two that count, one discarded


def test_a_slot_is_not_handed_on_while_a_plan_in_flight_holds_its_old_owner():
    core = engine(num_slots=1, depth=2, script=lambda prompt, position: EOS if position == 1 else 7)
    core.add_request(request("a", 3, max_tokens=50))
    core.add_request(request("b", 3, max_tokens=50))
    first = core.step()  # plans 0 and 1 are out, 0 is in
    first += core.step()  # plan 2 is out; 1 is in: "a" has ended, and a row of it is in plan 2
    assert tokens(first) == [7, EOS] and first[-1].finish_reason is FinishReason.STOP
    assert core.stats().num_running == 0 and core.stats().num_free_slots == 0
    core.scheduler.check_invariants()
    assert tokens(drain(core)["b"]) == [7, EOS]


def test_unseeded_requests_get_seeds_from_the_engines_generator_in_order_of_admission():
    def seeds(seed: int) -> list[int | None]:
        core = engine(seed=seed, num_slots=2)
        for index in range(6):
            core.add_request(request(f"r{index}", 2, max_tokens=2, seed=77 if index == 2 else None))
        drain(core)
        return [new.params.seed for plan in plans(core) for new in plan.new_requests]

    assert seeds(1) == seeds(1)
    assert seeds(1)[2] == 77 and len(set(seeds(1))) == 6
    assert set(seeds(1)) & set(seeds(2)) == {77}


@pytest.mark.parametrize(
    ("params", "suppressed"),
    [
        (dict(min_tokens=3), [EOS]),
        (dict(min_tokens=3, stop_token_ids=[9, 5]), [5, 9, EOS]),
        (dict(min_tokens=3, stop_token_ids=[9], ignore_eos=True), [9]),
        (dict(stop_token_ids=[9]), []),
    ],
)
def test_ids_that_would_end_a_request_are_suppressed_only_for_min_tokens(params, suppressed):
    core = engine()
    core.add_request(request("a", 2, max_tokens=5, **params))
    drain(core)
    assert plans(core)[0].new_requests[0].suppressed_token_ids == suppressed


def scheduler(num_blocks: int = 8, **limits) -> Scheduler:
    return Scheduler(SchedulerConfig(**limits), sim_capacity(num_slots=2, num_blocks=num_blocks, max_model_len=4096))


def test_the_queue_has_a_bound_and_refuses_by_name():
    waiting = scheduler(max_waiting=2)
    for name in "abcd":
        waiting.add(request(name))  # two for the free slots, two that wait
    with pytest.raises(QueueFullError, match=r"4 requests are waiting: at most 2 .*--max-waiting"):
        waiting.add(request("e"))
    waiting.abort("a")
    waiting.add(request("e"))
    assert waiting.num_waiting == 4


def test_a_request_with_more_blocks_than_exist_is_rejected_at_once_with_both_numbers():
    with pytest.raises(InvalidRequestError, match=r"needs 9 KV blocks of 64 tokens: there are 8 .*--kv-cache-memory"):
        scheduler().add(request("a", 500, max_tokens=20))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (StepOutput(1, [5]), "step 1 came back where step 0"),
        (StepOutput(0, []), "0 tokens for 1 rows"),
        (StepOutput(0, [5, 6]), "2 tokens for 1 rows"),
    ],
)
def test_a_result_that_does_not_match_its_plan_is_an_executor_error(output, message):
    one = scheduler()
    one.add(request("a", 3))
    assert one.schedule() is not None
    with pytest.raises(ExecutorError, match=message):
        one.commit(output)


def test_missing_prompt_logprobs_are_an_executor_error():
    one = scheduler()
    one.add(request("a", 3, prompt_logprobs=1))
    one.schedule()
    with pytest.raises(ExecutorError, match="1 prompt log-probabilities in slot 1 where 3"):
        one.commit(StepOutput(0, [5]))


def test_the_invariant_check_notices_a_lost_block_and_a_lost_slot():
    one = scheduler()
    one.blocks.allocate(1)
    with pytest.raises(RuntimeError, match="0 blocks held"):
        one.check_invariants()
    other = scheduler()
    other.slots.allocate()
    with pytest.raises(RuntimeError, match="0 slots held"):
        other.assert_idle()
