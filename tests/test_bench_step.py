"""The step benchmark: limits, geometries and breakdowns by hand-made numbers, and the whole command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bireme.bench import limits
from bireme.bench.breakdown import attribute, kind_of, own_kernels, summarize
from bireme.bench.geometry import NUM_DECODABLE, geometry_fields, geometry_folder
from bireme.bench.step import Bench, Cases, describe, engine_config, memory_line, parse_prefill, prefill_chunks, started
from bireme.checkpoint.hf_config import load_model_config
from bireme.cli import app
from bireme.config import ModelConfig
from bireme.engine_args import masked_token_ranges
from bireme.errors import ConfigError


def model_of(geometry: str) -> ModelConfig:
    with geometry_folder(geometry) as folder:
        return load_model_config(folder)


@pytest.mark.parametrize(
    ("geometry", "milliseconds"),
    [("27b", (11.4, 12.5, 15.9)), ("9b", (3.54, 3.90, 5.09)), ("4b", (1.89, 2.25, 3.43))],
)
def test_the_limit_of_a_step_is_the_one_that_was_agreed_on(geometry: str, milliseconds: tuple[float, ...]) -> None:
    model = model_of(geometry)
    for rows, expected in zip((1, 16, 64), milliseconds, strict=True):
        found = limits.decode_limit_seconds(
            model, 1, "bfloat16", rows=rows, context=256, bytes_per_second=limits.H200_READ_BYTES_PER_SECOND
        )
        assert found * 1e3 == pytest.approx(expected, rel=0.01)


def test_the_embedding_table_counts_only_where_it_is_also_the_lm_head() -> None:
    tied, untied = model_of("4b"), model_of("9b")
    assert limits.step_weight_bytes(tied, 1, "bfloat16") == limits.weight_bytes(tied, 1, "bfloat16")
    table = untied.vocab_size * untied.hidden_size * 2
    assert limits.step_weight_bytes(untied, 1, "bfloat16") == limits.weight_bytes(untied, 1, "bfloat16") - table


def test_two_ranks_of_27b_hold_at_most_27_5_gb_of_weights_each() -> None:
    assert limits.weight_bytes(model_of("27b"), 2, "bfloat16") <= 27.5e9


def test_a_prefill_of_8192_tokens_on_27b_is_412_tflop() -> None:
    assert limits.prefill_flops(model_of("27b"), [8192]) == pytest.approx(0.523 * 788e12, rel=0.01)


def test_a_geometry_is_a_folder_that_the_engine_opens_with_as_many_tokens_as_the_real_one() -> None:
    with geometry_folder("27b:8", tokenizer=True) as folder:
        model = load_model_config(folder)
        assert (model.num_layers, model.num_full_layers, model.hidden_size) == (8, 2, 5120)
        assert masked_token_ranges(folder, model.vocab_size) == [(NUM_DECODABLE, model.vocab_size)]
    assert not folder.exists()


def test_a_geometry_that_is_unknown_or_cut_wrongly_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'5b'"):
        geometry_fields("5b")
    with pytest.raises(ConfigError, match="1 to 64 layers"):
        geometry_fields("27b:65")


def test_a_config_file_is_a_geometry_too(tmp_path: Path) -> None:
    with geometry_folder("4b") as folder:
        path = tmp_path / "config.json"
        path.write_text((folder / "config.json").read_text())
    assert model_of(str(path)).layer_types == model_of("4b").layer_types
    assert model_of("pocket").vocab_size == 4096


def test_prompts_are_cut_into_steps_as_the_scheduler_cuts_them() -> None:
    sizes = [[(row.slot, row.start, row.length, row.is_last) for row in plan] for plan in prefill_chunks(2, 100, 128)]
    assert sizes == [[(1, 0, 100, True)], [(2, 0, 100, True)]], "28 tokens of room are less than a chunk of 64"
    sizes = [[(row.slot, row.start, row.length, row.is_last) for row in plan] for plan in prefill_chunks(1, 300, 128)]
    assert sizes == [[(1, 0, 128, False)], [(1, 128, 128, False)], [(1, 256, 44, True)]]
    assert [len(plan) for plan in prefill_chunks(8, 1024, 8192)] == [8]


def test_every_kernel_of_the_package_has_a_kind_and_no_two_share_a_name_across_kinds() -> None:
    names = own_kernels()
    assert {"gemm", "gdn", "attention", "norm", "sampling"} <= set(names.values())
    assert kind_of("nvjet_tst_192x8_64x8_4x1_v_bz_TNT") == "gemm"
    assert kind_of("void at::native::vectorized_elementwise_kernel<4>") == "glue"
    assert kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL") == "collective"
    assert kind_of("something_new") == "other"


def test_overlapping_kernels_share_their_time_and_all_parts_add_up() -> None:
    by_name, idle = attribute([(0.0, 10.0, "a"), (8.0, 15.0, "b"), (9.0, 12.0, "c"), (20.0, 21.0, "a")])
    assert by_name == {"a": 11.0, "b": 5.0, "c": 0.0}
    assert idle == 5.0
    assert sum(by_name.values()) + idle == 21.0


def test_unknown_kernels_are_listed_by_name() -> None:
    found = summarize({"mystery": 4000.0, "nvjet_x": 2000.0}, 2, 10)
    assert found["other"] == {"mystery": 2.0}
    assert found["kinds"] == {"other": 2.0, "gemm": 1.0}
    assert found["kernels"] == 5.0


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("geometry", "device"), [("tiny:4", "cpu"), pytest.param("4b:4", "cuda:0", marks=pytest.mark.gpu)]
)
def test_every_case_runs_on_the_real_runner_and_tells_time_against_the_limit(
    geometry: str, device: str, tp_size: int
) -> None:
    cases = Cases(decode=[(1, 70), (3, 64)], prefill=[(2, 100)], loop=[(2, 5)], steps=4, rounds=1)
    with geometry_folder(geometry) as folder:
        config = engine_config(
            str(folder),
            cases,
            enforce_eager=False,
            max_num_batched_tokens=None,
            device=device,
            tensor_parallel_size=tp_size,
            kv_cache_memory_bytes=256 << 20,
        )
        with started(config) as (executor, start):
            bench = Bench(executor, config, cases, 1e9)
            decode = [bench.decode(rows, context) for rows, context in cases.decode]
            loop = bench.loop(2, 5)
            prefill = bench.prefill(2, 100)
            too_many = bench.decode(400, 64)
    assert [rank["rank"] for rank in start["ranks"]] == list(range(tp_size))
    assert all(rank["weight_bytes"] > 0 for rank in start["ranks"])
    for line in decode:
        assert line["ms"] > 0 and line["ratio"] == pytest.approx(line["ms"] / line["limit_ms"], rel=0.01)
        assert line["tok_s"] == pytest.approx(line["rows"] / line["ms"] * 1e3, rel=0.01)
        assert line["profile"]["kinds"]["gemm"] > 0
        if device != "cpu":
            kinds = line["profile"]["kinds"]
            assert {"gdn", "attention", "norm", "sampling"} <= set(kinds)
            assert kinds.get("other", 0.0) <= 0.1 * sum(kinds.values()), line["profile"]["other"]
            assert (line["device_ms"] is not None) == (tp_size == 1)
    assert loop["ms"] > 0 and loop["first_token_ms"] > 0
    assert prefill["tflop_s"] >= 0 and prefill["steps"] == 1
    assert "needs 400 slots" in too_many["skipped"]
    memory = memory_line(config, start["ranks"])
    for line in [*decode, loop, prefill, too_many, memory]:
        assert describe(line)
    (rank, *_) = memory["ranks"]
    parts = rank["weight_bytes"] + memory["state_bytes"] + memory["kv_bytes"] + rank["overhead_bytes"]
    assert rank["needed_bytes"] == parts
    assert memory["state_bytes"] == 17 * memory["bytes_per_slot"]


def test_a_row_that_starts_in_the_middle_decodes_from_there() -> None:
    cases = Cases(decode=[(2, 100)], steps=4, rounds=1)
    with geometry_folder("tiny:4") as folder:
        config = engine_config(
            str(folder),
            cases,
            enforce_eager=False,
            max_num_batched_tokens=None,
            device="cpu",
            kv_cache_memory_bytes=64 << 20,
        )
        with started(config) as (executor, _):
            bench = Bench(executor, config, cases, 1e9)
            slots = bench.place(2, 100)
            bench.decode_steps(slots, 3)
            runner = bench.runner
            assert runner is not None
            assert runner.tables.host_position[slots].tolist() == [103, 103]
            assert runner.tables.position[slots].tolist() == [103, 103]


def test_the_command_prints_a_json_line_for_every_case_and_appends_them(tmp_path: Path) -> None:
    out = tmp_path / "step.jsonl"
    flags = ["--geometry", "tiny:4", "--rows", "1,2", "--context", "64", "--prefill", "1x128", "--loop", "1"]
    result = CliRunner().invoke(
        app,
        [
            "bench",
            "step",
            *flags,
            "--device",
            "cpu",
            "--steps",
            "4",
            "--rounds",
            "1",
            "--no-profile",
            "--out",
            str(out),
        ],
    )
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "memory", "decode", "decode", "loop", "prefill"]
    assert all(line["geometry"] == "tiny:4" and line["bench"] == "step" and "commit" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows", "1,x"], "--rows is '1,x'"),
        (["--prefill", "8x"], "--prefill is '8x'"),
        (["--geometry", "3b"], "--geometry is '3b'"),
    ],
)
def test_a_case_that_cannot_be_read_is_refused_by_its_flag(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "step", *flags])
    assert result.exit_code == 2
    assert message in result.output


def test_prefill_cases_are_prompts_times_tokens() -> None:
    assert parse_prefill("1x8192, 8x1024") == [(1, 8192), (8, 1024)]
    assert parse_prefill("") == []
