"""The loop that drives an executor: schedule → execute → commit, with as many plans in flight as the executor takes."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import msgspec

from bireme.config import CacheCapacity, EngineConfig
from bireme.errors import BiremeError, EngineDeadError, ExecutorError, InvalidRequestError, QueueFullError
from bireme.executor.protocol import Executor
from bireme.scheduler.ledger import Ledger
from bireme.scheduler.scheduler import Scheduler
from bireme.step_account import StepAccount
from bireme.types import EngineStats, FinishReason, Request, RequestOutput, StepPlan
from bireme.validation import check_request

__all__ = ["EngineCore", "check_request"]

logger = logging.getLogger(__name__)

PREPARE_SECONDS = 0.002
"""How long a step with nothing else to do waits for an answer's form to be compiled."""


class EngineCore:
    """Takes requests, steps an executor, gives outputs. Not thread-safe: one loop owns it.

    Every request ends in exactly one output with a finish reason, given by ``step`` (also for requests that were
    refused or aborted), by ``fail`` or by ``shutdown``.

    Args:
        config: the engine's configuration.
        executor: ranks that are ready to run plans; closed by ``shutdown``.

    Attributes:
        capacity: what requests are checked against: the executor's capacity within the configured limits.
        error: why the engine is dead, or None.
        account: what its steps were made of.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        limits = config.scheduler
        held = executor.capacity
        self.config = config
        self.executor = executor
        self.capacity: CacheCapacity = msgspec.structs.replace(
            held,
            num_slots=min(held.num_slots, limits.max_num_seqs),
            max_model_len=min(held.max_model_len, limits.max_model_len or held.max_model_len),
        )
        self.error: str | None = None
        self.scheduler = Scheduler(limits, self.capacity, config.model.eos_token_ids, config.seed)
        self.ledger = Ledger()
        self._pending: list[RequestOutput] = []
        self.account = StepAccount()
        self._plans: deque[StepPlan] = deque()
        self._host_seconds = 0.0
        # Requests whose answer's form is being compiled, and what was compiled for those that are open.
        self._preparing: dict[str, Request] = {}
        self._prepared: dict[str, Future[Any]] = {}

    @property
    def is_dead(self) -> bool:
        """True once the executor has failed or the engine was shut down: nothing is served any more."""
        return self.error is not None

    @property
    def has_unfinished(self) -> bool:
        """True while ``step`` has something to do or to give."""
        return bool(self._pending) or (self.error is None and self._has_work)

    @property
    def _has_work(self) -> bool:
        return bool(self._preparing) or self.scheduler.has_unfinished

    def add_request(self, request: Request) -> None:
        """Queue a request. One that can never be served, or finds the queue full, is answered by the next ``step``.

        The answer to an id that is in use carries that id, like any other: callers keep ids unique, or cannot tell it
        from the first request's.

        Raises:
            EngineDeadError: the engine is dead.
        """
        self._require_alive()
        try:
            check_request(request, self.config.model.vocab_size, self.capacity, self.ledger)
            if request.params.structured_outputs is None:
                self.scheduler.add(request)
            else:
                self._prepared[request.request_id] = self.executor.prepare(request.params)
                self._preparing[request.request_id] = request
        except InvalidRequestError as error:
            self._refuse(request.request_id, error, is_invalid=True, error_param=error.param)
        except QueueFullError as error:
            self._refuse(request.request_id, error, is_overloaded=True)
        else:
            self.ledger.open(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request at any moment; the next ``step`` gives its terminal output. An id not open is ignored."""
        if self.error is not None:
            return
        if self._preparing.pop(request_id, None) is not None:
            output: RequestOutput | None = RequestOutput(request_id, [], FinishReason.ABORT)
        else:
            output = self.scheduler.abort(request_id)
        if output is not None:
            self._give([output])

    def step(self) -> list[RequestOutput]:
        """Keep the executor busy and take in one result, if any is due. Blocks while that step runs.

        When the executor fails, the outputs are one ERROR for every open request, and the engine is dead.

        Raises:
            EngineDeadError: the engine was dead already.
        """
        self._require_alive()
        scheduler, executor = self.scheduler, self.executor
        if self._preparing:
            self._queue_prepared()
        try:
            while scheduler.num_in_flight < executor.depth:
                started = time.perf_counter()
                plan = scheduler.schedule()
                self._host_seconds += time.perf_counter() - started
                if plan is None:
                    break
                executor.submit(plan)
                self._plans.append(plan)
            if scheduler.num_in_flight:
                result = executor.collect()
                started = time.perf_counter()
                outputs = scheduler.commit(result)
                self._give(outputs)
                self.account.add(self._plans.popleft(), result)
                self._host_seconds += time.perf_counter() - started
        except ExecutorError as error:
            return self.fail(str(error))
        return self._take_pending()

    def check(self) -> list[RequestOutput]:
        """For the idle loop: notice that a rank is gone. Outputs as from ``step`` if so, else none."""
        if self.error is None:
            try:
                self.executor.check()
            except ExecutorError as error:
                return self.fail(str(error))
        return []

    def fail(self, error: str) -> list[RequestOutput]:
        """Declare the engine dead: every open request ends with one ERROR. Later calls give nothing."""
        return self._end(error, FinishReason.ERROR, error)

    def shutdown(self) -> list[RequestOutput]:
        """End the ranks. Requests that are still open end with ABORT. Idempotent."""
        outputs = self._end("the engine was shut down", FinishReason.ABORT, None)
        self.executor.shutdown()
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot. ``host_seconds`` is schedule and commit; ``model_seconds`` is what rank 0 measured."""
        scheduler, account = self.scheduler, self.account
        return EngineStats(
            num_waiting=scheduler.num_waiting + len(self._preparing),
            num_running=scheduler.num_running,
            num_free_slots=scheduler.slots.num_free,
            num_slots=scheduler.slots.num_slots,
            num_free_blocks=scheduler.blocks.num_free,
            num_blocks=scheduler.blocks.num_blocks,
            num_steps=account.num_steps,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_decode_tokens=scheduler.num_decode_tokens,
            host_seconds=self._host_seconds,
            model_seconds=account.model_seconds,
            num_padding_rows=account.num_padding_rows,
        )

    def assert_idle(self) -> None:
        """Prove that nothing is open, in flight or unsaid, and that every slot and block is free (for tests).

        Raises:
            RuntimeError: otherwise.
        """
        self.ledger.assert_settled()
        if self._pending:
            raise RuntimeError(f"not idle: {len(self._pending)} outputs were not given")
        if self._prepared:
            raise RuntimeError(f"not idle: the forms of {len(self._prepared)} requests were kept")
        self.scheduler.assert_idle()

    def _end(self, why_dead: str, reason: FinishReason, error: str | None) -> list[RequestOutput]:
        if self.error is not None:
            return []
        self.error = why_dead
        ended = [RequestOutput(request_id, [], reason, error=error) for request_id in self.ledger.open_ids]
        self._preparing.clear()
        self._prepared.clear()
        self.ledger.record(ended)
        self._pending += ended
        return self._take_pending()

    def _queue_prepared(self) -> None:
        """Queue the requests whose form has been compiled, in order of arrival; with nothing else to do, wait a bit."""
        if not self._pending and not self.scheduler.has_unfinished:
            wait([self._prepared[each] for each in self._preparing], PREPARE_SECONDS, FIRST_COMPLETED)
        for request in [each for each in self._preparing.values() if self._prepared[each.request_id].done()]:
            del self._preparing[request.request_id]
            try:
                self._prepared[request.request_id].result()
                self.scheduler.add(request)
            except InvalidRequestError as error:
                verdict: dict[str, Any] = {"error": str(error), "is_invalid": True, "error_param": error.param}
            except QueueFullError as error:
                verdict = {"error": str(error), "is_overloaded": True}
            except Exception as error:
                verdict = {"error": f"preparing the answer's form failed: {type(error).__name__}"}
                logger.exception("preparing the form of request %s failed", request.request_id)
            else:
                continue
            self._give([RequestOutput(request.request_id, [], FinishReason.ERROR, **verdict)])

    def _give(self, outputs: list[RequestOutput]) -> None:
        """Outputs of open requests, for the next ``step`` to return; let go of what those kept that end with them."""
        self.ledger.record(outputs)
        self._pending += outputs
        if self._prepared:
            for output in outputs:
                if output.finish_reason is not None:
                    self._prepared.pop(output.request_id, None)
        for slot in self.scheduler.take_released():
            self.executor.release(slot)

    def _refuse(self, request_id: str, error: BiremeError, **verdict: Any) -> None:
        output = RequestOutput(request_id, [], FinishReason.ERROR, error=str(error), **verdict)
        if request_id not in self.ledger:
            self.ledger.open(request_id)
            self.ledger.record([output])
        self._pending.append(output)

    def _take_pending(self) -> list[RequestOutput]:
        outputs, self._pending = self._pending, []
        return outputs

    def _require_alive(self) -> None:
        if self.error is not None:
            raise EngineDeadError(f"the engine is dead: {self.error}")
