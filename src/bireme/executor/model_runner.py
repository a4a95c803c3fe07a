"""One rank's half of a step: plan → tensors → model → sampler → ``StepOutput``.

A request's home is its state slot. What a decode row needs (last token, position, block table, sampling state) lies in
per-slot device tables, so that a step's inputs are gathered by slot number and nothing is rebuilt per request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from bireme.cache.capacity import available_memory, plan_capacity
from bireme.cache.kv_pool import KvPool
from bireme.cache.state_pool import StatePool
from bireme.checkpoint.loader import load_rank_weights, random_rank_weights
from bireme.checkpoint.progress import progress_bar
from bireme.config import CacheCapacity, EngineConfig
from bireme.distributed import TpGroup
from bireme.layers.batch import Batch, PrefillBatch
from bireme.models.qwen3_5 import Qwen3_5ForCausalLM
from bireme.sampling.logprobs import prompt_logprobs
from bireme.sampling.params import SlotSampling
from bireme.sampling.sampler import Sampler
from bireme.types import NewRequest, PrefillRow, StepOutput, StepPlan, TokenLogprobs

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose logits are held at once: bounds [rows, vocab] float32 when prompt logprobs are asked for."""


RANGE_SLACK = 1.5
"""Decode rows take a view of a range of slots, idle ones included, while it is at most this many times their number."""


def covering_range(slots: list[int]) -> tuple[tuple[int, int] | None, bool]:
    """(first, last + 1) of the slots where a view over them is cheaper than a gathered copy, and whether the slots are
    exactly that range in ascending order. (None, True) where there is no such range."""
    if not slots or 0 in slots:
        return None, True
    first, end = min(slots), max(slots) + 1
    if end - first > RANGE_SLACK * len(slots):
        return None, True
    return (first, end), slots == list(range(first, end))


class DecodeRows:
    """The slots of a step's decode rows, in the forms in which they are used; kept while the rows stay the same.

    Attributes:
        key: the plan's list.
        slots: [D] int64 on the device.
        view: the rows as a slice, where they are a range of slots in order: per-slot tables are then read and written
            through views. None otherwise.
        host: what picks the rows from a numpy table.
        covering, in_order: see ``covering_range``.
    """

    def __init__(self, key: list[int], device: torch.device) -> None:
        self.key = key
        self.slots = torch.tensor(key, dtype=torch.int64, device=device)
        self.covering, self.in_order = covering_range(key)
        self.view = slice(*self.covering) if self.covering is not None and self.in_order else None
        self.host: slice | np.ndarray = np.array(key, dtype=np.int64) if self.view is None else self.view

    def take(self, table: Tensor) -> Tensor:
        """The rows of a per-slot table (maybe a view of it)."""
        return table.index_select(0, self.slots) if self.view is None else table[self.view]

    def put(self, table: Tensor, values: Tensor) -> None:
        """Write the rows of a per-slot table."""
        if self.view is None:
            table.index_copy_(0, self.slots, values)
        else:
            table[self.view].copy_(values)


class SlotTables:
    """Per-slot device tables (row 0 belongs to padding rows) and the few host mirrors that bound kernel launches.

    Attributes:
        last_token: [S + 1] int64, the token that a decode row feeds next.
        position: [S + 1] int64, where that token goes; equals the request's computed tokens.
        num_prompt: [S + 1] int64.
        block_table: [S + 1, max_blocks] int32; unused entries are block 0.
        host_position: the same positions as numpy, so that the longest context is known without a device sync.
        prompts: each slot's prompt ids on the host.
        num_prompt_logprobs: slots that asked for prompt log-probabilities, with their k.
    """

    def __init__(self, capacity: CacheCapacity, device: torch.device) -> None:
        rows = capacity.num_slots + 1
        max_blocks = -(-capacity.max_model_len // capacity.block_size)
        self.block_size = capacity.block_size
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.num_prompt = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.host_position = np.zeros(rows, dtype=np.int64)
        self.prompts: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * rows
        self.num_prompt_logprobs: dict[int, int] = {}

    def install(self, new: NewRequest) -> None:
        """Make ``new`` the owner of its slot; everything that a former owner left is overwritten."""
        slot = new.slot
        blocks = torch.zeros(self.block_table.shape[1], dtype=torch.int32)
        blocks[: len(new.block_table)] = torch.tensor(new.block_table, dtype=torch.int32)
        self.block_table[slot] = blocks.to(self.block_table.device)
        self.num_prompt[slot] = len(new.prompt_token_ids)
        self.prompts[slot] = torch.tensor(new.prompt_token_ids, dtype=torch.int64)
        if new.params.prompt_logprobs is None:
            self.num_prompt_logprobs.pop(slot, None)
        else:
            self.num_prompt_logprobs[slot] = new.params.prompt_logprobs


class ModelRunner:
    """Owns this rank's weights, pools and tables; runs plans. It decides nothing: rows and their order are the plan's.

    Args:
        config: the engine's configuration, the same on every rank.
        group: this rank's tensor-parallel group.
        device: where weights and state live.
    """

    def __init__(self, config: EngineConfig, group: TpGroup, device: torch.device) -> None:
        self.config = config
        self.group = group
        self.device = device
        self.dtype = getattr(torch, config.dtype)
        self.model = Qwen3_5ForCausalLM(config.model, group, dtype=self.dtype, device=device)
        self._rows = DecodeRows([], device)

    def load(self) -> CacheCapacity:
        """Read this rank's weights; return what its memory then allows.

        Raises:
            CheckpointError: a tensor is missing, extra, misshapen or truncated.
            ConfigError: not even one request fits beside the weights.
        """
        is_first = self.group.rank == 0
        with progress_bar("loading weights", enabled=self.config.show_progress and is_first) as progress:
            self.model.load_weights(self._weights(progress))
        device_memory = torch.cuda.mem_get_info(self.device) if self.device.type == "cuda" else None
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
        """Allocate state, KV and tables for the capacity that all ranks agreed on."""
        model, size = self.config.model, self.group.size
        self.kv = KvPool(model, size, capacity, dtype=self.dtype, device=self.device)
        self.state = StatePool(model, size, capacity, dtype=self.dtype, device=self.device)
        self.tables = SlotTables(capacity, self.device)
        self.sampler: Sampler | None = None
        if self.group.rank == 0:
            self.slot_sampling = SlotSampling(
                capacity.num_slots, model.vocab_size, self.device, self.config.masked_token_ranges
            )
            self.sampler = Sampler(self.slot_sampling)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput | None:
        """Run one plan. Returns rank 0's output, None on the other ranks."""
        started = time.perf_counter()
        for new in plan.new_requests:
            self.tables.install(new)
            if self.sampler is not None:
                self.slot_sampling.install(new)

        token_ids, batch = self._build_inputs(plan)
        hidden = self.model.forward(token_ids, batch, self.kv, self.state)
        prompt_scores = self._prompt_logprobs(plan, hidden)
        output = self._sample(plan, batch, hidden)
        if output is None:
            return None
        output.prompt_logprobs = prompt_scores
        output.model_seconds = time.perf_counter() - started
        return output

    def close(self) -> None:
        """Nothing outlives the process; the group is closed by whoever made it."""

    # plan → tensors

    def _build_inputs(self, plan: StepPlan) -> tuple[Tensor, Batch]:
        tables = self.tables
        if plan.decode_slots != self._rows.key:
            self._rows = DecodeRows(plan.decode_slots, self.device)
        rows = self._rows
        num_decode = len(plan.decode_slots)
        longest = int(tables.host_position[rows.host].max()) + 1 if num_decode else 0
        positions = rows.take(tables.position)
        token_ids = rows.take(tables.last_token)
        block_tables = rows.take(tables.block_table)[:, : max(1, -(-longest // tables.block_size))]
        blocks = positions // tables.block_size
        kv_indices = self._kv_indices(block_tables.gather(1, blocks.unsqueeze(1)).squeeze(1), blocks, positions)
        context_lens = (positions + 1).to(torch.int32)
        prefill: PrefillBatch | None = None
        if plan.prefill_rows:
            prefill, chunk_ids, chunk_positions, chunk_kv = self._build_prefill(plan.prefill_rows)
            token_ids = torch.cat([token_ids, chunk_ids])
            positions = torch.cat([positions, chunk_positions])
            kv_indices = torch.cat([kv_indices, chunk_kv])
        batch = Batch(
            positions=positions,
            kv_indices=kv_indices,
            num_decode=num_decode,
            decode_slots=rows.slots,
            decode_block_tables=block_tables,
            decode_context_lens=context_lens,
            max_decode_context=longest,
            decode_slot_range=rows.covering,
            decode_in_order=rows.in_order,
            prefill=prefill,
        )
        return token_ids, batch

    def _kv_indices(self, block_ids: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        """``block_id · block_size + offset`` of positions that lie in the ``blocks``-th block of their rows."""
        return torch.add(positions, block_ids - blocks, alpha=self.tables.block_size)

    def _build_prefill(self, rows: list[PrefillRow]) -> tuple[PrefillBatch, Tensor, Tensor, Tensor]:
        """Pack the chunks: (context, token ids, positions, KV indices), all [tokens of the chunks]."""
        tables = self.tables
        lengths = np.array([row.length for row in rows])
        starts = np.array([row.start for row in rows])
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        row_of_token = np.repeat(np.arange(len(rows)), lengths)
        positions_host = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, lengths)
        token_ids = torch.cat([tables.prompts[row.slot][row.start : row.start + row.length] for row in rows])
        num_blocks = -(-int((starts + lengths).max()) // tables.block_size)
        slots = torch.tensor([row.slot for row in rows], dtype=torch.int64).to(self.device)
        block_tables = tables.block_table[slots, :num_blocks]
        positions = torch.from_numpy(positions_host).to(self.device)
        blocks = positions // tables.block_size
        block_ids = block_tables[torch.from_numpy(row_of_token).to(self.device), blocks]
        prefill = PrefillBatch(
            cu_seqlens=torch.from_numpy(offsets.astype(np.int32)).to(self.device),
            slots=slots,
            block_tables=block_tables,
            seq_lens=lengths.tolist(),
            starts=starts.tolist(),
        )
        return prefill, token_ids.to(self.device), positions, self._kv_indices(block_ids, blocks, positions)

    # hidden rows → tokens

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> StepOutput | None:
        tables, rows, num_decode = self.tables, self._rows, batch.num_decode
        finals = [row for row in plan.prefill_rows if row.is_last]
        if not num_decode and not finals:
            return StepOutput(seq=plan.seq, token_ids=[]) if self.sampler is not None else None
        final_slots = [row.slot for row in finals]
        if plan.prefill_rows:
            hidden = torch.cat([hidden[:num_decode], self._last_hidden(plan, batch, hidden)])
        next_positions = batch.positions[:num_decode] + 1
        num_prompt = rows.take(tables.num_prompt)
        if finals:
            # A prompt's last chunk ends where its first output token goes.
            slots = torch.tensor(final_slots, dtype=torch.int64).to(self.device)
            num_prompt = torch.cat([num_prompt, tables.num_prompt.index_select(0, slots)])
            next_positions = torch.cat([next_positions, num_prompt[num_decode:]])

        logits = self.model.compute_logits(hidden)
        logprobs: list[TokenLogprobs | None] | None = None
        if self.sampler is not None:
            assert logits is not None
            sampled = self.sampler(logits, plan.decode_slots + final_slots, next_positions - num_prompt)
            token_ids = sampled.token_ids
            logprobs = sampled.logprobs()
        else:
            token_ids = torch.empty(num_decode + len(finals), dtype=torch.int64, device=self.device)
        token_ids = self.group.broadcast(token_ids, src=0)
        for table, values in ((tables.last_token, token_ids), (tables.position, next_positions)):
            if num_decode:
                rows.put(table, values[:num_decode])
            if finals:
                table.index_copy_(0, slots, values[num_decode:])
        if num_decode:
            tables.host_position[rows.host] += 1
        for row in finals:
            tables.host_position[row.slot] = row.start + row.length
        if self.sampler is None:
            return None
        return StepOutput(seq=plan.seq, token_ids=token_ids.tolist(), logprobs=logprobs)

    def _last_hidden(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> Tensor:
        """The hidden rows of the prompts' last tokens, for the prefill rows that sample."""
        assert batch.prefill is not None
        ends = np.cumsum(batch.prefill.seq_lens) + (batch.num_decode - 1)
        chosen = ends[[row.is_last for row in plan.prefill_rows]]
        return hidden.index_select(0, torch.from_numpy(chosen).to(self.device))

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> dict[int, list[TokenLogprobs]] | None:
        """Score the prompt tokens that follow each computed one, for the rows that asked. Every rank takes part."""
        asked = self.tables.num_prompt_logprobs
        if not asked or not any(row.slot in asked for row in plan.prefill_rows):
            return None
        scores: dict[int, list[TokenLogprobs]] = {}
        offset = len(plan.decode_slots)
        for row in plan.prefill_rows:
            if row.slot in asked:
                targets = self.tables.prompts[row.slot][row.start + 1 : row.start + row.length + 1].to(self.device)
                entries = scores.setdefault(row.slot, [])
                for first in range(0, len(targets), PROMPT_LOGPROB_ROWS):
                    wanted = targets[first : first + PROMPT_LOGPROB_ROWS]
                    rows = hidden[offset + first : offset + first + len(wanted)]
                    logits = self.model.compute_logits(rows)
                    if logits is not None:
                        entries.extend(prompt_logprobs(logits, wanted, asked[row.slot]))
            offset += row.length
        return scores
