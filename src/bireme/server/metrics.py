"""What ``/metrics`` says: vLLM's published names where the meaning is the same, ``bireme_`` ones for the rest.

Requests are counted here, a few additions for each step that brings a request tokens; what steps were made of comes
from the engine's last report. Prometheus' own types appear only when somebody reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from bireme.engine_client import EngineClient
from bireme.step_account import (
    ROWS_BOUNDS,
    STEP_KINDS,
    STEP_SECONDS_BOUNDS,
    TOKENS_BOUNDS,
    Histogram,
    StepAccount,
    StepReport,
    Tally,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST

FINISHED_REASONS = ("stop", "length", "abort", "error")

_LABELS = ("model_name", "engine")
# Bounds are vLLM's, with finer steps below where small models need them.
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_ITL = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_LATENCY = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

_REQUEST_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From a call's arrival to its first token.", _TTFT),
    "vllm:inter_token_latency_seconds": ("Between two tokens of a request.", _ITL),
    "vllm:request_time_per_output_token_seconds": ("Mean time per token after the first, by request.", _ITL),
    "vllm:e2e_request_latency_seconds": ("From a call's arrival to a request's end.", _LATENCY),
    "vllm:request_queue_time_seconds": ("From a request's arrival in the engine to its slot.", _LATENCY),
    "vllm:request_prefill_time_seconds": ("From a request's slot to its first token.", _LATENCY),
    "vllm:request_decode_time_seconds": ("From a request's first token to its last.", _LATENCY),
    "vllm:request_inference_time_seconds": ("From a request's slot to its last token.", _LATENCY),
    "vllm:request_prompt_tokens": ("Prompt tokens, by request.", _TOKENS),
    "vllm:request_generation_tokens": ("Output tokens, by request.", _TOKENS),
    "vllm:request_params_n": ("The parameter n of requests.", (1, 2, 5, 10, 20)),
    "vllm:request_params_max_tokens": ("Output tokens that requests may have, where they say so.", _TOKENS),
}

_OLDER_NAMES = {"vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds"}
"""Names that dashboards still ask for → today's."""

_NO_STEPS = StepAccount().report_now()


class Metrics:
    """The server's counters; the engine's are read from its last message.

    Attributes:
        num_prompt_tokens: of requests that got a first token.
        num_generation_tokens: sent to clients or dropped with their requests.
        finished: requests by how they ended (``FINISHED_REASONS``).
        http_errors: error responses by status.
        num_tool_calls: in answers that are complete.
        requests: histograms of requests, by metric.
        inter_token_latency: of these, the one that every token passes.
    """

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._labels = (model_name, "0")
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.num_disconnects = 0
        self.num_tool_calls = 0
        self.finished: Counter[str] = Counter()
        self.http_errors: Counter[int] = Counter()
        self.requests = {name: Histogram(bounds) for name, (_, bounds) in _REQUEST_HISTOGRAMS.items()}
        self.inter_token_latency = self.requests["vllm:inter_token_latency_seconds"]
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        yield from self._of_the_engine()
        yield from self._of_steps(self._client.report or _NO_STEPS)
        yield from self._of_requests()

    def _of_the_engine(self) -> Iterator[Metric]:
        stats, capacity = self._client.stats, self._client.capacity
        used_blocks = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests that hold a state slot.", stats.num_running)
        yield self._gauge(
            "vllm:num_requests_waiting", "Requests that wait for a slot or for blocks.", stats.num_waiting
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", used_blocks)
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; its labels say how large the KV cache is.",
            labels=(*_LABELS, "block_size", "num_gpu_blocks"),
        )
        if capacity is not None:
            cache.add_metric((*self._labels, str(capacity.block_size), str(capacity.num_blocks)), 1)
        yield cache
        yield self._counter("vllm:num_preemptions", "Always 0: requests that run are never put back.", 0)
        yield self._gauge("bireme_state_slots_total", "State slots.", stats.num_slots)
        yield self._gauge("bireme_state_slots_free", "State slots that no request holds.", stats.num_free_slots)
        yield self._gauge("bireme_kv_blocks_total", "KV blocks.", stats.num_blocks)
        yield self._gauge("bireme_kv_blocks_free", "KV blocks that no request holds.", stats.num_free_blocks)
        yield self._gauge("bireme_engine_up", "1 while the engine serves.", self._client.is_ready)

    def _of_steps(self, report: StepReport) -> Iterator[Metric]:
        stats = self._client.stats
        yield self._counter("bireme_steps", "Steps.", stats.num_steps)
        yield self._counter(
            "bireme_prefill_tokens", "Prompt tokens that went through the model.", stats.num_prefill_tokens
        )
        yield self._counter("bireme_decode_tokens", "Decode rows that went through the model.", stats.num_decode_tokens)
        yield self._counter(
            "bireme_padding_rows", "Rows beside decode rows that fill up a captured graph.", stats.num_padding_rows
        )
        yield self._counter("bireme_host_seconds", "Time in schedule and commit.", stats.host_seconds)
        yield self._counter("bireme_model_seconds", "Time of steps in the model, on rank 0.", stats.model_seconds)
        ranks = {str(rank): seconds for rank, seconds in enumerate(report.rank_seconds)}
        yield self._counters("bireme_rank_seconds", "Time of steps in the model, by rank.", "rank", ranks)
        seconds = HistogramMetricFamily(
            "bireme_step_seconds",
            "Time of a step in the model, on rank 0, by kind: decode rows, prefill rows, or both (mixed).",
            labels=(*_LABELS, "kind"),
        )
        for kind, tally in zip(STEP_KINDS, report.seconds, strict=True):
            histogram = _of_tally(STEP_SECONDS_BOUNDS, tally)
            seconds.add_metric((*self._labels, kind), histogram.buckets(), histogram.sum)
        yield seconds
        for name, text, bounds, tally in (
            ("bireme_step_decode_rows", "Decode rows of a step that has any.", ROWS_BOUNDS, report.decode_rows),
            ("bireme_step_prefill_rows", "Prefill rows of a step that has any.", ROWS_BOUNDS, report.prefill_rows),
            (
                "vllm:iteration_tokens_total",
                "Tokens that go through the model in a step.",
                TOKENS_BOUNDS,
                report.tokens,
            ),
        ):
            yield self._histogram(name, text, _of_tally(bounds, tally))

    def _of_requests(self) -> Iterator[Metric]:
        prompt_text = "Prompt tokens of requests that got a first token."
        yield self._counter("vllm:prompt_tokens", prompt_text, self.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Output tokens.", self.num_generation_tokens)
        ended = {reason: self.finished[reason] for reason in FINISHED_REASONS}
        yield self._counters("vllm:request_success", "Requests that ended, by reason.", "finished_reason", ended)
        for name, (text, _) in _REQUEST_HISTOGRAMS.items():
            yield self._histogram(name, text, self.requests[name])
        for older, name in _OLDER_NAMES.items():
            yield self._histogram(older, f"An older name of {name}.", self.requests[name])
        yield self._counter(
            "bireme_cached_prompt_tokens", "Prompt tokens taken over from earlier requests.", self.num_cached_tokens
        )
        yield self._counter("bireme_tool_calls", "Tool calls in answers.", self.num_tool_calls)
        yield self._counter(
            "bireme_client_disconnects", "Calls whose client left before the end.", self.num_disconnects
        )
        errors = {str(status): count for status, count in sorted(self.http_errors.items())}
        yield self._counters("bireme_http_errors", "Error responses, by status.", "status", errors)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, label))
        for value_of_label, value in values.items():
            family.add_metric((*self._labels, value_of_label), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, histogram.buckets(), histogram.sum)
        return family


def _of_tally(bounds: Iterable[float], tally: Tally) -> Histogram:
    return Histogram(tuple(bounds), tally.counts, tally.sum)


class Timing:
    """One request's times, in seconds on the monotonic clock.

    Args:
        n, max_tokens: the request's parameters (max_tokens None: it did not say).

    Attributes:
        queue_seconds: from its arrival in the engine to its slot; known, like the next, with the first token.
        first_token_seconds: from the call's arrival; None before the first token.
    """

    __slots__ = ("_arrived", "_first", "_last", "_max_tokens", "_metrics", "_n", "_prefill_seconds", "queue_seconds")

    def __init__(self, metrics: Metrics, arrived: float, n: int = 1, max_tokens: int | None = None) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._n = n
        self._max_tokens = max_tokens
        self._first: float | None = None
        self._last = arrived
        self._prefill_seconds = 0.0
        self.queue_seconds = 0.0

    def tokens(self, count: int, now: float) -> None:
        """``count`` tokens arrived ``now``."""
        if not count:
            return
        metrics = self._metrics
        metrics.num_generation_tokens += count
        if self._first is None:
            self._first = now
            metrics.requests["vllm:time_to_first_token_seconds"].observe(now - self._arrived)
        else:
            metrics.inter_token_latency.observe((now - self._last) / count, count)
        self._last = now

    def started(
        self, num_prompt_tokens: int, num_cached_tokens: int, phase_seconds: tuple[float, float] | None = None
    ) -> None:
        """The first token is there: the prompt has been computed. ``phase_seconds``: see ``RequestOutput``."""
        metrics = self._metrics
        metrics.num_prompt_tokens += num_prompt_tokens
        metrics.num_cached_tokens += num_cached_tokens
        metrics.requests["vllm:request_prompt_tokens"].observe(num_prompt_tokens)
        if phase_seconds is not None:
            self.queue_seconds, self._prefill_seconds = phase_seconds
            metrics.requests["vllm:request_queue_time_seconds"].observe(self.queue_seconds)
            metrics.requests["vllm:request_prefill_time_seconds"].observe(self._prefill_seconds)

    @property
    def has_started(self) -> bool:
        return self._first is not None

    @property
    def first_token_seconds(self) -> float | None:
        return None if self._first is None else self._first - self._arrived

    def finished(self, reason: str, num_tokens: int, now: float) -> None:
        """The request has ended."""
        metrics = self._metrics
        metrics.finished[reason] += 1
        if reason not in ("stop", "length"):
            return
        observed = {
            "vllm:e2e_request_latency_seconds": now - self._arrived,
            "vllm:request_generation_tokens": num_tokens,
            "vllm:request_params_n": self._n,
        }
        if self._max_tokens is not None:
            observed["vllm:request_params_max_tokens"] = self._max_tokens
        if self._first is not None:
            decoding = self._last - self._first
            observed["vllm:request_decode_time_seconds"] = decoding
            observed["vllm:request_inference_time_seconds"] = self._prefill_seconds + decoding
            if num_tokens > 1:
                observed["vllm:request_time_per_output_token_seconds"] = (now - self._first) / (num_tokens - 1)
        for name, value in observed.items():
            metrics.requests[name].observe(value)
