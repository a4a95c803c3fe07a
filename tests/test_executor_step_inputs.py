"""What a rank builds for a step: packed prefill rows, shapes of graphs, rows picked from per-slot tables."""

import numpy as np
import pytest
import torch

from bireme.config import CacheCapacity
from bireme.executor.graphs import DECODE_ROWS, Shape, shapes_for, smallest_shape
from bireme.executor.prefill_inputs import PrefillInputs, PrefillSizes, pack
from bireme.executor.slot_tables import DecodeRows, SlotTables, covering_range
from bireme.types import NewRequest, PrefillRow, SamplingParams

CPU = torch.device("cpu")
BLOCK = 64


def tables_with(prompts: dict[int, int]) -> SlotTables:
    """Slots with prompts of given lengths; slot s has the blocks 10·s, 10·s + 1, … and the tokens 1000·s + i."""
    capacity = CacheCapacity(
        num_slots=4, num_blocks=50, block_size=BLOCK, max_model_len=512, bytes_per_slot=1, bytes_per_block=1
    )
    tables = SlotTables(capacity, CPU)
    for slot, length in prompts.items():
        tables.install(
            NewRequest(
                slot=slot,
                prompt_token_ids=[1000 * slot + i for i in range(length)],
                block_table=[10 * slot + i for i in range(8)],
                params=SamplingParams(temperature=0.0),
                suppressed_token_ids=[],
            )
        )
    return tables


def packed(rows, tables, sizes, *, num_decode=0, first_token=0):
    buffer = pack(rows, tables, num_decode=num_decode, first_token=first_token, sizes=sizes)
    assert buffer.nbytes == sizes.num_bytes
    return PrefillInputs.of(torch.from_numpy(buffer), sizes)


def test_rows_are_packed_one_after_another_with_their_places_in_the_cache():
    tables = tables_with({1: 200, 3: 5})
    rows = [PrefillRow(1, 64, 70, False), PrefillRow(3, 0, 5, True)]
    inputs = packed(rows, tables, PrefillSizes.exact(rows, 2), num_decode=2, first_token=2)
    assert inputs.token_ids.tolist() == [*range(1064, 1134), *range(3000, 3005)]
    assert inputs.positions.tolist() == [*range(64, 134), *range(5)]
    in_row_1 = [11 * BLOCK + i for i in range(64)] + [12 * BLOCK + i for i in range(6)]
    assert inputs.kv_indices.tolist() == in_row_1 + [30 * BLOCK + i for i in range(5)]
    assert inputs.slots.tolist() == [1, 3]
    assert inputs.cu_seqlens.tolist() == [0, 70, 75]
    assert inputs.row_starts.tolist() == [64, 0]
    assert inputs.chunks.tolist() == [[0, 0, 64, 64], [0, 64, 6, 128], [1, 70, 5, 0]]
    # Two decode rows come first among the hidden rows; only the second prompt ends here.
    assert inputs.sampled.tolist() == [0, 1, 2 + 74]
    assert inputs.final_slots.tolist()[:1] == [3]


def test_tokens_that_pad_a_graph_are_a_row_of_slot_0_in_block_0():
    tables = tables_with({2: 20})
    rows = [PrefillRow(2, 0, 20, True)]
    sizes = PrefillSizes.bounded(32, 3, 16)
    inputs = packed(rows, tables, sizes, num_decode=5, first_token=16)
    assert inputs.token_ids.tolist() == [*range(2000, 2020), *[0] * 12]
    assert inputs.kv_indices.tolist()[20:] == list(range(12))
    assert inputs.slots.tolist() == [2, 0, 0, 0]
    assert inputs.cu_seqlens.tolist() == [0, 20, 32, 32, 32]
    assert inputs.chunks[:2].tolist() == [[0, 0, 20, 0], [1, 20, 12, 0]]
    assert int(inputs.chunks[2:, 2].sum()) == 0
    assert inputs.sampled.tolist()[:6] == [0, 1, 2, 3, 4, 16 + 19]
    assert inputs.sampled.tolist()[6:] == [0] * (len(inputs.sampled) - 6)


def test_a_buffer_of_bounded_sizes_holds_the_worst_cut_into_rows():
    lengths = [1] * 7 + [25]
    tables = tables_with({1: 400, 2: 400})
    rows = [PrefillRow(1 + index % 2, 0, length, True) for index, length in enumerate(lengths)]
    inputs = packed(rows, tables, PrefillSizes.bounded(32, 8, 0))
    assert inputs.chunks[:8, 2].tolist() == lengths
    assert inputs.sampled.tolist() == [0, 1, 2, 3, 4, 5, 6, 31]


def test_shapes_cover_every_number_of_rows_up_to_the_limit():
    shapes = shapes_for(20, 8192)
    decode = sorted(shape.num_decode for shape in shapes if not shape.num_tokens)
    assert decode == [1, 2, 4, 8, 12, 16, 24]
    sizes = [shape.num_decode + shape.num_tokens for shape in shapes]
    assert sizes == sorted(sizes, reverse=True)
    for rows in range(1, 21):
        found = smallest_shape(shapes, rows, 0, 0)
        assert found is not None and found.num_decode == min(count for count in decode if count >= rows)


@pytest.mark.parametrize("limit", [1, 7, 64, 100, 512, 4000])
def test_the_largest_decode_shape_holds_the_limit_unless_the_list_ends(limit):
    largest = max(shape.num_decode for shape in shapes_for(limit, 16))
    assert largest >= min(limit, DECODE_ROWS[-1])


def test_a_step_takes_the_smallest_shape_that_holds_it_or_none():
    shapes = shapes_for(64, 512)
    assert smallest_shape(shapes, 0, 100, 2) == Shape(0, 128)
    assert smallest_shape(shapes, 3, 100, 2) == Shape(16, 128)
    assert smallest_shape(shapes, 17, 1, 1) == Shape(64, 16)
    assert smallest_shape(shapes, 3, 513, 1) is None
    assert smallest_shape(shapes, 65, 0, 0) is None
    assert smallest_shape(shapes, 0, 100, 9) is None


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([], (None, True)),
        ([1, 2, 3], ((1, 4), True)),
        ([3, 1, 2], ((1, 4), False)),
        ([1, 2, 4], ((1, 5), False)),
        ([1, 9], (None, True)),
        ([0, 1, 2], (None, True)),
    ],
)
def test_slots_close_together_are_read_through_a_range(slots, expected):
    assert covering_range(slots) == expected


@pytest.mark.parametrize("slots", [[1, 2, 3], [3, 1], [2], [0, 0, 3]])
def test_rows_are_taken_from_and_put_into_their_own_slots(slots):
    table = torch.arange(5) * 10
    rows = DecodeRows(slots, CPU)
    assert rows.take(table).tolist() == [10 * slot for slot in slots]
    assert np.arange(5)[rows.host].tolist() == slots
    rows.put(table, torch.tensor(slots) + 7)
    assert table.tolist() == [slot + 7 if slot in slots else 10 * slot for slot in range(5)]


def test_installing_a_request_leaves_nothing_of_the_slots_former_owner():
    tables = tables_with({1: 200})
    tables.install(
        NewRequest(
            slot=1,
            prompt_token_ids=[5, 6],
            block_table=[7],
            params=SamplingParams(temperature=0.0),
            suppressed_token_ids=[],
        )
    )
    assert tables.block_table[1].tolist() == [7] + [0] * 7
    assert tables.host_block_table[1].tolist() == [7] + [0] * 7
    assert tables.prompts[1].tolist() == [5, 6] and int(tables.num_prompt[1]) == 2
