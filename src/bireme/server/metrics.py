"""What ``/metrics`` says: vLLM's published names where the meaning is the same, ``bireme_`` ones for the rest.

Observing is on the path of every token, so histograms are plain lists here; Prometheus' own types appear only when
somebody reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from bireme.engine_client import EngineClient

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LABELS = ("model_name", "engine")
_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_LATENCY = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class Histogram:
    """Counts by bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound → how many were at most that, as Prometheus wants it."""
        total, found = 0, []
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Metrics:
    """The server's counters; the engine's are read from its last message.

    Attributes:
        num_prompt_tokens: of requests that got a first token.
        num_generation_tokens: sent to clients or dropped with their requests.
        finished: requests by how they ended (stop, length, abort, error).
        http_errors: error responses by status.
        num_tool_calls: in answers that are complete.
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
        self.time_to_first_token = Histogram(_TTFT)
        self.inter_token_latency = Histogram(_ITL)
        self.time_per_output_token = Histogram(_ITL)
        self.e2e_latency = Histogram(_LATENCY)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        stats = self._client.stats
        used_blocks = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that hold a state slot.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests that wait for a slot or for blocks.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", used_blocks),
            ("bireme_state_slots_total", "State slots.", stats.num_slots),
            ("bireme_state_slots_free", "State slots that no request holds.", stats.num_free_slots),
            ("bireme_kv_blocks_total", "KV blocks.", stats.num_blocks),
            ("bireme_kv_blocks_free", "KV blocks that no request holds.", stats.num_free_blocks),
            ("bireme_engine_up", "1 while the engine serves.", float(self._client.is_ready)),
        ):
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.", self.num_prompt_tokens),
            ("vllm:generation_tokens", "Output tokens.", self.num_generation_tokens),
            ("bireme_cached_prompt_tokens", "Prompt tokens taken over from earlier requests.", self.num_cached_tokens),
            ("bireme_client_disconnects", "Calls whose client left before the end.", self.num_disconnects),
            ("bireme_tool_calls", "Tool calls in answers.", self.num_tool_calls),
            ("bireme_steps", "Steps of the engine.", stats.num_steps),
            ("bireme_prefill_tokens", "Prompt tokens that went through the model.", stats.num_prefill_tokens),
            ("bireme_decode_tokens", "Rows of decode that went through the model.", stats.num_decode_tokens),
            ("bireme_host_seconds", "Time in schedule and commit.", stats.host_seconds),
            ("bireme_model_seconds", "Time in the model.", stats.model_seconds),
        ):
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=(*_LABELS, "finished_reason")
        )
        for reason in ("stop", "length", "abort", "error"):
            success.add_metric((*self._labels, reason), self.finished[reason])
        yield success
        errors = CounterMetricFamily("bireme_http_errors", "Error responses, by status.", labels=(*_LABELS, "status"))
        for status, count in sorted(self.http_errors.items()):
            errors.add_metric((*self._labels, str(status)), count)
        yield errors
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From a call's arrival to its first token.", self.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a request.", self.inter_token_latency),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean time per token after the first, by request.",
                self.time_per_output_token,
            ),
            ("vllm:e2e_request_latency_seconds", "From a call's arrival to a request's end.", self.e2e_latency),
            ("vllm:request_prompt_tokens", "Prompt tokens by request.", self.prompt_tokens),
            ("vllm:request_generation_tokens", "Output tokens by request.", self.generation_tokens),
        ):
            family = HistogramMetricFamily(name, text, labels=_LABELS)
            family.add_metric(self._labels, histogram.buckets(), histogram.sum)
            yield family


class Timing:
    """One request's times, in seconds on the monotonic clock."""

    __slots__ = ("_arrived", "_first", "_last", "_metrics")

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._first: float | None = None
        self._last = arrived

    def tokens(self, count: int, now: float) -> None:
        """``count`` tokens arrived ``now``."""
        if not count:
            return
        metrics = self._metrics
        metrics.num_generation_tokens += count
        if self._first is None:
            self._first = now
            metrics.time_to_first_token.observe(now - self._arrived)
        else:
            metrics.inter_token_latency.observe((now - self._last) / count, count)
        self._last = now

    def started(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """The first token is there: the prompt has been computed."""
        metrics = self._metrics
        metrics.num_prompt_tokens += num_prompt_tokens
        metrics.num_cached_tokens += num_cached_tokens
        metrics.prompt_tokens.observe(num_prompt_tokens)

    @property
    def has_started(self) -> bool:
        return self._first is not None

    def finished(self, reason: str, num_tokens: int, now: float) -> None:
        """The request has ended."""
        metrics = self._metrics
        metrics.finished[reason] += 1
        if reason in ("stop", "length"):
            metrics.e2e_latency.observe(now - self._arrived)
            metrics.generation_tokens.observe(num_tokens)
            if self._first is not None and num_tokens > 1:
                metrics.time_per_output_token.observe((now - self._first) / (num_tokens - 1))
