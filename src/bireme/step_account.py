"""What steps were made of: histograms that cost a few additions a step, and single steps while somebody watches.

The engine adds, and hands out a report a few times a second; whoever exports does so from the last report.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import msgspec

from bireme.types import StepOutput, StepPlan

STEP_KINDS = ("decode", "prefill", "mixed")
"""A step has decode rows only, prefill rows only, or both."""

STEP_SECONDS_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
ROWS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""vLLM's, for tokens of one step."""

REPORT_SECONDS = 0.2
"""A report is due this long after the one before."""

MAX_SAMPLES = 512
"""Steps that one report shows singly; of more, the last ones."""


class Histogram:
    """Counts by bucket, and the sum of what was counted. ``bounds`` are inclusive upper bounds, ascending."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] | None = None, total: float = 0.0) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1) if counts is None else list(counts)
        self.sum = total

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


class Tally(msgspec.Struct, array_like=True):
    """A histogram on the wire: its counts (one more than its bounds) and its sum."""

    counts: list[int]
    sum: float


class StepSample(msgspec.Struct, array_like=True):
    """One step: rows and tokens by kind, and each rank's seconds in the model."""

    num_decode_rows: int
    num_prefill_rows: int
    num_prefill_tokens: int
    num_padding_rows: int
    seconds: list[float]


class StepReport(msgspec.Struct, array_like=True):
    """All histograms since start, and the steps since the last report while somebody watches.

    Attributes:
        seconds: time in the model by kind of step, in the order of ``STEP_KINDS``.
        decode_rows: of steps that have any; so ``prefill_rows``.
        tokens: that go through the model in one step.
        rank_seconds: of all steps, in the model, by rank.
        samples: oldest first, at most ``MAX_SAMPLES``.
        num_skipped: steps before these that are not among them.
    """

    seconds: list[Tally]
    decode_rows: Tally
    prefill_rows: Tally
    tokens: Tally
    rank_seconds: list[float]
    samples: list[StepSample] = []
    num_skipped: int = 0


class StepAccount:
    """Takes in every step of an engine. Not thread-safe: the engine's loop owns it.

    Attributes:
        num_steps: steps added.
        rank_seconds: in the model, of all steps, as each rank measured them.
        num_padding_rows: of all steps.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.rank_seconds = [0.0]
        self.num_padding_rows = 0
        self._seconds = tuple(Histogram(STEP_SECONDS_BOUNDS) for _ in STEP_KINDS)
        self._decode_rows = Histogram(ROWS_BOUNDS)
        self._prefill_rows = Histogram(ROWS_BOUNDS)
        self._tokens = Histogram(TOKENS_BOUNDS)
        self._samples: deque[StepSample] = deque(maxlen=MAX_SAMPLES)
        self._num_sampled = 0
        self._watched_until = 0.0
        self._is_watched = False
        self._reported_at = 0.0
        self._num_reported = 0

    @property
    def model_seconds(self) -> float:
        """Rank 0's seconds in the model, of all steps."""
        return self.rank_seconds[0]

    def add(self, plan: StepPlan, output: StepOutput) -> None:
        """``plan`` has run, and this is its result."""
        num_decode, num_prefill = len(plan.decode_slots), len(plan.prefill_rows)
        seconds = output.model_seconds
        self.num_steps += 1
        by_rank = [seconds, *output.rank_seconds]
        if len(by_rank) != len(self.rank_seconds):
            self.rank_seconds = [*self.rank_seconds, *[0.0] * (len(by_rank) - len(self.rank_seconds))]
        for rank, each in enumerate(by_rank):
            self.rank_seconds[rank] += each
        self.num_padding_rows += output.num_padding_rows
        num_tokens = plan.num_scheduled_tokens if num_prefill else num_decode
        self._tokens.observe(num_tokens)
        if num_decode:
            self._decode_rows.observe(num_decode)
        if num_prefill:
            self._prefill_rows.observe(num_prefill)
        self._seconds[(2 if num_decode else 1) if num_prefill else 0].observe(seconds)
        if self._is_watched:
            self._num_sampled += 1
            self._samples.append(
                StepSample(num_decode, num_prefill, num_tokens - num_decode, output.num_padding_rows, by_rank)
            )

    def watch(self, seconds: float) -> None:
        """For so long, reports show steps singly."""
        self._watched_until = time.monotonic() + seconds
        self._is_watched = seconds > 0

    def report(self, *, is_last: bool = False) -> StepReport | None:
        """What is to be told now; None when nothing is new or the last report is fresh.

        Args:
            is_last: no step may follow for a while: what is new is told at once.
        """
        if self.num_steps == self._num_reported:
            return None
        now = time.monotonic()
        if not is_last and now - self._reported_at < REPORT_SECONDS:
            return None
        self._reported_at = now
        self._num_reported = self.num_steps
        report = self.report_now()
        if self._is_watched:
            report.samples = list(self._samples)
            report.num_skipped = self._num_sampled - len(self._samples)
            self._samples.clear()
            self._num_sampled = 0
            self._is_watched = now < self._watched_until
        return report

    def report_now(self) -> StepReport:
        """All histograms, without single steps."""
        return StepReport(
            [_tally(histogram) for histogram in self._seconds],
            _tally(self._decode_rows),
            _tally(self._prefill_rows),
            _tally(self._tokens),
            list(self.rank_seconds),
        )


def _tally(histogram: Histogram) -> Tally:
    return Tally(histogram.counts, histogram.sum)
