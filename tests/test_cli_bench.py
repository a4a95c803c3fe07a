"""The decode benchmark's own driver, on a scripted executor that checks every plan it is given."""

from __future__ import annotations

import pytest

from bireme.bench.decode import PlanRelay, Timings, bench_prompts, run_bare, run_engine, split_rows, summarize
from bireme.config import EngineConfig, ModelConfig
from bireme.sim import SimExecutor, sim_capacity
from bireme.types import NewRequest, PrefillRow, SamplingParams, StepPlan

CONFIG = EngineConfig(
    model_path="nowhere",
    model=ModelConfig(
        model_type="qwen3_5_text",
        vocab_size=512,
        hidden_size=32,
        intermediate_size=32,
        layer_types=("linear_attention", "full_attention"),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rotary_dim=4,
        rope_theta=1e4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    ),
)


def relay(depth: int = 1) -> tuple[PlanRelay, SimExecutor]:
    sim = SimExecutor(sim_capacity(max_model_len=512), keep_plans=True, depth=depth)
    return PlanRelay(sim), sim


def test_a_plan_is_cut_into_rows_in_its_own_order_and_new_requests_travel_with_theirs() -> None:
    new = NewRequest(5, [1, 2, 3], [1], SamplingParams(seed=1), [])
    rows = [PrefillRow(4, 64, 10, True), PrefillRow(5, 0, 3, True)]
    parts = split_rows(StepPlan(7, [new], [1, 3], rows))
    assert parts == [
        StepPlan(7, [], [1], []),
        StepPlan(7, [], [3], []),
        StepPlan(7, [], [], [rows[0]]),
        StepPlan(7, [new], [], [rows[1]]),
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_all_ways_of_running_take_turns_on_one_executor_and_draw_the_same_tokens(depth: int) -> None:
    executor, sim = relay(depth)
    prompts = bench_prompts(512, 4, 8)
    _, host, step, batched = run_engine(executor, CONFIG, prompts, 12)
    assert 0 < host < step
    _, bare = run_bare(executor, prompts[0], 12)
    _, _, _, single = run_engine(executor, CONFIG, prompts[:1], 12)
    first_one_row = len(sim.plans)
    executor.one_row = True
    _, _, _, one_row = run_engine(executor, CONFIG, prompts, 12)
    assert one_row == batched
    assert single[0] == bare == batched[0]
    widths = [len(plan.decode_slots) + len(plan.prefill_rows) for plan in sim.plans]
    assert max(widths[:first_one_row]) == 4
    assert set(widths[first_one_row:]) == {1}
    assert len(widths) - first_one_row >= 4 * 12


def test_the_figures_are_medians_and_ratios_of_the_same_run() -> None:
    timings = Timings(
        batched=[1.0, 2.0, 9.0],
        per_request=[20.0],
        single=[1.0],
        bare=[0.99],
        host_ms=[0.2],
        step_ms=[4.0],
        num_equal=4,
    )
    figures = summarize(timings, rows=4, num_tokens=100)
    assert figures["batched_tok_s"] == 200.0
    assert figures["batched_over_per_request"] == 10.0
    assert figures["single_over_bare"] == 0.99


def test_bench_prompts_differ_from_one_another() -> None:
    prompts = bench_prompts(512, 16, 16)
    assert len({tuple(prompt) for prompt in prompts}) == 16
    assert all(0 <= token_id < 256 for prompt in prompts for token_id in prompt)
