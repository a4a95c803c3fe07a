"""The seam between the engine loop and the ranks (no torch): what an executor is, what ranks are told and answer."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from bireme.config import CacheCapacity, EngineConfig
from bireme.types import SamplingParams, StepOutput, StepPlan


class Executor(Protocol):
    """Runs plans in order on all ranks.

    ``depth`` plans may be outstanding: 1 runs step by step, 2 lets the loop build plan n+1 while step n runs.
    Every method raises ExecutorError once any rank has failed, died, or answered out of order (poisoned, for good).
    """

    capacity: CacheCapacity
    depth: int

    def prepare(self, params: SamplingParams) -> Future[Any]:
        """Make ready, off the loop, what a request with these parameters needs beyond a plan.

        Only parameters with ``structured_outputs`` need anything. The request may be planned once the future is done;
        whoever waits with that holds on to the future. Its error is an InvalidRequestError where the request can never
        be served.
        """
        ...

    def release(self, slot: int) -> None:
        """The owner of ``slot``, whose parameters had something prepared, is gone, and so are all plans with it."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Start ``plan`` on every rank. ``plan.seq`` must be the last one's plus 1 (the first is 0)."""
        ...

    def collect(self) -> StepOutput:
        """The result of the oldest outstanding plan, once every rank has answered for it (blocks)."""
        ...

    def check(self) -> None:
        """Raise ExecutorError if a rank is gone. Cheap; called while idle."""
        ...

    def shutdown(self) -> None:
        """End every rank and free shared memory. Idempotent; never raises; safe after a failure."""
        ...


class Start(msgspec.Struct, tag=True, frozen=True):
    """Driver → rank: load weights and report."""

    config: EngineConfig


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """Rank → driver: weights are in; ``capacity`` is what this rank's memory allows."""

    rank: int
    capacity: CacheCapacity


class Allocate(msgspec.Struct, tag=True, frozen=True):
    """Driver → rank: allocate pools for the capacity that all ranks share."""

    capacity: CacheCapacity


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Rank → driver: pools are allocated; plans may come."""

    rank: int


class Execute(msgspec.Struct, tag=True, frozen=True):
    """Driver → rank: run this plan."""

    plan: StepPlan


class Done(msgspec.Struct, tag=True, frozen=True):
    """Rank → driver: plan ``seq`` has run. ``seconds``: see ``worker.Runner.step_seconds``."""

    rank: int
    seq: int
    seconds: float = 0.0


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Rank → driver: it cannot go on; ``error`` says what it was doing and why.

    ``kind``: the name of the error's class in ``bireme.errors``, so that a failed start raises the same in the driver.
    """

    rank: int
    error: str
    kind: str = "ExecutorError"


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Driver → rank: leave."""


ToRank = Start | Allocate | Execute | Stop
FromRank = Loaded | Ready | Done | Failed
