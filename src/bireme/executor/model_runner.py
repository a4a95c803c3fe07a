"""One rank's half of a step: plan → tensors → model → sampler → ``StepOutput``.

On the CPU a step is run and answered at once. On CUDA it is only launched: the answer is a ``DeferredOutput`` that the
loop reads one step later, sampled tokens stay in their slots on the device, and steps of few tokens run as graphs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bireme.cache.capacity import available_memory, plan_capacity
from bireme.cache.kv_pool import KvPool
from bireme.cache.state_pool import StatePool
from bireme.checkpoint.loader import load_rank_weights, random_rank_weights
from bireme.checkpoint.progress import progress_bar
from bireme.config import CacheCapacity, EngineConfig
from bireme.distributed import TpGroup
from bireme.errors import InvalidRequestError
from bireme.executor.deferred import DeferredOutput
from bireme.executor.graphs import Forwarded, Shape, StepGraphs, cuda_recorder, shapes_for
from bireme.executor.prefill_inputs import PrefillInputs, PrefillSizes, pack
from bireme.executor.slot_tables import DecodeRows, SlotTables
from bireme.layers.batch import Batch
from bireme.models.qwen3_5 import Qwen3_5ForCausalLM
from bireme.sampling.grammar import GrammarCompiler, SlotGrammars
from bireme.sampling.logprobs import prompt_logprobs
from bireme.sampling.params import SlotSampling, to_device
from bireme.sampling.sampler import SampledRows, Sampler
from bireme.types import SamplingParams, StepOutput, StepPlan, TokenLogprobs

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose logits are held at once: bounds [rows, vocab] float32 when prompt logprobs are asked for."""


class ModelRunner:
    """Owns this rank's weights, pools and tables; runs plans. It decides nothing: rows and their order are the plan's.

    Args:
        config: the engine's configuration, the same on every rank.
        group: this rank's tensor-parallel group.
        device: where weights and state live.

    Attributes:
        depth: plans that may be outstanding: 2 on CUDA, so that the host prepares a step while the device runs another.
        step_seconds: see ``worker.Runner``.
    """

    def __init__(self, config: EngineConfig, group: TpGroup, device: torch.device) -> None:
        self.config = config
        self.group = group
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.depth = 2 if self.on_cuda else 1
        self.dtype = getattr(torch, config.dtype)
        self.model = Qwen3_5ForCausalLM(config.model, group, dtype=self.dtype, device=device)
        self.sampler: Sampler | None = None
        self.graphs: StepGraphs | None = None
        self._rows = DecodeRows([], device)
        self._no_grammars = ""
        self.step_seconds = 0.0
        # Steps that may still run on the device: recorded before and after each, oldest first.
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        # Steps whose tokens the sampler's grammars have yet to see, oldest first.
        self._unobserved: deque[tuple[list[int], DeferredOutput]] = deque()

    def load(self) -> CacheCapacity:
        """Read this rank's weights; return what its memory then allows.

        Raises:
            CheckpointError: a tensor is missing, extra, misshapen or truncated.
            ConfigError: not even one request fits beside the weights.
        """
        is_first = self.group.rank == 0
        with progress_bar("loading weights", enabled=self.config.show_progress and is_first) as progress:
            self.model.load_weights(self._weights(progress))
        device_memory = None
        if self.on_cuda:
            torch.cuda.empty_cache()  # what loading has left over is free for state and KV
            device_memory = torch.cuda.mem_get_info(self.device)
        available = available_memory(self.config, device_memory)
        weight_bytes = sum(weight.nbytes for weight in self.model.weights())
        capacity, warnings = plan_capacity(self.config, available, weight_bytes)
        if is_first:
            for warning in warnings:
                logger.warning(warning)
        return capacity

    def _weights(self, progress: Callable[[int, int], None]) -> Iterable[tuple[str, Tensor]]:
        rank, size = self.group.rank, self.group.size
        if self.config.load_format == "dummy":
            return random_rank_weights(
                self.config.model,
                tp_rank=rank,
                tp_size=size,
                dtype=self.dtype,
                device=self.device,
                seed=self.config.seed,
            )
        return load_rank_weights(
            self.config.model_path,
            self.config.model,
            tp_rank=rank,
            tp_size=size,
            dtype=self.dtype,
            device=self.device,
            progress=progress,
        )

    def allocate(self, capacity: CacheCapacity) -> None:
        """Allocate state, KV and tables for the capacity that all ranks agreed on; on CUDA, capture the graphs."""
        model, size = self.config.model, self.group.size
        self.kv = KvPool(model, size, capacity, dtype=self.dtype, device=self.device)
        self.state = StatePool(model, size, capacity, dtype=self.dtype, device=self.device)
        self.tables = SlotTables(capacity, self.device)
        if self.group.rank == 0:
            self.slot_sampling = SlotSampling(
                capacity.num_slots, model.vocab_size, self.device, self.config.masked_token_ranges
            )
            self.sampler = Sampler(self.slot_sampling, self._grammars())
        if self.on_cuda and not self.config.enforce_eager and self.group.can_be_captured:
            self._capture(capacity)

    def _grammars(self) -> SlotGrammars:
        config, compiler = self.config, None
        try:
            tokenizer_path = Path(config.model_path) / "tokenizer.json"
            compiler = GrammarCompiler(tokenizer_path, config.model.vocab_size, config.model.eos_token_ids)
        except InvalidRequestError as error:
            self._no_grammars = str(error)
        return SlotGrammars(config.model.vocab_size, self.device, compiler)

    def prepare(self, params: SamplingParams) -> Future[Any]:
        """Compile, off the loop, what sampling with ``params`` needs; see ``executor.protocol.Executor.prepare``."""
        compiler = None if self.sampler is None or self.sampler.grammars is None else self.sampler.grammars.compiler
        future: Future[Any] = Future()
        if params.structured_outputs is None:
            future.set_result(None)
        elif compiler is None:
            field = params.structured_outputs.field
            future.set_exception(InvalidRequestError(f"{field} is not supported: {self._no_grammars}", field))
        else:
            return compiler.prepare(params.structured_outputs)
        return future

    def release(self, slot: int) -> None:
        """Nobody owns ``slot`` any more, and no plan that is under way has a row of it."""
        if self.sampler is not None:
            self.sampler.release(slot)

    @torch.inference_mode()
    def _capture(self, capacity: CacheCapacity) -> None:
        limits = self.config.scheduler
        max_tokens = min(limits.max_num_batched_tokens, capacity.max_model_len)
        shapes = shapes_for(min(capacity.num_slots, limits.max_num_seqs), max_tokens)
        graphs = StepGraphs(self._forward_captured, self.tables, shapes)
        is_first = self.group.rank == 0
        with progress_bar("capturing graphs", counts=True, enabled=self.config.show_progress and is_first) as progress:
            graphs.capture(cuda_recorder(), progress)
        self.graphs = graphs

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput | DeferredOutput | None:
        """Run one plan, or on CUDA launch it. Returns rank 0's output, None on the other ranks."""
        started = time.perf_counter()
        started_on_device: torch.cuda.Event | None = None
        if self.on_cuda:
            started_on_device = torch.cuda.Event(enable_timing=True)
            started_on_device.record()
        self._observe(only_answered=True)  # before a slot gets its next owner
        for new in plan.new_requests:
            self.tables.install(new)
            if self.sampler is not None:
                self.sampler.install(new)
        if self.sampler is not None and not self._unobserved:
            self.sampler.begin(plan.sampled_slots)

        shape = self._graph_shape(plan)
        forwarded = (
            self._forward_plan(plan) if shape is None or self.graphs is None else self.graphs.replay(shape, plan)
        )
        prompt_scores = self._prompt_logprobs(plan, forwarded.hidden)
        sampled = self._sample(plan, forwarded)
        self._advance_host(plan)
        if self.sampler is None:
            self._time_step(started, started_on_device)
            return None
        if started_on_device is not None:
            num_padding = 0 if shape is None else shape.num_decode - len(plan.decode_slots)
            failed = self.sampler.failures(plan.sampled_slots)
            output = DeferredOutput(plan.seq, sampled, started_on_device, num_padding, prompt_scores, failed)
            if self.sampler.needs_tokens(plan.sampled_slots):
                self._unobserved.append((plan.sampled_slots, output))
            return output
        token_ids = sampled.token_ids.tolist()
        self.sampler.observe(plan.sampled_slots, token_ids)
        return StepOutput(
            seq=plan.seq,
            token_ids=token_ids,
            logprobs=sampled.logprobs(),
            prompt_logprobs=prompt_scores,
            model_seconds=time.perf_counter() - started,
            failed_slots=self.sampler.failures(plan.sampled_slots),
        )

    def _time_step(self, started: float, started_on_device: torch.cuda.Event | None) -> None:
        """For a rank that gives no output: how long its step took, or on CUDA the last one that has ended."""
        if started_on_device is None:
            self.step_seconds = time.perf_counter() - started
            return
        finished = torch.cuda.Event(enable_timing=True)
        finished.record()
        self._timed.append((started_on_device, finished))
        while self._timed and self._timed[0][1].query():
            begin, end = self._timed.popleft()
            self.step_seconds = begin.elapsed_time(end) / 1000.0

    def close(self) -> None:
        """Nothing outlives the process; the group is closed by whoever made it."""
        if self.sampler is not None and self.sampler.grammars is not None:
            self.sampler.grammars.close()

    # plan → tensors → hidden rows

    def _graph_shape(self, plan: StepPlan) -> Shape | None:
        if self.graphs is None or self._asks_prompt_logprobs(plan):
            return None
        return self.graphs.find(plan)

    def _forward_plan(self, plan: StepPlan) -> Forwarded:
        tables, rows = self.tables, self._decode_rows(plan)
        longest = int(tables.host_position[rows.host].max()) + 1 if len(rows) else 0
        if not plan.prefill_rows:
            return self._forward(rows, None, longest, [], [])
        sizes = PrefillSizes.exact(plan.prefill_rows, len(rows))
        packed = pack(plan.prefill_rows, tables, num_decode=len(rows), first_token=len(rows), sizes=sizes)
        prefill = PrefillInputs.of(to_device(packed, torch.uint8, self.device), sizes)
        seq_lens = [row.length for row in plan.prefill_rows]
        return self._forward(rows, prefill, longest, seq_lens, [row.start for row in plan.prefill_rows])

    def _forward_captured(
        self, slots: Tensor, prefill: PrefillInputs | None, max_tokens: int, max_context: int
    ) -> Forwarded:
        num_rows = 0 if prefill is None else len(prefill.slots)
        bounds = [max_tokens] * num_rows, [max_context - max_tokens] * num_rows
        return self._forward(DecodeRows.gathered(slots), prefill, max_context, *bounds)

    def _forward(
        self, rows: DecodeRows, prefill: PrefillInputs | None, longest: int, seq_lens: list[int], starts: list[int]
    ) -> Forwarded:
        """The step without its sampling. ``longest`` bounds the decode rows' contexts."""
        tables = self.tables
        positions = rows.take(tables.position)
        token_ids = rows.take(tables.last_token)
        block_tables = rows.take(tables.block_table)[:, : max(1, -(-longest // tables.block_size))]
        # block_id · block_size + offset of positions that lie in the ``blocks``-th block of their rows
        blocks = positions // tables.block_size
        block_ids = block_tables.gather(1, blocks.unsqueeze(1)).squeeze(1)
        kv_indices = torch.add(positions, block_ids - blocks, alpha=tables.block_size)
        next_positions = positions + 1
        prefill_batch = None
        if prefill is not None:
            token_ids = torch.cat([token_ids, prefill.token_ids])
            positions = torch.cat([positions, prefill.positions])
            kv_indices = torch.cat([kv_indices, prefill.kv_indices])
            num_blocks = -(
                -max(start + length for start, length in zip(starts, seq_lens, strict=True)) // tables.block_size
            )
            prefill_batch = prefill.batch(tables.block_table[prefill.slots, :num_blocks], seq_lens, starts)
        batch = Batch(
            positions=positions,
            kv_indices=kv_indices,
            num_decode=len(rows),
            decode_slots=rows.slots,
            decode_block_tables=block_tables,
            decode_context_lens=next_positions.to(torch.int32),
            max_decode_context=longest,
            decode_slot_range=rows.covering,
            decode_in_order=rows.in_order,
            prefill=prefill_batch,
        )
        hidden = self.model.forward(token_ids, batch, self.kv, self.state)
        sampled = hidden if prefill is None else hidden.index_select(0, prefill.sampled)
        return Forwarded(
            hidden=hidden,
            logits=self.model.compute_logits(sampled) if len(sampled) else None,
            next_positions=next_positions,
            output_positions=next_positions - rows.take(tables.num_prompt),
            final_slots=None if prefill is None else prefill.final_slots,
        )

    def _decode_rows(self, plan: StepPlan) -> DecodeRows:
        if plan.decode_slots != self._rows.key:
            self._rows = DecodeRows(plan.decode_slots, self.device)
        return self._rows

    # hidden rows → tokens

    def _sample(self, plan: StepPlan, forwarded: Forwarded) -> SampledRows:
        """Draw a token for each row that samples, and make it its slot's next input, on every rank."""
        tables, rows = self.tables, self._decode_rows(plan)
        num_decode, slots = len(rows), plan.sampled_slots
        if not slots:
            return SampledRows(torch.empty(0, dtype=torch.int64, device=self.device))
        next_positions = forwarded.next_positions[:num_decode]
        output_positions = forwarded.output_positions[:num_decode]
        final_slots: Tensor | None = None
        if len(slots) > num_decode:
            # A prompt's last chunk ends where its first output token goes.
            assert forwarded.final_slots is not None
            final_slots = forwarded.final_slots[: len(slots) - num_decode]
            num_prompt = tables.num_prompt.index_select(0, final_slots)
            next_positions = torch.cat([next_positions, num_prompt])
            output_positions = torch.cat([output_positions, torch.zeros_like(num_prompt)])
        if self.sampler is None:
            sampled = SampledRows(torch.empty(len(slots), dtype=torch.int64, device=self.device))
        else:
            assert forwarded.logits is not None
            if self._unobserved and self.sampler.needs_tokens(slots):
                # The forward is under way: the wait for the last step's tokens costs the device nothing.
                self._observe(only_answered=False)
            sampled = self.sampler(forwarded.logits[: len(slots)], slots, output_positions)
        token_ids = sampled.token_ids = self.group.broadcast(sampled.token_ids, src=0)
        for table, values in ((tables.last_token, token_ids), (tables.position, next_positions)):
            if num_decode:
                rows.put(table, values[:num_decode])
            if final_slots is not None:
                table.index_copy_(0, final_slots, values[num_decode:])
        return sampled

    def _observe(self, *, only_answered: bool) -> None:
        """Show the sampler's grammars the tokens of earlier steps, oldest first."""
        while self._unobserved and (self._unobserved[0][1].is_answered or not only_answered):
            slots, output = self._unobserved.popleft()
            assert self.sampler is not None
            self.sampler.observe(slots, output.result().token_ids)

    def _advance_host(self, plan: StepPlan) -> None:
        positions = self.tables.host_position
        if plan.decode_slots:
            positions[self._rows.host] += 1
        for row in plan.prefill_rows:
            positions[row.slot] = row.start + row.length

    # prompt log-probabilities

    def _asks_prompt_logprobs(self, plan: StepPlan) -> bool:
        asked = self.tables.num_prompt_logprobs
        return bool(asked) and any(row.slot in asked for row in plan.prefill_rows)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> dict[int, list[TokenLogprobs]] | None:
        """Score the prompt tokens that follow each computed one, for the rows that asked. Every rank takes part."""
        if not self._asks_prompt_logprobs(plan):
            return None
        asked = self.tables.num_prompt_logprobs
        scores: dict[int, list[TokenLogprobs]] = {}
        offset = len(plan.decode_slots)
        for row in plan.prefill_rows:
            if row.slot in asked:
                targets = to_device(
                    self.tables.prompts[row.slot][row.start + 1 : row.start + row.length + 1], torch.int64, self.device
                )
                entries = scores.setdefault(row.slot, [])
                for first in range(0, len(targets), PROMPT_LOGPROB_ROWS):
                    wanted = targets[first : first + PROMPT_LOGPROB_ROWS]
                    rows = hidden[offset + first : offset + first + len(wanted)]
                    logits = self.model.compute_logits(rows)
                    if logits is not None:
                        entries.extend(prompt_logprobs(logits, wanted, asked[row.slot]))
            offset += row.length
        return scores
