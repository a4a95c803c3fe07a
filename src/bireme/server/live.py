"""What the engine does, as a stream of events for whoever watches; while nobody does, nothing is gathered or sent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse

from bireme.engine_client import EngineClient
from bireme.server.metrics import Metrics
from bireme.server.protocol import event
from bireme.step_account import StepReport, StepSample

EVENT_SECONDS = 1.0
"""An event comes at least so often, also when nothing happens."""

PAUSE_SECONDS = 0.1
"""And two are at least so far apart."""

WATCH_SECONDS = 5.0
"""For so long the engine tells single steps after it was last asked to."""

MAX_STEPS = 512
"""Steps that one event shows; of more, the last ones."""


class Live:
    """Hands the engine's reports to everybody who watches.

    Args:
        facts: what does not change, sent with each event.
        state: ``serving``, ``loading``, ``draining`` or ``dead``.

    Attributes:
        watchers: those who watch now.
    """

    def __init__(self, client: EngineClient, metrics: Metrics, facts: dict[str, Any], state: Callable[[], str]) -> None:
        self.watchers: set[_Watcher] = set()
        self._client = client
        self._metrics = metrics
        self._facts = facts
        self._state = state
        self._asked_at = 0.0

    def response(self) -> StreamingResponse:
        """GET /live: server-sent events until the watcher or the server leaves."""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self.events(), media_type="text/event-stream", headers=headers)

    async def events(self) -> AsyncIterator[bytes]:
        """One event at once, then one a report, or a second. Ends with the event that says the server leaves."""
        watcher = _Watcher()
        self.watchers.add(watcher)
        self._client.on_report = self._on_report
        try:
            while True:
                self._keep_watching()
                state = self._state()
                yield event(self._event(state, watcher))
                if state in ("draining", "dead"):
                    return
                await asyncio.sleep(PAUSE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(watcher.has_news.wait(), EVENT_SECONDS - PAUSE_SECONDS)
        finally:
            self.watchers.discard(watcher)
            if not self.watchers:
                self._client.on_report = None

    def _keep_watching(self) -> None:
        now = time.monotonic()
        if now - self._asked_at > WATCH_SECONDS / 2 and self._client.is_ready:
            self._asked_at = now
            self._client.watch_steps(WATCH_SECONDS)

    def _on_report(self, report: StepReport) -> None:
        for watcher in self.watchers:
            watcher.add(report)

    def _event(self, state: str, watcher: _Watcher) -> dict[str, Any]:
        stats, capacity = self._client.stats, self._client.capacity
        steps, num_skipped = watcher.take()
        return {
            **self._facts,
            "state": state,
            "seconds": time.monotonic(),
            "max_model_len": None if capacity is None else capacity.max_model_len,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_slots": stats.num_slots,
            "num_used_slots": stats.num_slots - stats.num_free_slots,
            "num_blocks": stats.num_blocks,
            "num_used_blocks": stats.num_blocks - stats.num_free_blocks,
            "num_steps": stats.num_steps,
            "num_prefill_tokens": stats.num_prefill_tokens,
            "num_generation_tokens": self._metrics.num_generation_tokens,
            "num_skipped_steps": num_skipped,
            "steps": [
                {
                    "decode_rows": step.num_decode_rows,
                    "prefill_rows": step.num_prefill_rows,
                    "prefill_tokens": step.num_prefill_tokens,
                    "padding_rows": step.num_padding_rows,
                    "seconds": step.seconds,
                }
                for step in steps
            ],
        }


class _Watcher:
    """What one of those who watch has yet to be told."""

    def __init__(self) -> None:
        self.has_news = asyncio.Event()
        self._steps: list[StepSample] = []
        self._num_skipped = 0

    def add(self, report: StepReport) -> None:
        """The engine has told something."""
        self._steps += report.samples
        num_over = max(0, len(self._steps) - MAX_STEPS)
        del self._steps[:num_over]
        self._num_skipped += report.num_skipped + num_over
        self.has_news.set()

    def take(self) -> tuple[list[StepSample], int]:
        """The steps since the last call, oldest first, and how many before them were left out."""
        taken = self._steps, self._num_skipped
        self._steps, self._num_skipped = [], 0
        self.has_news.clear()
        return taken
