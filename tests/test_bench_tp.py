"""The two-rank experiment, whole, on a tiny model and the CPU: its parts run, and its bars say what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bireme.bench.tp import Experiment, Settings


@pytest.mark.slow
def test_the_experiment_runs_where_there_is_no_gpu_and_says_what_it_left_out(tmp_path: Path) -> None:
    out = tmp_path / "tp.jsonl"
    settings = Settings(
        geometries=["tiny:4"],
        logits="tiny:4",
        concurrency=8,
        prompt_tokens=16,
        output_tokens=24,
        per_request_tokens=8,
        device="cpu",
        out=out,
    )
    assert Experiment(settings, tmp_path / "servers.log").run() == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]

    def of(kind: str) -> list[dict[str, Any]]:
        return [line for line in lines if line["kind"] == kind]

    assert {line["why"] for line in of("skipped")} == {"it needs two GPUs", "a CPU has no graphs"}
    assert [(line["tp"], line["way"]) for line in of("serve")] == [
        (tp_size, way) for tp_size in (1, 2) for way in ("batched", "single", "per_request", "single_per_request")
    ]
    assert all(line["failures"] == 0 and line["tok_s"] > 0 for line in of("serve"))
    assert [len(line["ranks"]) for line in of("memory")] == [1, 2]
    (killed,) = of("kill")
    assert killed["failed_streams"] == killed["streams"] == 4
    assert killed["exit_code"] == 1
    assert killed["processes_left"] == 0
    (logits,) = of("logits")
    assert logits["within_bounds"] and logits["compared"] > 100
    bars = {line["name"]: line["holds"] for line in of("bar")}
    assert bars["a killed rank: errors, an exit code, nothing left"] is True
    assert bars["all-reduce of 16 × 5120 in at most 12 µs"] is None, "what was not measured is neither held nor missed"
    assert lines[-1]["kind"] == "end"


def test_a_part_that_would_overrun_the_budget_is_skipped_and_one_that_fails_stops_nothing(tmp_path: Path) -> None:
    experiment = Experiment(Settings(device="cpu", budget=10), tmp_path / "log")
    ran = []

    def fail() -> None:
        raise RuntimeError("broken")

    experiment.part("long", 60, lambda: ran.append("long"))
    experiment.part("bad", 1, fail)
    experiment.part("short", 1, lambda: ran.append("short"))
    assert ran == ["short"]
    kinds = [(line["kind"], line["part"]) for line in experiment.lines]
    assert kinds == [("skipped", "long"), ("failed", "bad")]
    assert "broken" in experiment.lines[1]["error"]
