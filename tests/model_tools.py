"""Small things that the model's tests share: geometries, loading, a driver that runs rows, a group of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bireme.cache.kv_pool import KvPool
from bireme.cache.state_pool import StatePool
from bireme.checkpoint.loader import load_rank_weights
from bireme.config import CacheCapacity, ModelConfig
from bireme.distributed import NullGroup, TpGroup
from bireme.dummy import write_dummy_checkpoint
from bireme.layers.batch import Batch, PrefillBatch
from bireme.models.qwen3_5 import Qwen3_5ForCausalLM

TOLERANCE = 1e-4

_SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "tokenizer": False,
}

GEOMETRIES: dict[str, dict[str, Any]] = {
    "kv1_group2_ratio1_tied_4_layers": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
    },
    "kv2_group6_ratio3_untied_6_layers": {
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 24,
        "num_hidden_layers": 6,
        "tie_word_embeddings": False,
    },
    "kv4_group1_ratio2_untied_9_layers": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "num_hidden_layers": 9,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
    },
    "kv2_group4_ratio2_tied_7_layers": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "num_hidden_layers": 7,
        "tie_word_embeddings": True,
        "vocab_size": 301,
    },
}


def write_model(folder: Path, geometry: str, *, seed: int = 0) -> ModelConfig:
    """A random checkpoint whose blocks and head are damped.

    Undamped, such deep narrow random models amplify float32 rounding to 5e-4 in the logits, in the oracle (against its
    own float64 run) as in Bireme, so that no bound of 1e-4 could be asked of either.
    """
    config = write_dummy_checkpoint(folder, seed=seed, **(_SMALL | GEOMETRIES[geometry]))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "lm_head.weight")):
            tensor.mul_(0.3)
    save_file(tensors, path, metadata={"format": "pt"})
    return config


def load_model(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype = torch.float32, group: TpGroup | None = None
) -> Qwen3_5ForCausalLM:
    group = group or NullGroup()
    model = Qwen3_5ForCausalLM(config, group, dtype=dtype, device="cpu")
    model.load_weights(
        load_rank_weights(folder, config, tp_rank=group.rank, tp_size=group.size, dtype=dtype, device="cpu")
    )
    return model


class Driver:
    """Runs rows by slot, as the model runner does, with blocks dealt in random order."""

    def __init__(
        self,
        model: Qwen3_5ForCausalLM,
        *,
        num_slots: int = 24,
        num_blocks: int = 64,
        block_size: int = 64,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.block_size = block_size
        capacity = CacheCapacity(
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=num_blocks * block_size,
            bytes_per_slot=0,
            bytes_per_block=0,
        )
        size = model.group.size
        self.kv = KvPool(model.config, size, capacity, dtype=model.dtype, device=torch.device("cpu"))
        self.state = StatePool(model.config, size, capacity, dtype=model.dtype, device=torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed)
        self.free: list[int] = (torch.randperm(num_blocks, generator=generator) + 1).tolist()
        self.tables: dict[int, list[int]] = {0: [0]}
        self.lengths: dict[int, int] = {0: 0}

    def fill_with_nan(self) -> None:
        """Everything that nobody owns yet (and the padding slot and block) becomes NaN."""
        self.kv.k[:, [0, *self.free]] = torch.nan
        self.kv.v[:, [0, *self.free]] = torch.nan
        unused = [slot for slot in range(self.state.conv.shape[1]) if slot == 0 or slot not in self.tables]
        self.state.recurrent[:, unused] = torch.nan
        self.state.conv[:, unused] = torch.nan

    def open(self, slot: int, max_tokens: int) -> None:
        count = -(-max_tokens // self.block_size)
        self.tables[slot] = [self.free.pop() for _ in range(count)]
        self.lengths[slot] = 0

    def close(self, slot: int) -> None:
        self.free.extend(self.tables.pop(slot))
        del self.lengths[slot]

    @torch.inference_mode()
    def step(
        self,
        decode: list[tuple[int, int]] | None = None,
        prefill: list[tuple[int, list[int]]] | None = None,
        *,
        padding: int = 0,
        use_range: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run one step: (logits of the decode rows, logits of every position of each prefill row).

        Args:
            decode: (slot, token) pairs.
            prefill: (slot, chunk) pairs.
            padding: decode rows on slot 0 to add behind the real ones.
            use_range: give the kernels the range of the decode slots (where they are distinct).
        """
        decode, prefill = decode or [], prefill or []
        rows = decode + [(0, 0)] * padding
        slots = [slot for slot, _ in rows]
        positions = [self.lengths[slot] for slot in slots]
        tokens = [token for _, token in rows]
        kv_indices = [self._kv_index(slot, position) for slot, position in zip(slots, positions, strict=True)]
        contexts = [position + 1 for position in positions]
        for slot, chunk in prefill:
            start = self.lengths[slot]
            tokens += chunk
            positions += range(start, start + len(chunk))
            kv_indices += [self._kv_index(slot, start + offset) for offset in range(len(chunk))]
        slot_range = None
        if use_range and slots and len(set(slots)) == len(slots):
            slot_range = (min(slots), max(slots) + 1)
        batch = Batch(
            positions=torch.tensor(positions),
            kv_indices=torch.tensor(kv_indices),
            num_decode=len(rows),
            decode_slots=torch.tensor(slots, dtype=torch.int64),
            decode_block_tables=self._block_tables(slots, contexts),
            decode_context_lens=torch.tensor(contexts, dtype=torch.int32),
            max_decode_context=max(contexts, default=0),
            decode_slot_range=slot_range,
            decode_in_order=slot_range is not None and slots == list(range(*slot_range)),
            prefill=self._prefill_batch(prefill) if prefill else None,
        )
        hidden = self.model.forward(torch.tensor(tokens), batch, self.kv, self.state)
        logits = self.model.compute_logits(hidden)
        for slot, _ in decode:
            self.lengths[slot] += 1
        for slot, chunk in prefill:
            self.lengths[slot] += len(chunk)
        if logits is None:
            return torch.empty(0), []
        pieces = logits[len(rows) :].split([len(chunk) for _, chunk in prefill]) if prefill else ()
        return logits[: len(decode)].clone(), [piece.clone() for piece in pieces]

    def _prefill_batch(self, rows: list[tuple[int, list[int]]]) -> PrefillBatch:
        seq_lens = [len(chunk) for _, chunk in rows]
        starts = [self.lengths[slot] for slot, _ in rows]
        ends = [start + length for start, length in zip(starts, seq_lens, strict=True)]
        offsets = torch.tensor([0, *seq_lens]).cumsum(0).tolist()
        chunks = [
            (row, offsets[row] + first, min(64, length - first), starts[row] + first)
            for row, length in enumerate(seq_lens)
            for first in range(0, length, 64)
        ]
        return PrefillBatch(
            cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
            row_starts=torch.tensor(starts, dtype=torch.int32),
            chunks=torch.tensor(chunks, dtype=torch.int32),
            slots=torch.tensor([slot for slot, _ in rows]),
            block_tables=self._block_tables([slot for slot, _ in rows], ends),
            seq_lens=seq_lens,
            starts=starts,
        )

    def _block_tables(self, slots: list[int], contexts: list[int]) -> Tensor:
        width = max(1, -(-max(contexts, default=1) // self.block_size))
        tables = torch.zeros(len(slots), width, dtype=torch.int32)
        for row, slot in enumerate(slots):
            blocks = self.tables[slot][:width]
            tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return tables

    def _kv_index(self, slot: int, position: int) -> int:
        return self.tables[slot][position // self.block_size] * self.block_size + position % self.block_size


class ThreadGroup(TpGroup):
    """Ranks as threads of one process: collectives meet at a barrier, sums run in rank order on every rank."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Tensor]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._board[self.rank] = x
        self._barrier.wait(timeout=60)
        everyone = [piece.clone() for piece in self._board]
        self._barrier.wait(timeout=60)
        return everyone

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return self._exchange(x)[src]

    def barrier(self) -> None:
        self._barrier.wait(timeout=60)

    def close(self) -> None:
        """Threads share nothing that outlives them."""


def run_ranks(size: int, work: Callable[[TpGroup], Any]) -> list[Any]:
    """Run ``work(group)`` on ``size`` threads that form a group; results by rank. The first failure is raised here."""
    barrier = threading.Barrier(size)
    board = [torch.empty(0)] * size
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, size, barrier, board))
        except BaseException as failure:
            failures.append(failure)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
