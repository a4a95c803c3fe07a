"""What /metrics exports, and that docs/metrics.md and docs/grafana.json say what the code says.

``python tests/test_server_metrics.py`` writes the page's tables anew.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from server_support import RunningServer, build_tokenizer, running_server

from bireme.server.app import create_app
from bireme.server.metrics import FINISHED_REASONS, Metrics, Timing
from bireme.server.settings import ServerSettings
from bireme.sim import sim_capacity
from bireme.step_account import StepAccount
from bireme.types import EngineStats, PrefillRow, StepOutput, StepPlan

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, DASHBOARD = DOCS / "metrics.md", DOCS / "grafana.json"
BEGIN, END = "<!-- metrics: from the code -->\n", "<!-- end of metrics -->\n"

VLLM_NAMES = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"),
    *("vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("vllm:request_success_total", "vllm:iteration_tokens_total_bucket", "vllm:time_to_first_token_seconds_bucket"),
    *("vllm:inter_token_latency_seconds_bucket", "vllm:time_per_output_token_seconds_bucket"),
    *("vllm:request_time_per_output_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket"),
    *("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum"),
    *("vllm:request_decode_time_seconds_sum", "vllm:request_inference_time_seconds_bucket"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *("vllm:request_params_n_sum", "vllm:request_params_max_tokens_bucket"),
}
"""As vLLM's own exporter and the dashboards made for it spell them."""


def stub_client(**values: Any) -> Any:
    """An engine client that serves, as far as metrics and probes look at it."""
    client = {
        "stats": EngineStats(num_free_blocks=3, num_blocks=4),
        "capacity": sim_capacity(),
        "report": None,
        "is_ready": True,
        "error": None,
        "engine": SimpleNamespace(
            config=SimpleNamespace(parallel=SimpleNamespace(tp_size=1), device="cpu", dtype="float32")
        ),
    }
    return SimpleNamespace(**client | values)


def families() -> list[Metric]:
    """Every family that is exported."""
    metrics = Metrics(stub_client(), "tiny")
    metrics.http_errors[404] += 1
    return list(metrics.collect())


def samples_of(metrics: Metrics) -> dict[str, float]:
    """Sample (with the labels beside model_name and engine, and no buckets but the last) → value."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[sample.name + (str(labels) if labels else "")] = sample.value
    return found


def published_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def rendered() -> str:
    """A table of vLLM's names and one of ours."""
    tables = []
    for prefix, title in (("vllm:", "Names of vLLM"), ("bireme_", "Names of its own")):
        rows = [f"## {title}", "", "| metric | type | labels | what it says |", "| --- | --- | --- | --- |"]
        for family in families():
            if family.name.startswith(prefix):
                given = {name for sample in family.samples for name in sample.labels}
                labels = ", ".join(f"`{name}`" for name in sorted(given - {"model_name", "engine", "le"}))
                rows.append(
                    f"| `{published_name(family)}` | {family.type} | {labels} | {family.documentation.rstrip('.')} |"
                )
        tables.append("\n".join(rows) + "\n")
    return "\n".join(tables)


def queries() -> Iterator[str]:
    """Every query of the dashboard, those of its variables too."""

    def below(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (text for name, text in value.items() if name in ("expr", "query") and isinstance(text, str))
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                yield from below(each)

    yield from below(json.loads(DASHBOARD.read_text(encoding="utf-8")))


def test_the_page_lists_every_metric_as_the_code_exports_it() -> None:
    between = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert between == rendered(), "run python tests/test_server_metrics.py"


def test_each_family_has_one_name_a_help_and_the_models_label() -> None:
    found = families()
    assert len({family.name for family in found}) == len(found)
    for family in found:
        assert family.documentation.endswith("."), family.name
        assert all(sample.labels["model_name"] == "tiny" for sample in family.samples), family.name


def test_dashboards_and_autoscalers_made_for_vllm_find_their_names() -> None:
    exported = {sample.name for family in families() for sample in family.samples}
    assert exported >= VLLM_NAMES
    cache = next(family for family in families() if family.name == "vllm:cache_config_info").samples[0]
    assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"], cache.value) == ("64", "4096", 1)


def test_the_dashboard_asks_only_for_metrics_that_are_exported() -> None:
    exported = {sample.name for family in families() for sample in family.samples}
    asked = {name for query in queries() for name in re.findall(r"(?:vllm:|bireme_)\w+", query)}
    assert len(asked) > 20
    assert asked - exported == set()


def test_a_request_is_counted_by_phase_and_by_how_it_ended() -> None:
    metrics = Metrics(stub_client(), "tiny")
    timing = Timing(metrics, 100.0, n=2, max_tokens=7)
    timing.started(30, 4, (0.25, 0.5))
    timing.tokens(1, 101.0)
    timing.tokens(2, 103.0)
    timing.finished("length", 3, 103.5)
    Timing(metrics, 100.0).finished("abort", 0, 101.0)
    seen = samples_of(metrics)
    for name, value in {
        "time_to_first_token_seconds": 1.0,
        "inter_token_latency_seconds": 2.0,
        "time_per_output_token_seconds": 2.0,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "e2e_request_latency_seconds": 3.5,
        "request_prompt_tokens": 30,
        "request_generation_tokens": 3,
        "request_params_n": 2,
        "request_params_max_tokens": 7,
    }.items():
        assert seen[f"vllm:{name}_sum"] == value, name
    assert seen["vllm:inter_token_latency_seconds_count"] == 2
    assert seen["bireme_cached_prompt_tokens_total"] == 4
    ended = {
        reason: seen[f"vllm:request_success_total{{'finished_reason': '{reason}'}}"] for reason in FINISHED_REASONS
    }
    assert ended == {"stop": 0, "length": 1, "abort": 1, "error": 0}


def test_steps_are_told_by_kind_with_rows_padding_and_each_ranks_time() -> None:
    account = StepAccount()
    chunk = PrefillRow(3, 0, 64, True)
    account.add(StepPlan(0, [], [], [chunk]), StepOutput(0, [1], model_seconds=1.0, rank_seconds=[2.0]))
    account.add(StepPlan(1, [], [1, 2], [chunk]), StepOutput(1, [1] * 3, model_seconds=2.0, rank_seconds=[2.0]))
    account.add(
        StepPlan(2, [], [1, 2, 3], []),
        StepOutput(2, [1] * 3, model_seconds=4.0, num_padding_rows=5, rank_seconds=[5.0]),
    )
    stats = EngineStats(num_padding_rows=account.num_padding_rows, model_seconds=account.model_seconds)
    seen = samples_of(Metrics(stub_client(report=account.report(is_last=True), stats=stats), "tiny"))
    assert [seen[f"bireme_step_seconds_sum{{'kind': '{kind}'}}"] for kind in ("decode", "prefill", "mixed")] == [
        4,
        1,
        2,
    ]
    assert (seen["bireme_step_decode_rows_sum"], seen["bireme_step_decode_rows_count"]) == (5, 2)
    assert (seen["bireme_step_prefill_rows_sum"], seen["bireme_step_prefill_rows_count"]) == (2, 2)
    assert (seen["vllm:iteration_tokens_total_sum"], seen["vllm:iteration_tokens_total_count"]) == (64 + 66 + 3, 3)
    assert seen["bireme_padding_rows_total"] == 5
    assert [seen[f"bireme_rank_seconds_total{{'rank': '{rank}'}}"] for rank in (0, 1)] == [7, 9]
    assert seen["bireme_model_seconds_total"] == 7


def test_single_steps_are_told_only_while_somebody_watches() -> None:
    account = StepAccount()
    account.add(StepPlan(0, [], [1], []), StepOutput(0, [1]))
    report = account.report(is_last=True)
    assert report is not None
    assert report.samples == []
    account.watch(60.0)
    account.add(StepPlan(1, [], [1, 2], []), StepOutput(1, [1, 1], model_seconds=0.5, rank_seconds=[0.25]))
    report = account.report(is_last=True)
    assert report is not None
    assert [(sample.num_decode_rows, sample.seconds) for sample in report.samples] == [(2, [0.5, 0.25])]


# ---- on a server ----


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tiny")
    build_tokenizer(folder)
    with running_server(folder, folder, num_slots=1, step_seconds=0.001) as running:
        yield running


def test_a_served_request_shows_in_the_queue_the_phases_and_the_steps(server: RunningServer) -> None:
    names = [
        *("vllm:request_queue_time_seconds_count", "vllm:request_prefill_time_seconds_count"),
        *("vllm:request_decode_time_seconds_count", "vllm:iteration_tokens_total_sum", "bireme_step_decode_rows_sum"),
        "bireme_rank_seconds_total",
    ]
    before = {name: server.metric(name) for name in names}
    assert server.post({"prompt": "hello world", "max_tokens": 20, "ignore_eos": True}).status_code == 200
    server.wait_for("vllm:num_requests_running", 0)
    after = {name: server.metric(name) - before[name] for name in names}
    assert [after[name] for name in names[:3]] == [1, 1, 1]
    assert after["bireme_step_decode_rows_sum"] == 19
    assert after["vllm:iteration_tokens_total_sum"] > 19
    assert after["bireme_rank_seconds_total"] > 0


# ---- probes ----


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        ({}, 200, 200),
        ({"capacity": None, "is_ready": False}, 503, 503),
        ({"error": "rank 1 died", "is_ready": False}, 503, 503),
        ({"is_leaving": True}, 200, 503),
    ],
    ids=["serving", "loading", "dead", "draining"],
)
def test_health_tells_of_the_engine_and_ready_of_calls_that_come_now(
    state: dict[str, Any], health: int, ready: int
) -> None:
    values = dict(state)
    is_leaving = values.pop("is_leaving", False)
    app = create_app(stub_client(**values), None, None, ServerSettings(served_model_names=("tiny",)))  # type: ignore
    app.state.service.is_leaving = is_leaving

    async def probe() -> tuple[int, int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            return (await http.get("/health")).status_code, (await http.get("/ready")).status_code

    assert asyncio.run(probe()) == (health, ready)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + rendered() + END + rest.partition(END)[2], encoding="utf-8")
