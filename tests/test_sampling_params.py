"""Slot tables: what a former owner leaves behind, what memory is taken, what a step is told."""

import pytest
import torch
from sampling_tools import VOCAB, draw, new_request, sampler_with, token_by_definition

from bireme.errors import ConfigError
from bireme.sampling.params import SlotSampling
from bireme.types import NewRequest, SamplingParams

EVERYTHING = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.3,
    "repetition_penalty": 5.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {token_id: -50.0 for token_id in range(0, VOCAB, 2)},
    "min_tokens": 100,
    "logprobs": 5,
}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 9},
        {"presence_penalty": 1.0, "temperature": 0.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 2},
    ],
)
def test_install_overwrites_all_that_a_former_owner_left(params):
    former = new_request(2, seed=9, prompt=range(200), suppressed=range(0, VOCAB, 3), **EVERYTHING)
    sampler = sampler_with([former])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    for position in range(5):
        draw(sampler, logits, [2], [position])

    request = new_request(2, seed=4, suppressed=[1], **params)
    sampler.tables.install(request)
    output = []
    for position in range(6):
        sampled = sampler(logits.clone(), [2], torch.tensor([position]))
        assert sampled.logprobs() is None
        assert int(sampled.token_ids) == token_by_definition(logits[0].tolist(), request, output)
        output.append(int(sampled.token_ids))


def test_a_row_discarded_after_its_request_ended_leaves_no_count_behind():
    sampler = sampler_with([new_request(1, temperature=0.0, frequency_penalty=1.0)])
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 2.0, 1.5
    assert [draw(sampler, logits, [1], [position])[0] for position in range(3)] == [5, 6, 5]
    sampler.tables.install(new_request(1, temperature=0.0, frequency_penalty=1.0))
    assert [draw(sampler, logits, [1], [position])[0] for position in range(3)] == [5, 6, 5]


def test_rows_for_penalties_bias_and_min_tokens_are_allocated_when_the_first_request_asks():
    tables = SlotSampling(64, VOCAB, torch.device("cpu"))
    pools = (tables.counts, tables.bias, tables.suppressed)
    for slot in range(1, 65):
        tables.install(new_request(slot, top_k=3, min_p=0.1, suppressed=[1]))
    assert [len(pool.rows) for pool in pools] == [0, 0, 0]
    tables.install(new_request(7, presence_penalty=0.1, logit_bias={1: 1.0}, min_tokens=1, suppressed=[1]))
    assert [len(pool.rows) for pool in pools] == [4, 4, 4]


def test_pooled_rows_are_reused_and_never_exceed_the_slots():
    tables = SlotSampling(6, VOCAB, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    users = set()
    for _ in range(200):
        slot = int(torch.randint(1, 7, (1,), generator=generator))
        params = {"presence_penalty": 0.5} if torch.rand(1, generator=generator) < 0.7 else {}
        tables.install(new_request(slot, **params))
        users = users | {slot} if params else users - {slot}
        held = {slot: row for slot, row in enumerate(tables.counts.row_of_slot.tolist()) if row >= 0}
        assert set(held) == users
        assert len(set(held.values())) == len(held)
        assert len(tables.counts.rows) <= 6


def test_growing_a_pool_keeps_the_counts_of_running_requests():
    request = new_request(1, temperature=0.0, frequency_penalty=1.0)
    sampler = sampler_with([request])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    output = []
    for position in range(12):
        sampler.tables.install(new_request(position + 2, frequency_penalty=0.5, prompt=[1] * 9))
        expected = token_by_definition(logits[0].tolist(), request, output)
        output += draw(sampler, logits, [1], [position])
        assert output[-1] == expected


def test_install_and_sampling_work_inside_and_outside_inference_mode():
    tables_user = sampler_with([])
    logits = torch.zeros(1, VOCAB)
    for slot in range(1, 12):
        with torch.inference_mode(slot % 2 == 0):
            tables_user.tables.install(new_request(slot, presence_penalty=1.0, logit_bias={1: 1.0}))
        with torch.inference_mode(slot % 3 == 0):
            draw(tables_user, logits, [slot], [0])


def test_an_unresolved_seed_is_refused_unless_nothing_is_drawn():
    tables = SlotSampling(2, VOCAB, torch.device("cpu"))
    tables.install(NewRequest(1, [1], [], SamplingParams(temperature=0.0), []))
    with pytest.raises(ValueError, match="slot 2: its seed is not resolved"):
        tables.install(NewRequest(2, [1], [], SamplingParams(), []))


def test_a_mask_of_the_whole_vocabulary_is_refused_at_start():
    with pytest.raises(ConfigError, match="all 300 token ids"):
        SlotSampling(2, VOCAB, torch.device("cpu"), [(0, 100), (100, VOCAB)])


def test_suppression_is_dropped_where_it_and_the_mask_leave_nothing():
    sampler = sampler_with(
        [new_request(1, temperature=0.0, min_tokens=5, suppressed=[1, 2])], masked=[(0, 1), (3, VOCAB)]
    )
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 1.0
    assert draw(sampler, logits, [1], [0]) == [2]


def test_a_step_is_told_only_of_the_features_that_its_own_rows_use():
    sampler = sampler_with(
        [
            new_request(1, temperature=0.0),
            new_request(2, presence_penalty=1.0, top_k=4),
            new_request(3, min_p=0.1, logit_bias={1: 1.0}, min_tokens=2, suppressed=[1], logprobs=3),
        ]
    )
    rows = sampler.tables.select([1, 1])
    assert (rows.plain, rows.filtered, rows.bias, rows.penalties, rows.suppression, rows.logprobs) == (None,) * 6
    rows = sampler.tables.select([1, 2])
    assert rows.penalties.repetition is None
    assert rows.penalties.presence.tolist() == [[1.0]]
    assert rows.filtered.largest_k == 4
    assert (rows.plain, rows.bias, rows.suppression, rows.logprobs) == (None,) * 4
    rows = sampler.tables.select([3])
    assert (rows.greedy, rows.filtered, rows.penalties) == (None,) * 3
    assert rows.logprobs.counts == [3]
    assert sampler.tables.select([3]) is rows
    sampler.tables.install(new_request(1))
    assert sampler.tables.select([3]) is not rows
