"""The books: block and slot allocators, and the ledger of terminal events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.cache.block_allocator import BlockAllocator, SlotAllocator
from bireme.scheduler.ledger import Ledger, LedgerError
from bireme.types import FinishReason, RequestOutput


@given(st.integers(1, 60), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=80))
def test_blocks_are_free_or_held_once_under_random_operations(num_blocks, operations):
    blocks = BlockAllocator(num_blocks)
    held: list[list[int]] = []
    for is_allocation, count in operations:
        if is_allocation and count <= blocks.num_free:
            held.append(blocks.allocate(count))
        elif not is_allocation and held:
            blocks.free(held.pop(count % len(held)))
        in_use = [block for table in held for block in table]
        assert len(set(in_use)) == len(in_use) == blocks.num_used
        assert all(1 <= block <= num_blocks for block in in_use)
        assert blocks.num_free + blocks.num_used == num_blocks
    for table in held:
        blocks.free(table)
    assert blocks.num_free == num_blocks


def test_the_block_that_is_free_for_longest_is_handed_out_first():
    blocks = BlockAllocator(4)
    first, second = blocks.allocate(2), blocks.allocate(2)
    blocks.free(second)
    blocks.free(first)
    assert blocks.allocate(4) == second + first


def test_block_0_and_slot_0_are_never_handed_out():
    assert BlockAllocator(3).allocate(3) == [1, 2, 3]
    slots = SlotAllocator(3)
    assert [slots.allocate() for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("block", [0, 1, 3, 99, -1])
def test_a_block_that_is_not_in_use_cannot_be_given_back(block):
    blocks = BlockAllocator(3)
    blocks.free(blocks.allocate(1))
    with pytest.raises(ValueError, match=f"block {block} "):
        blocks.free([block])
    assert blocks.num_free == 3


def test_more_blocks_or_slots_than_are_free_are_an_error_that_takes_none():
    blocks, slots = BlockAllocator(3), SlotAllocator(1)
    with pytest.raises(ValueError, match="4 blocks asked for, 3 of 3"):
        blocks.allocate(4)
    slots.allocate()
    with pytest.raises(ValueError, match="none of 1 is free"):
        slots.allocate()
    assert blocks.num_free == 3


def test_the_smallest_free_slot_is_handed_out_first():
    slots = SlotAllocator(5)
    assert [slots.allocate() for _ in range(5)] == [1, 2, 3, 4, 5]
    for slot in (4, 2, 5):
        slots.free(slot)
    assert [slots.allocate() for _ in range(3)] == [2, 4, 5]


@pytest.mark.parametrize("slot", [0, 2, 9])
def test_a_slot_that_is_not_in_use_cannot_be_given_back(slot):
    slots = SlotAllocator(3)
    slots.allocate()
    with pytest.raises(ValueError, match=f"slot {slot} "):
        slots.free(slot)


def token(request_id: str, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id, [1], reason)


def test_a_request_has_outputs_until_its_terminal_one():
    ledger = Ledger()
    ledger.open("a")
    ledger.record([token("a"), token("a", FinishReason.STOP)])
    assert "a" not in ledger
    ledger.assert_settled()
    ledger.open("a")
    assert ledger.open_ids == ["a"]


def test_a_second_terminal_output_is_an_error():
    ledger = Ledger()
    ledger.open("a")
    ledger.record([token("a", FinishReason.STOP)])
    with pytest.raises(LedgerError, match="'a' has an output after its end"):
        ledger.record([token("a", FinishReason.ABORT)])


def test_an_output_after_the_terminal_one_is_an_error():
    ledger = Ledger()
    ledger.open("a")
    with pytest.raises(LedgerError, match="after its end"):
        ledger.record([token("a", FinishReason.LENGTH), token("a")])


def test_a_missing_terminal_output_is_an_error():
    ledger = Ledger()
    ledger.open("a")
    ledger.record([token("a")])
    with pytest.raises(LedgerError, match="never ended"):
        ledger.assert_settled()


def test_an_id_cannot_be_opened_twice():
    ledger = Ledger()
    ledger.open("a")
    with pytest.raises(LedgerError, match="opened twice"):
        ledger.open("a")
