"""The policy functions, in tables of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.config import CHUNK_ALIGNMENT
from bireme.scheduler.plan import (
    Admission,
    admission,
    blocks_needed,
    chunk_length,
    finish_check,
    lifetime_tokens,
    prefill_budget,
    resolve_max_tokens,
)
from bireme.types import FinishReason


@pytest.mark.parametrize(
    ("start", "num_prompt", "budget", "length"),
    [
        (0, 1, 64, 1),
        (0, 63, 64, 63),
        (0, 64, 64, 64),
        (0, 65, 64, 64),
        (64, 65, 64, 1),
        (0, 65, 65, 65),
        (0, 200, 127, 64),
        (0, 200, 128, 128),
        (0, 200, 199, 192),
        (128, 200, 72, 72),
        (128, 200, 71, 64),
        (0, 200, 63, 0),
        (0, 60, 63, 60),
        (0, 5000, 2048, 2048),
        (2048, 5000, 2047, 1984),
        (30, 200, 64, 34),
        (30, 200, 98, 98),
    ],
)
def test_a_chunk_is_the_longest_that_fits_and_ends_aligned_or_at_the_prompts_end(start, num_prompt, budget, length):
    assert chunk_length(start, num_prompt, budget) == length


@given(st.integers(1, 5000), st.lists(st.integers(64, 3000), min_size=1), st.integers(0, 40).map(lambda n: 64 * n))
def test_chunks_cover_a_prompt_without_gap_and_break_only_at_aligned_positions(num_prompt, budgets, cached):
    start = cached if cached < num_prompt else 0
    step = 0
    while start < num_prompt:
        length = chunk_length(start, num_prompt, budgets[step % len(budgets)])
        assert 0 < length <= budgets[step % len(budgets)]
        start += length
        step += 1
        assert start == num_prompt or start % CHUNK_ALIGNMENT == 0
    assert start == num_prompt


@pytest.mark.parametrize(
    ("budget", "rows", "left"),
    [(2048, 0, 2048), (2048, 48, 2000), (64, 0, 64), (64, 1, 64), (64, 64, 64), (128, 256, 64), (512, 448, 64)],
)
def test_decode_rows_come_out_of_the_budget_but_one_chunk_always_remains(budget, rows, left):
    assert prefill_budget(budget, rows) == left


@given(st.integers(1, 4096), st.integers(1, 512), st.integers(0, 512))
def test_no_step_holds_more_tokens_than_the_stated_bound(budget, num_slots, rows):
    rows = min(rows, num_slots)
    prefilling = rows + prefill_budget(budget, rows) if rows < num_slots else rows
    assert prefilling <= max(budget, CHUNK_ALIGNMENT + num_slots - 1)


@pytest.mark.parametrize(
    ("tokens", "size", "blocks"), [(0, 64, 0), (1, 64, 1), (64, 64, 1), (65, 64, 2), (7, 1, 7), (1000, 16, 63)]
)
def test_blocks_needed_rounds_up(tokens, size, blocks):
    assert blocks_needed(tokens, size) == blocks


@pytest.mark.parametrize(("prompt", "outputs", "lifetime"), [(1, 1, 1), (64, 1, 64), (64, 2, 65), (100, 28, 127)])
def test_the_last_output_token_needs_no_room(prompt, outputs, lifetime):
    assert lifetime_tokens(prompt, outputs) == lifetime


@pytest.mark.parametrize(("max_tokens", "resolved"), [(None, 90), (5, 5), (90, 90)])
def test_no_max_tokens_means_all_that_the_context_leaves(max_tokens, resolved):
    assert resolve_max_tokens(10, max_tokens, 100) == resolved


@pytest.mark.parametrize(
    ("needed", "free", "total", "slots", "verdict"),
    [
        (3, 3, 10, 1, Admission.ADMIT),
        (3, 2, 10, 1, Admission.DEFER),
        (3, 3, 10, 0, Admission.DEFER),
        (10, 0, 10, 0, Admission.DEFER),
        (10, 10, 10, 1, Admission.ADMIT),
        (11, 10, 10, 1, Admission.REJECT),
        (11, 0, 10, 0, Admission.REJECT),
    ],
)
def test_admission_tells_never_from_not_now(needed, free, total, slots, verdict):
    assert admission(needed, free, total, slots) is verdict


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("token", "count", "min_tokens", "max_tokens", "eos", "stop", "expected"),
    [
        (5, 1, 0, 10, {9}, {7}, (None, None)),
        (9, 1, 0, 10, {9}, {7}, (STOP, None)),
        (7, 1, 0, 10, {9}, {7}, (STOP, 7)),
        (9, 1, 0, 10, {9}, {9}, (STOP, None)),
        (9, 1, 0, 10, (), {9}, (STOP, 9)),
        (9, 1, 0, 10, (), (), (None, None)),
        (5, 10, 0, 10, {9}, {7}, (LENGTH, None)),
        (9, 10, 0, 10, {9}, {7}, (STOP, None)),
        (7, 10, 0, 10, {9}, {7}, (STOP, 7)),
        (9, 3, 4, 10, {9}, {7}, (None, None)),
        (7, 3, 4, 10, {9}, {7}, (None, None)),
        (9, 4, 4, 10, {9}, {7}, (STOP, None)),
        (9, 5, 4, 10, {9}, {7}, (STOP, None)),
        (0, 1, 0, 1, {0}, (), (STOP, None)),
    ],
)
def test_how_a_request_ends_with_a_token(token, count, min_tokens, max_tokens, eos, stop, expected):
    assert finish_check(token, count, min_tokens, max_tokens, eos, stop) == expected
