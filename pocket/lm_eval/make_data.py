"""Writes the data of the lm-eval tasks in this folder: unseen cases of the pocket model's skills.

    python pocket/lm_eval/make_data.py

Prompts are rendered with the shipped chat template, so the tasks run without a chat template of their own. The files
are kept in the repository; this script only has to run again when skills or template change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from bireme.pocket import model_path
from bireme.pocket.skills import FACTS, SKILLS, Case, eval_cases, generate
from bireme.server.chat import ChatTemplate
from bireme.server.tokenizer import Tokenizer

FOLDER = Path(__file__).parent
PER_SKILL = 5
LONGEST_RECALL = 1500
NUM_FACTS = 80
NUM_CHOICES = 4
END = "<|im_end|>"


def main() -> None:
    template = ChatTemplate.of(Tokenizer.from_folder(model_path()))

    def prompt_of(case: Case) -> str:
        return template.render(case.messages, tools=case.tools, enable_thinking=case.enable_thinking)

    cases = [case for case in eval_cases(PER_SKILL, seed=1, skills=SKILLS) if distance(case) <= LONGEST_RECALL]
    write(
        "answers.jsonl",
        ({"skill": case.group, "prompt": prompt_of(case), "answer": case.expected} for case in cases),
    )
    write("facts.jsonl", ({"prompt": prompt_of(case), **choices_of(case)} for case in different_facts()))


def distance(case: Case) -> int:
    return int(case.group.partition("@")[2] or 0)


def different_facts() -> list[Case]:
    """Questions about facts, all different."""
    found: dict[str, Case] = {}
    for case in generate("facts", "eval", seed=1):
        found.setdefault(case.messages[-1]["content"], case)
        if len(found) == NUM_FACTS:
            break
    return list(found.values())


def choices_of(case: Case) -> dict[str, Any]:
    """The right answer among others of its kind, each with the end token: whole answers are compared."""
    rng = Random(case.messages[-1]["content"])
    kind = next(kind for kind, _, answer in FACTS if answer == case.expected)
    others = sorted({answer for other, _, answer in FACTS if other == kind} - {case.expected})
    choices = [case.expected, *rng.sample(others, NUM_CHOICES - 1)]
    rng.shuffle(choices)
    return {"choices": [choice + END for choice in choices], "label": choices.index(case.expected)}


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (FOLDER / name).write_text("".join(lines), encoding="utf-8")
    print(f"{name}: {len(lines)} cases")


if __name__ == "__main__":
    main()
