"""A scripted executor: the ranks' protocol without a model. For tests, and for measuring all that is not the model.

It answers deterministically and checks every plan against what ranks may rely on, so that whatever runs on it also
tests the plans.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from bireme.config import CHUNK_ALIGNMENT, CacheCapacity
from bireme.errors import ExecutorError
from bireme.types import NewRequest, PrefillRow, SamplingParams, StepOutput, StepPlan, TokenLogprobs

Script = Callable[[Sequence[int], int], int]
"""(prompt token ids, output position from 0) → the token that is drawn there."""


class PlanViolation(Exception):
    """A plan that ranks could not have run correctly: a defect of the scheduler."""


def echo_prompt(prompt_token_ids: Sequence[int], position: int) -> int:
    """The prompt, over and over."""
    return prompt_token_ids[position % len(prompt_token_ids)]


def sim_capacity(
    *, num_slots: int = 64, num_blocks: int = 4096, block_size: int = CHUNK_ALIGNMENT, max_model_len: int = 8192
) -> CacheCapacity:
    """A capacity to simulate; byte sizes are 1, as nothing is allocated."""
    return CacheCapacity(
        num_slots=num_slots,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        bytes_per_slot=1,
        bytes_per_block=1,
    )


@dataclass(slots=True, eq=False)
class _Owner:
    """The request that a slot belongs to, as ranks know it."""

    new: NewRequest
    num_computed: int = 0
    num_outputs: int = 0
    is_gone: bool = False


class SimExecutor:
    """Runs plans in order without a model.

    Fault injection: each ``*_seq`` argument names the plan at which the executor fails; from then on every call raises
    ExecutorError, like an executor that a rank has poisoned.

    Args:
        capacity: what it pretends to hold.
        script: draws the tokens; the prompt, repeated, by default. A suppressed token becomes the next id that is not.
        step_seconds: how long a step takes; steps follow one another, as on a device, whatever the host does meanwhile.
        depth: plans that may be outstanding.
        fail_submit_seq: ``submit`` of this plan fails.
        fail_collect_seq: ``collect`` of this plan fails.
        wrong_seq: this plan's result carries the next plan's number.
        fail_check_after: ``check`` fails from this many calls on.

    Attributes:
        plans: every plan submitted, when ``keep_plans``.
    """

    def __init__(
        self,
        capacity: CacheCapacity | None = None,
        *,
        script: Script = echo_prompt,
        step_seconds: float = 0.0,
        depth: int = 1,
        keep_plans: bool = False,
        fail_submit_seq: int | None = None,
        fail_collect_seq: int | None = None,
        wrong_seq: int | None = None,
        fail_check_after: int | None = None,
    ) -> None:
        self.capacity = capacity if capacity is not None else sim_capacity()
        self.depth = depth
        self.plans: list[StepPlan] = []
        self.is_shut_down = False
        self._script = script
        self._step_seconds = step_seconds
        self._keep_plans = keep_plans
        self._fail_submit_seq = fail_submit_seq
        self._fail_collect_seq = fail_collect_seq
        self._wrong_seq = wrong_seq
        self._checks_left = fail_check_after
        self._poison: str | None = None
        self._owners: dict[int, _Owner] = {}
        self._block_owners: dict[int, _Owner] = {}
        self._outstanding: deque[tuple[StepOutput, float]] = deque()
        self._next_seq = 0
        self._device_free_at = 0.0

    def prepare(self, params: SamplingParams) -> Future[Any]:
        """Nothing to make ready: the script decides on every token, whatever form was asked for."""
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    def release(self, slot: int) -> None:
        """Nothing is kept."""

    def submit(self, plan: StepPlan) -> None:
        """Check and run ``plan``; its result waits for ``collect``.

        Raises:
            PlanViolation: ranks could not run it.
            ExecutorError: an injected fault.
        """
        self._require_healthy()
        if plan.seq == self._fail_submit_seq:
            self._fail(f"rank 1 could not be told about step {plan.seq} (injected)")
        if len(self._outstanding) >= self.depth:
            raise PlanViolation(
                f"plan {plan.seq} makes {len(self._outstanding) + 1} outstanding, depth is {self.depth}"
            )
        if plan.seq != self._next_seq:
            raise PlanViolation(f"plan {plan.seq} came where {self._next_seq} was due")
        self._next_seq += 1
        if self._keep_plans:
            self.plans.append(plan)
        output = self._run(plan)
        self._device_free_at = max(self._device_free_at, time.perf_counter()) + self._step_seconds
        self._outstanding.append((output, self._device_free_at))

    def collect(self) -> StepOutput:
        """The oldest outstanding result, once its step's time is over.

        Raises:
            ExecutorError: an injected fault, or nothing is outstanding.
        """
        self._require_healthy()
        if not self._outstanding:
            self._fail("a result was asked for while no step is outstanding")
        output, done_at = self._outstanding.popleft()
        if self._step_seconds:
            time.sleep(max(0.0, done_at - time.perf_counter()))
        if output.seq == self._fail_collect_seq:
            self._fail(f"rank 1 died in step {output.seq} (injected)")
        if output.seq == self._wrong_seq:
            output.seq += 1
        return output

    def check(self) -> None:
        """Raise ExecutorError once the injected fault is due."""
        self._require_healthy()
        if self._checks_left is not None:
            self._checks_left -= 1
            if self._checks_left < 0:
                self._fail("rank 1 is gone (injected)")

    def shutdown(self) -> None:
        """Nothing to end."""
        self.is_shut_down = True

    def _fail(self, why: str) -> None:
        self._poison = why
        raise ExecutorError(why)

    def _require_healthy(self) -> None:
        if self._poison is not None:
            raise ExecutorError(self._poison)

    def _run(self, plan: StepPlan) -> StepOutput:
        installed = [self._install(new) for new in plan.new_requests]
        if not plan.decode_slots and not plan.prefill_rows:
            raise PlanViolation(f"plan {plan.seq} has no rows")
        for low, high in zip(plan.decode_slots, plan.decode_slots[1:], strict=False):
            if low >= high:
                raise PlanViolation(f"plan {plan.seq}: decode slots {plan.decode_slots} do not ascend")
        slots = plan.decode_slots + [row.slot for row in plan.prefill_rows]
        if len(set(slots)) != len(slots):
            raise PlanViolation(f"plan {plan.seq}: a slot has two rows in {slots}")
        for owner in installed:
            if owner.new.slot not in slots[len(plan.decode_slots) :]:
                raise PlanViolation(f"plan {plan.seq}: slot {owner.new.slot} is new but has no chunk")

        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for slot in plan.decode_slots:
            owner = self._owner(slot, plan)
            if owner.num_computed < len(owner.new.prompt_token_ids):
                raise PlanViolation(f"plan {plan.seq}: slot {slot} decodes before its prompt is computed")
            self._advance(owner, 1, plan)
            self._draw(owner, token_ids, logprobs)
        for row in plan.prefill_rows:
            owner = self._owner(row.slot, plan)
            self._check_chunk(owner, row, plan)
            if owner.new.params.prompt_logprobs is not None:
                targets = owner.new.prompt_token_ids[row.start + 1 : row.start + row.length + 1]
                top = owner.new.params.prompt_logprobs
                prompt_logprobs[row.slot] = [_scripted_logprobs(token_id, top) for token_id in targets]
            self._advance(owner, row.length, plan)
            if row.is_last:
                self._draw(owner, token_ids, logprobs)
        return StepOutput(
            plan.seq,
            token_ids,
            logprobs if any(logprobs) else None,
            prompt_logprobs or None,
            self._step_seconds,
        )

    def _install(self, new: NewRequest) -> _Owner:
        """A slot's new owner. Whoever held the slot or one of the blocks is gone: a later row of theirs is an error."""
        if not 1 <= new.slot <= self.capacity.num_slots:
            raise PlanViolation(f"slot {new.slot} is not in [1, {self.capacity.num_slots}]")
        if new.params.seed is None:
            raise PlanViolation(f"the request in slot {new.slot} has no seed")
        size, table = self.capacity.block_size, new.block_table
        num_prompt, max_tokens = len(new.prompt_token_ids), new.params.max_tokens
        if max_tokens is None:
            max_tokens = self.capacity.max_model_len - num_prompt
            enough = -(-num_prompt // size) <= len(table) <= -(-(num_prompt + max_tokens - 1) // size)
        else:
            enough = len(table) == -(-(num_prompt + max_tokens - 1) // size)
        if not enough:
            raise PlanViolation(f"slot {new.slot} has {len(table)} blocks for {num_prompt} + {max_tokens} tokens")
        if len(set(table)) != len(table) or not all(1 <= block <= self.capacity.num_blocks for block in table):
            raise PlanViolation(f"slot {new.slot} has a bad block table {table}")
        owner = _Owner(new)
        if new.slot in self._owners:
            self._owners[new.slot].is_gone = True
        for block in table:
            if block in self._block_owners:
                self._block_owners[block].is_gone = True
            self._block_owners[block] = owner
        self._owners[new.slot] = owner
        return owner

    def _owner(self, slot: int, plan: StepPlan) -> _Owner:
        owner = self._owners.get(slot)
        if owner is None or owner.is_gone:
            raise PlanViolation(
                f"plan {plan.seq}: the row in slot {slot} has lost its slot or blocks, or never had any"
            )
        return owner

    def _check_chunk(self, owner: _Owner, row: PrefillRow, plan: StepPlan) -> None:
        num_prompt, end = len(owner.new.prompt_token_ids), row.start + row.length
        if row.length < 1 or row.start != owner.num_computed or end > num_prompt:
            raise PlanViolation(
                f"plan {plan.seq}: chunk [{row.start}, {end}) in slot {row.slot}, {owner.num_computed} of {num_prompt} "
                "tokens are computed"
            )
        if row.is_last != (end == num_prompt):
            raise PlanViolation(
                f"plan {plan.seq}: chunk [{row.start}, {end}) of {num_prompt} says is_last={row.is_last}"
            )
        if not row.is_last and end % CHUNK_ALIGNMENT:
            raise PlanViolation(f"plan {plan.seq}: chunk [{row.start}, {end}) ends off the alignment")

    def _advance(self, owner: _Owner, length: int, plan: StepPlan) -> None:
        owner.num_computed += length
        if owner.num_computed > len(owner.new.block_table) * self.capacity.block_size:
            raise PlanViolation(f"plan {plan.seq}: slot {owner.new.slot} is past its blocks")

    def _draw(self, owner: _Owner, token_ids: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        params = owner.new.params
        if params.max_tokens is not None and owner.num_outputs >= params.max_tokens:
            raise PlanViolation(f"slot {owner.new.slot} draws past its max_tokens {params.max_tokens}")
        token_id = self._script(owner.new.prompt_token_ids, owner.num_outputs)
        if owner.num_outputs < params.min_tokens and params.structured_outputs is None:
            while token_id in owner.new.suppressed_token_ids:
                token_id += 1
        owner.num_outputs += 1
        token_ids.append(token_id)
        logprobs.append(None if params.logprobs is None else _scripted_logprobs(token_id, params.logprobs))


def _scripted_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The token first with log-probability -0.5, then the smallest other ids, each 1 below the one before."""
    others = [other for other in range(num_top) if other != token_id]
    top_ids = [token_id, *others][:num_top]
    return TokenLogprobs(token_id, -0.5, 1, top_ids, [-0.5 - index for index in range(len(top_ids))])
