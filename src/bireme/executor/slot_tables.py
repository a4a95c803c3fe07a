"""What a rank keeps by state slot beside the model's own state, and the decode rows of a step picked from it.

A request's home on a rank is its slot. What a decode row needs (last token, position, block table) lies in per-slot
device tables, so that a step's inputs are gathered by slot number and nothing is rebuilt per request.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bireme.config import CacheCapacity
from bireme.sampling.params import to_device
from bireme.types import NewRequest

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
        self.slots = to_device(key, torch.int64, device)
        self.covering, self.in_order = covering_range(key)
        self.view = slice(*self.covering) if self.covering is not None and self.in_order else None
        self.host: slice | np.ndarray = np.array(key, dtype=np.int64) if self.view is None else self.view

    @classmethod
    def gathered(cls, slots: Tensor) -> DecodeRows:
        """Rows whose slots only the device knows (a graph's input): always gathered, and not found on the host."""
        rows = cls([], slots.device)
        rows.slots = slots
        return rows

    def __len__(self) -> int:
        return len(self.slots)

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
    """Per-slot tables on the device (row 0 belongs to padding rows), and on the host what step inputs are built from.

    Attributes:
        last_token: [S + 1] int64, the token that a decode row feeds next.
        position: [S + 1] int64, where that token goes; equals the request's computed tokens.
        num_prompt: [S + 1] int64.
        block_table: [S + 1, max_blocks] int32; unused entries are block 0.
        host_position, host_block_table: the same on the host, as numpy arrays.
        prompts: each slot's prompt ids, [n] int64 on the host.
        num_prompt_logprobs: slots that asked for prompt log-probabilities, with their k.
    """

    def __init__(self, capacity: CacheCapacity, device: torch.device) -> None:
        rows = capacity.num_slots + 1
        max_blocks = -(-capacity.max_model_len // capacity.block_size)
        self.block_size = capacity.block_size
        self.device = device
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.num_prompt = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.host_position = np.zeros(rows, dtype=np.int64)
        self.host_block_table = np.zeros((rows, max_blocks), dtype=np.int32)
        self.prompts: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * rows
        self.num_prompt_logprobs: dict[int, int] = {}

    @property
    def num_table_tokens(self) -> int:
        """Tokens that a row of the block table can address."""
        return self.block_table.shape[1] * self.block_size

    def install(self, new: NewRequest) -> None:
        """Make ``new`` the owner of its slot; everything that a former owner left is overwritten."""
        slot = new.slot
        blocks = self.host_block_table[slot]
        blocks[:] = 0
        blocks[: len(new.block_table)] = new.block_table
        self.block_table[slot].copy_(to_device(blocks, torch.int32, self.device))
        self.prompts[slot] = np.array(new.prompt_token_ids, dtype=np.int64)
        self.num_prompt[slot].fill_(len(new.prompt_token_ids))
        if new.params.prompt_logprobs is None:
            self.num_prompt_logprobs.pop(slot, None)
        else:
            self.num_prompt_logprobs[slot] = new.params.prompt_logprobs
