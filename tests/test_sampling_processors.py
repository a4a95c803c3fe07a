"""Processors and filters against a reading of their definitions in plain Python."""

import math

import numpy as np
import pytest
import torch

from bireme.sampling import processors
from bireme.sampling.order import argmax_rows, largest, order_keys
from bireme.sampling.processors import PROMPT_FLAG, apply_penalties, suppress, top_k_top_p, weights_of


def in_order(row):
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [7, 512, 50001])
def test_argmax_takes_the_smallest_id_among_equals(vocab_size, dtype):
    values = torch.randint(0, 3, (5, vocab_size), generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = [int((row == row.max()).nonzero()[0, 0]) for row in values]
    assert argmax_rows(values).tolist() == expected
    assert values.argmax(dim=-1).tolist() == expected, "torch's own rule, which other devices rely on"
    assert [int(argmax_rows(row.unsqueeze(0))) for row in values] == expected


@pytest.mark.parametrize("count", [1, 5, 39, 40])
def test_the_largest_tokens_come_in_order_with_ties_by_id(count):
    logits = torch.randint(-3, 4, (6, 40), generator=torch.Generator().manual_seed(2)).float()
    logits[logits == 3] = -0.0
    logits[0, :7] = -torch.inf
    logits[1] *= 1e30
    ids = largest(order_keys(logits), count)
    assert ids.tolist() == [in_order(row)[:count] for row in logits.tolist()]


def test_the_order_is_the_same_by_any_selection_of_the_keys():
    keys = order_keys(torch.randint(-9, 9, (4, 300), generator=torch.Generator().manual_seed(3)).float())
    for count in (1, 20, 300):
        by_topk = 0xFFFFFFFF - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
        assert torch.equal(largest(keys, count), by_topk)


def test_repetition_counts_prompt_and_output_but_presence_and_frequency_only_output():
    logits = torch.tensor([[2.0, -2.0, 3.0, -3.0, 1.0, 0.0]])
    counts = torch.tensor([[PROMPT_FLAG, PROMPT_FLAG, PROMPT_FLAG + 2, 3, 0, 0]], dtype=torch.int32)
    one = torch.ones(1, 1)
    out = apply_penalties(logits, counts, one * 2.0, None, None)
    assert out.tolist() == [[1.0, -4.0, 1.5, -6.0, 1.0, 0.0]]
    out = apply_penalties(logits, counts, None, one * 0.5, one * 0.25)
    assert out.tolist() == [[2.0, -2.0, 1.75, -4.75, 1.0, 0.0]]


def test_penalties_leave_unused_rows_and_masked_ids_exactly_alone():
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(4)) * 10
    logits[:, 5] = -torch.inf
    counts = torch.zeros(3, 64, dtype=torch.int32)
    counts[0, 5] = 3
    column = torch.tensor([[1.7], [1.0], [0.3]])
    out = apply_penalties(logits, counts, column, column - 1, column - 1)
    assert torch.equal(out, logits)
    counts[1:] = PROMPT_FLAG + 7
    out = apply_penalties(logits, counts, torch.tensor([[1.7], [1.0], [1.0]]), torch.zeros(3, 1), torch.zeros(3, 1))
    assert torch.equal(out, logits)


def test_suppression_ends_with_min_tokens():
    logits, mask = torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.bool)
    mask[:, 2] = True
    out = suppress(logits, mask, torch.tensor([[0], [4], [5]]), torch.tensor([[5], [5], [5]]))
    assert out[:, 2].tolist() == [-math.inf, -math.inf, 0.0]
    assert out[:, [0, 1, 3]].eq(0).all()


def kept_by_definition(row, temperature, top_k, top_p):
    order = in_order(row)[:top_k]
    weights = np.exp((np.array([row[i] for i in order], dtype=np.float64) - row[order[0]]) / temperature)
    mass, total, kept = 0.0, weights.sum(), []
    for token_id, weight in zip(order, weights, strict=True):
        if kept and mass >= top_p * total:
            break
        kept.append(token_id)
        mass += weight
    return kept


@pytest.mark.parametrize("vocab_size", [50, 3000])
def test_top_k_then_top_p_keep_the_sets_of_their_definitions(vocab_size):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(12, vocab_size, generator=generator) * 4
    logits[::2] = (logits[::2] * 2).round() / 2  # many ties
    top_k = [vocab_size, 1, 5, 20, 49, vocab_size] * 2
    top_p = [0.9, 0.5, math.inf, 0.3, 0.999, 0.01, 0.5, 0.9, 0.7, math.inf, 0.2, 0.95]
    temperature = [1.0, 0.7, 0.1, 2.0, 1.0, 1.3] * 2
    column = lambda values: torch.tensor(values, dtype=torch.float64).unsqueeze(1)  # noqa: E731
    ids, weights = top_k_top_p(logits, column(temperature).float(), column(top_k).long(), column(top_p), max(top_k))
    for row in range(12):
        kept = ids[row][weights[row] > 0].tolist()
        expected = kept_by_definition(logits[row].tolist(), temperature[row], top_k[row], top_p[row])
        # Far in the tail of a row without top-p a weight rounds to 0; what is left is then still a prefix.
        assert kept == expected[: len(kept)]
        assert len(kept) == len(expected) or math.isinf(top_p[row])


def test_top_p_keeps_the_token_that_reaches_the_mass_and_no_more():
    # Four tokens of 1/4: after two the mass is exactly a half.
    logits = torch.zeros(3, 4)
    top_p = torch.tensor([[0.5], [0.5000001], [1e-9]], dtype=torch.float64)
    ids, weights = top_k_top_p(logits, torch.ones(3, 1), torch.full((3, 1), 4), top_p, 4)
    assert (weights > 0).sum(dim=1).tolist() == [2, 3, 1]
    assert ids[:, 0].tolist() == [0, 0, 0]


def test_a_short_list_and_the_whole_vocabulary_keep_the_same_tokens(monkeypatch):
    logits = torch.randn(6, 4000, generator=torch.Generator().manual_seed(6)) * 3
    temperature, top_k = torch.ones(6, 1), torch.tensor([[4000], [4000], [10], [4000], [100], [4000]])
    top_p = torch.tensor([[0.5], [0.9], [0.9], [0.99], [math.inf], [0.2]], dtype=torch.float64)
    for rows in (slice(0, 3), slice(0, 6)):
        args = (logits[rows], temperature[rows], top_k[rows], top_p[rows], 4000)
        monkeypatch.setattr(processors, "SHORT_LIST", 512)
        ids, weights = top_k_top_p(*args)
        monkeypatch.setattr(processors, "SHORT_LIST", 4000)
        all_ids, all_weights = top_k_top_p(*args)
        assert torch.equal(ids, all_ids)
        assert torch.equal(weights, all_weights)


def test_weights_do_not_depend_on_a_row_s_place_in_the_batch():
    logits = torch.randn(16, 4099, generator=torch.Generator().manual_seed(7)) * 6
    temperature = torch.linspace(0.2, 2.0, 16).unsqueeze(1)
    whole = weights_of(logits, temperature)
    gathered = weights_of(logits.flip(1), temperature).flip(1)
    assert torch.equal(gathered, whole)
    for row in range(16):
        assert torch.equal(weights_of(logits[row : row + 1], temperature[row : row + 1])[0], whole[row])
        assert torch.equal(weights_of(logits[row : row + 1].clone(), temperature[row : row + 1])[0], whole[row])
