"""The queues: which rows run in the next step, and what the results of a step mean for their requests.

``schedule`` may run ahead of ``commit``: plans are numbered, run in order, and are committed in order. A request's
counters say where it is; there are no phases.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec

from bireme.cache.block_allocator import BlockAllocator, SlotAllocator
from bireme.config import CacheCapacity, SchedulerConfig
from bireme.errors import ExecutorError, InvalidRequestError, QueueFullError
from bireme.scheduler.plan import (
    Admission,
    admission,
    blocks_needed,
    chunk_length,
    finish_check,
    lifetime_tokens,
    prefill_budget,
    resolve_max_tokens,
)
from bireme.types import (
    MAX_SEED,
    FinishReason,
    NewRequest,
    PrefillRow,
    Request,
    RequestOutput,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in the engine.

    Attributes:
        max_tokens: output tokens it may produce (resolved, never None).
        num_lifetime_tokens: tokens that pass through the model until it has produced ``max_tokens``.
        eos_token_ids: end tokens that count for it (none when it ignores them).
        num_cached_tokens: prompt tokens whose computation was found in a cache at admission.
        num_scheduled_tokens: tokens that plans have taken up so far, cached and in-flight ones included. It may decode
            while ``num_prompt_tokens <= num_scheduled_tokens < num_lifetime_tokens``.
        num_computed_tokens: of these, tokens whose step is committed.
        last_seq: the last plan that holds a row of it; -1 before the first.
        finish_reason: set once it has ended, though rows of it may still be in flight.
        queued_at: when it came, on the monotonic clock.
        admitted_at: when it got its slot, likewise; 0 before.
    """

    request: Request
    num_prompt_tokens: int
    max_tokens: int
    num_lifetime_tokens: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_computed_tokens: int = 0
    slot: int = 0
    block_table: list[int] = field(default_factory=list)
    last_seq: int = -1
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    queued_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan and the requests of its rows, in plan order, until its result is committed."""

    plan: StepPlan
    decode: list[RequestState]
    prefill: list[RequestState]


_by_slot = attrgetter("slot")


class Scheduler:
    """Owns every request from arrival to release, and the ids of slots and blocks.

    Prompts are computed in order of admission, each as far as the budget reaches, so at most one admitted prompt is
    unfinished at any time and none overtakes another. Where a request's chunks end depends on its neighbours only
    through the budget that they leave, and always is an aligned position.

    A slot and its blocks are handed on when no plan in flight holds a row of their request. Plans run in order, so
    whatever the old owner still computes happens before the new owner's first row.

    Args:
        config: limits of a step and of the queue.
        capacity: slots and blocks that the ranks hold.
        eos_token_ids: the model's end tokens.
        seed: of the generator that gives unseeded requests their seeds, in order of admission.
    """

    def __init__(
        self, config: SchedulerConfig, capacity: CacheCapacity, eos_token_ids: Iterable[int] = (), seed: int = 0
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.eos_token_ids = frozenset(eos_token_ids)
        self.blocks = BlockAllocator(capacity.num_blocks)
        self.slots = SlotAllocator(capacity.num_slots)
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self._seeds = random.Random(seed)
        self._open: dict[str, RequestState] = {}
        self._waiting: OrderedDict[str, RequestState] = OrderedDict()
        self._prefilling: RequestState | None = None
        # By slot. Replaced, never changed in place: plans in flight share it.
        self._decoding: list[RequestState] = []
        self._in_flight: deque[InFlight] = deque()
        self._next_seq = 0
        self._released: list[int] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and have not ended."""
        return len(self._open) - len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans handed out and not committed."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        """True while a request is open or a plan's result is still to come."""
        return bool(self._open or self._in_flight)

    def add(self, request: Request) -> None:
        """Put a request (checked by ``check_request``) at the end of the queue.

        Raises:
            QueueFullError: ``max_waiting`` requests wait already, those that free slots could take aside.
            InvalidRequestError: it needs more blocks than there are.
        """
        if len(self._waiting) >= self.config.max_waiting + self.slots.num_free:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting: at most {self.config.max_waiting} may wait for a free "
                "slot (--max-waiting); try again later"
            )
        params = request.params
        num_prompt_tokens = len(request.prompt_token_ids)
        max_tokens = resolve_max_tokens(num_prompt_tokens, params.max_tokens, self.capacity.max_model_len)
        num_lifetime_tokens = lifetime_tokens(num_prompt_tokens, max_tokens)
        num_blocks = blocks_needed(num_lifetime_tokens, self.capacity.block_size)
        if admission(num_blocks, self.blocks.num_free, self.blocks.num_blocks, 1) is Admission.REJECT:
            raise InvalidRequestError(
                f"the request needs {num_blocks} KV blocks of {self.capacity.block_size} tokens: there are "
                f"{self.blocks.num_blocks} (--kv-cache-memory-bytes)",
                "max_tokens",
            )
        state = RequestState(
            request,
            num_prompt_tokens,
            max_tokens,
            num_lifetime_tokens,
            frozenset() if params.ignore_eos else self.eos_token_ids,
            frozenset(params.stop_token_ids),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self._open[request.request_id] = state
        self._waiting[request.request_id] = state

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever it is; its terminal output, or None if it is not open (it may just have ended)."""
        state = self._open.get(request_id)
        if state is None:
            return None
        self._waiting.pop(request_id, None)
        self._finish(state, FinishReason.ABORT)
        self._drop_finished()
        if state.slot and (not self._in_flight or state.last_seq < self._in_flight[0].plan.seq):
            self._release(state)
        return RequestOutput(request_id, [], FinishReason.ABORT)

    def schedule(self) -> StepPlan | None:
        """The next step's rows, or None when no row is ready. The plan counts as started from here on."""
        seq = self._next_seq
        decoding = self._decoding
        some_complete = False
        for state in decoding:
            state.last_seq = seq
            state.num_scheduled_tokens += 1
            if state.num_scheduled_tokens == state.num_lifetime_tokens:
                some_complete = True
        if some_complete:
            self._decoding = [s for s in decoding if s.num_scheduled_tokens < s.num_lifetime_tokens]

        new_requests: list[NewRequest] = []
        prefill: list[RequestState] = []
        prefill_rows: list[PrefillRow] = []
        if self._prefilling is not None or self._waiting:
            self._schedule_prefill(len(decoding), new_requests, prefill, prefill_rows)
        if not decoding and not prefill:
            return None

        plan = StepPlan(seq, new_requests, [state.slot for state in decoding], prefill_rows)
        self._next_seq = seq + 1
        self._in_flight.append(InFlight(plan, decoding, prefill))
        self.num_decode_tokens += len(decoding)
        return plan

    def _schedule_prefill(
        self,
        num_decode_rows: int,
        new_requests: list[NewRequest],
        prefill: list[RequestState],
        prefill_rows: list[PrefillRow],
    ) -> None:
        """Spend the step's prefill budget on prompts, first come first served; fills the three lists."""
        budget = prefill_budget(self.config.max_num_batched_tokens, num_decode_rows)
        now_decoding: list[RequestState] = []
        while budget > 0:
            state = self._prefilling
            if state is None:
                state = next(iter(self._waiting.values()), None)
                if state is None:
                    break
                if chunk_length(state.num_cached_tokens, state.num_prompt_tokens, budget) == 0 or not self._fits(state):
                    break
                new_requests.append(self._admit(state))
            start = state.num_scheduled_tokens
            length = chunk_length(start, state.num_prompt_tokens, budget)
            is_last = start + length == state.num_prompt_tokens
            prefill.append(state)
            prefill_rows.append(PrefillRow(state.slot, start, length, is_last))
            state.num_scheduled_tokens += length
            state.last_seq = self._next_seq
            self.num_prefill_tokens += length
            if not is_last:
                self._prefilling = state
                break
            self._prefilling = None
            budget -= length
            if state.num_scheduled_tokens < state.num_lifetime_tokens:
                now_decoding.append(state)
        if now_decoding:
            self._decoding = sorted(self._decoding + now_decoding, key=_by_slot)

    def _fits(self, state: RequestState) -> bool:
        num_blocks = blocks_needed(state.num_lifetime_tokens, self.capacity.block_size)
        verdict = admission(num_blocks, self.blocks.num_free, self.blocks.num_blocks, self.slots.num_free)
        return verdict is Admission.ADMIT

    def _admit(self, state: RequestState) -> NewRequest:
        """Give the head of the queue its slot and every block of its life."""
        request = state.request
        del self._waiting[request.request_id]
        state.admitted_at = time.monotonic()
        state.slot = self.slots.allocate()
        state.block_table = self.blocks.allocate(blocks_needed(state.num_lifetime_tokens, self.capacity.block_size))
        state.num_scheduled_tokens = state.num_computed_tokens = state.num_cached_tokens
        params = request.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.randint(0, MAX_SEED))
        suppressed = sorted(state.eos_token_ids | state.stop_token_ids) if params.min_tokens else []
        return NewRequest(state.slot, request.prompt_token_ids, state.block_table, params, suppressed)

    def commit(self, output: StepOutput) -> list[RequestOutput]:
        """Take in the result of the oldest plan in flight: one output for each request that got a token.

        Raises:
            ExecutorError: the result is another plan's, or does not hold what the plan's rows were to give.
        """
        flight = self._in_flight[0]
        plan = flight.plan
        if output.seq != plan.seq:
            raise ExecutorError(f"the result of step {output.seq} came back where step {plan.seq}'s was due")
        sampled = flight.decode
        for state in sampled:
            state.num_computed_tokens += 1
        if flight.prefill:
            self._commit_prefill(flight, output)
            sampled = sampled + [s for s, row in zip(flight.prefill, plan.prefill_rows, strict=True) if row.is_last]
        token_ids = output.token_ids
        if len(token_ids) != len(sampled):
            raise ExecutorError(f"step {plan.seq} gave {len(token_ids)} tokens for {len(sampled)} rows")
        self._in_flight.popleft()

        outputs: list[RequestOutput] = []
        some_finished = False
        for index, (state, token_id) in enumerate(zip(sampled, token_ids, strict=True)):
            if state.finish_reason is not None:
                continue
            params = state.request.params
            num_output_tokens = state.num_computed_tokens - state.num_prompt_tokens + 1
            is_free = params.structured_outputs is None
            reason, stop_reason = finish_check(
                token_id,
                num_output_tokens,
                params.min_tokens if is_free else 0,  # a form that is complete ends whatever min_tokens says
                state.max_tokens,
                state.eos_token_ids,
                state.stop_token_ids,
            )
            result = RequestOutput(state.request.request_id, [token_id], reason, stop_reason)
            if not is_free and output.failed_slots is not None and state.slot in output.failed_slots:
                why, reason = output.failed_slots[state.slot], FinishReason.ERROR
                result = RequestOutput(state.request.request_id, [], reason, error=why, is_invalid=True)
            if params.logprobs is not None and output.logprobs is not None:
                entry = output.logprobs[index]
                if entry is not None:
                    result.logprobs = [entry]
            if num_output_tokens == 1:
                result.num_cached_tokens = state.num_cached_tokens
                result.phase_seconds = (state.admitted_at - state.queued_at, time.monotonic() - state.admitted_at)
                result.prompt_logprobs = state.prompt_logprobs
                state.prompt_logprobs = None
            outputs.append(result)
            if reason is not None:
                self._finish(state, reason)
                some_finished = True
        if some_finished:
            self._drop_finished()

        seq = plan.seq
        for state in flight.decode:
            if state.finish_reason is not None and state.last_seq == seq:
                self._release(state)
        for state in flight.prefill:
            if state.finish_reason is not None and state.last_seq == seq:
                self._release(state)
        return outputs

    def _commit_prefill(self, flight: InFlight, output: StepOutput) -> None:
        """Count the chunks' tokens and collect their prompt log-probabilities."""
        for state, row in zip(flight.prefill, flight.plan.prefill_rows, strict=True):
            state.num_computed_tokens += row.length
            if state.prompt_logprobs is None or state.finish_reason is not None:
                continue
            if output.prompt_logprobs is not None:
                state.prompt_logprobs += output.prompt_logprobs.get(row.slot, ())
            num_expected = min(state.num_computed_tokens + 1, state.num_prompt_tokens)
            if len(state.prompt_logprobs) != num_expected:
                raise ExecutorError(
                    f"step {output.seq} left {len(state.prompt_logprobs)} prompt log-probabilities in slot {row.slot} "
                    f"where {num_expected} were due"
                )

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        state.finish_reason = reason
        del self._open[state.request.request_id]

    def _drop_finished(self) -> None:
        """No further plan takes up a request that has ended."""
        self._decoding = [state for state in self._decoding if state.finish_reason is None]
        if self._prefilling is not None and self._prefilling.finish_reason is not None:
            self._prefilling = None

    def take_released(self) -> list[int]:
        """Slots that were freed since the last call, of requests with ``structured_outputs``."""
        released, self._released = self._released, []
        return released

    def _release(self, state: RequestState) -> None:
        if state.request.params.structured_outputs is not None:
            self._released.append(state.slot)
        self.slots.free(state.slot)
        self.blocks.free(state.block_table)
        state.slot, state.block_table = 0, []

    def check_invariants(self) -> None:
        """Prove that every slot and block is either free or held by exactly one request that needs it (for tests).

        Raises:
            RuntimeError: one is lost, or held twice.
        """
        holders: dict[int, RequestState] = {}
        live = [*self._open.values(), *(s for f in self._in_flight for s in (*f.decode, *f.prefill))]
        for state in live:
            if state.slot and holders.setdefault(state.slot, state) is not state:
                raise RuntimeError(f"slot {state.slot} has two owners")
        blocks = [block for state in holders.values() for block in state.block_table]
        if len(set(blocks)) != len(blocks):
            raise RuntimeError("a block has two owners")
        if len(holders) + self.slots.num_free != self.slots.num_slots or len(holders) != self.slots.num_used:
            raise RuntimeError(f"{len(holders)} slots held + {self.slots.num_free} free, of {self.slots.num_slots}")
        if len(blocks) + self.blocks.num_free != self.blocks.num_blocks or len(blocks) != self.blocks.num_used:
            raise RuntimeError(f"{len(blocks)} blocks held + {self.blocks.num_free} free, of {self.blocks.num_blocks}")

    def assert_idle(self) -> None:
        """Prove that nothing is open or in flight and that every slot and block is free.

        Raises:
            RuntimeError: otherwise.
        """
        self.check_invariants()
        if self.has_unfinished or self.slots.num_used or self.blocks.num_used:
            raise RuntimeError(
                f"not idle: {len(self._open)} open, {len(self._in_flight)} in flight, {self.slots.num_used} slots and "
                f"{self.blocks.num_used} blocks in use"
            )
