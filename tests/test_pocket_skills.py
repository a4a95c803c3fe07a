"""The cases that the pocket model is trained and judged by."""

from __future__ import annotations

import itertools
import json

import pytest

from bireme.pocket.skills import RECALL_DISTANCES, SKILLS, Case, eval_cases, generate


def question(case: Case) -> str:
    return json.dumps([case.messages, case.tools, case.enable_thinking], sort_keys=True, default=str)


@pytest.mark.parametrize("skill", SKILLS)
def test_no_evaluation_case_can_have_been_trained_on(skill: str) -> None:
    trained = {question(case) for case in itertools.islice(generate(skill, "train", seed=1), 300)}
    judged = {question(case) for case in itertools.islice(generate(skill, "eval", seed=1), 40)}
    assert trained and judged and not trained & judged


@pytest.mark.parametrize("skill", SKILLS)
def test_the_right_answer_passes_and_wrong_ones_do_not(skill: str) -> None:
    for case in itertools.islice(generate(skill, "eval", seed=3), 20):
        assert case.check(case.expected)
        assert case.check(f"<think>\nwhatever\n</think>\n\n{case.expected}<|im_end|>")
        # Prose behind a call is no fault of the call.
        longer = [] if case.kind == "tool" else [case.expected + " and more"]
        for wrong in ("", case.expected[: len(case.expected) // 2], *longer):
            assert not case.check(wrong), (case.expected, wrong)


def test_cases_are_a_function_of_the_seed() -> None:
    first, again, other = ([question(case) for case in eval_cases(2, seed=seed)] for seed in (0, 0, 1))
    assert first == again != other


def test_every_skill_and_every_recall_distance_is_judged() -> None:
    groups = {case.group for case in eval_cases(1)}
    assert groups == {skill for skill in SKILLS if skill != "recall"} | {f"recall@{at}" for at in RECALL_DISTANCES}
