"""Which KV blocks and which state slots are in use: numbers only, no tensors."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable


class BlockAllocator:
    """Hands out KV blocks 1..num_blocks (block 0 belongs to padding rows).

    The free list is in the order in which blocks were given back, and the one free for longest is handed out first: a
    freed block keeps its content for as long as possible, which is what a prefix cache over the free list needs.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._in_use = bytearray(num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._in_use.count(1)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks out of the free list.

        Raises:
            ValueError: fewer are free; admission asks first, so this is a mistake of the caller.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._in_use[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back, in the order given.

        Raises:
            ValueError: a block that is not in use (given back twice, or never handed out).
        """
        for block in blocks:
            if not 1 <= block <= self.num_blocks or not self._in_use[block]:
                raise ValueError(f"block {block} was given back but is not in use")
            self._in_use[block] = 0
            self._free.append(block)


class SlotAllocator:
    """Hands out state slots 1..num_slots (slot 0 belongs to padding rows), the smallest free one first.

    Small numbers first keep the slots of the running requests close to one contiguous range, which lets a kernel take
    a view of the state instead of a gathered copy.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(1, num_slots + 1))
        self._in_use = bytearray(num_slots + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._in_use.count(1)

    def allocate(self) -> int:
        """Take the smallest free slot.

        Raises:
            ValueError: none is free; admission asks first, so this is a mistake of the caller.
        """
        if not self._free:
            raise ValueError(f"a slot was asked for, none of {self.num_slots} is free")
        slot = heapq.heappop(self._free)
        self._in_use[slot] = 1
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            ValueError: the slot is not in use.
        """
        if not 1 <= slot <= self.num_slots or not self._in_use[slot]:
            raise ValueError(f"slot {slot} was given back but is not in use")
        self._in_use[slot] = 0
        heapq.heappush(self._free, slot)
