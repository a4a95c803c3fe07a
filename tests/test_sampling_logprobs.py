"""Log-probabilities: raw, ranked in the order of the tokens, the same in any batch."""

import pytest
import torch
from sampling_tools import VOCAB, new_request, sampler_with

from bireme.sampling import logprobs as logprobs_module
from bireme.sampling.logprobs import prompt_logprobs


def random_logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


def test_entries_are_the_log_softmax_of_the_raw_logits():
    logits, targets = random_logits(9, 4001), torch.arange(9) * 400
    entries = prompt_logprobs(logits, targets, 20)
    expected = logits.double().log_softmax(dim=-1)
    for row, entry in enumerate(entries):
        assert entry.token_id == int(targets[row])
        assert entry.logprob == pytest.approx(float(expected[row, targets[row]]), abs=2e-6)
        assert entry.rank == 1 + int((expected[row] > expected[row, targets[row]]).sum())
        assert entry.top_ids == expected[row].topk(20).indices.tolist()
        assert entry.top_logprobs == pytest.approx(expected[row].topk(20).values.tolist(), abs=2e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 1e6])
def test_probabilities_sum_to_one_at_any_scale(scale):
    logits = random_logits(3, VOCAB) * scale
    for entry in prompt_logprobs(logits, torch.zeros(3, dtype=torch.int64), VOCAB):
        assert torch.tensor(entry.top_logprobs, dtype=torch.float64).exp().sum() == pytest.approx(1.0, abs=1e-5)


def test_a_token_s_rank_is_its_place_in_the_list_also_among_equals():
    logits = torch.zeros(4, 30)
    logits[:, 7] = 1.0
    entries = prompt_logprobs(logits, torch.tensor([7, 0, 8, 29]), 20)
    assert [entry.rank for entry in entries] == [1, 2, 9, 30]
    for entry in entries:
        assert entry.top_ids == [7, *(i for i in range(20) if i != 7)]
        if entry.rank <= 20:
            assert entry.top_ids[entry.rank - 1] == entry.token_id


def test_an_entry_is_the_same_bits_alone_and_in_any_batch_or_tile(monkeypatch):
    logits, targets = random_logits(16, 4099), torch.arange(16) * 50
    whole = prompt_logprobs(logits, targets, 5)
    for row in (0, 3, 7, 15):
        assert prompt_logprobs(logits[row : row + 1].clone(), targets[row : row + 1], 5) == [whole[row]]
    monkeypatch.setattr(logprobs_module, "TILE", 4099 * 3)
    assert prompt_logprobs(logits, targets, 5) == whole


def test_k_of_zero_lists_nothing_and_a_small_vocabulary_lists_itself():
    logits = random_logits(2, 6)
    (entry, _) = prompt_logprobs(logits, torch.tensor([2, 3]), 0)
    assert (entry.top_ids, entry.top_logprobs) == ([], [])
    (entry, _) = prompt_logprobs(logits, torch.tensor([2, 3]), 20)
    assert sorted(entry.top_ids) == list(range(6))
    assert prompt_logprobs(logits[:0], torch.tensor([], dtype=torch.int64), 3) == []


def test_rows_with_different_k_share_a_step():
    wanted = [None, 0, 5, 20, None, 1]
    sampler = sampler_with(
        [new_request(slot, seed=slot, logprobs=k, top_k=50) for slot, k in enumerate(wanted, start=1)]
    )
    logits = random_logits(6, VOCAB)
    sampled = sampler(logits.clone(), [1, 2, 3, 4, 5, 6], torch.zeros(6, dtype=torch.int64))
    entries = sampled.logprobs()
    assert [entry is None for entry in entries] == [k is None for k in wanted]
    for row, k in enumerate(wanted):
        if k is not None:
            (alone,) = prompt_logprobs(logits[row : row + 1], sampled.token_ids[row : row + 1], k)
            assert entries[row] == alone
            assert len(alone.top_ids) == k
    assert sampled.logprobs(sampled.logprob_table.clone()) == entries


@pytest.mark.parametrize("everyone", [True, False])
def test_processors_do_not_show_in_logprobs(everyone):
    params = {
        "logprobs": 4,
        "temperature": 0.2,
        "logit_bias": {i: 50.0 for i in range(50)},
        "repetition_penalty": 3.0,
        "presence_penalty": 2.0,
        "min_tokens": 3,
        "top_k": 3,
    }
    requests = [new_request(slot, seed=slot, suppressed=[slot], **params) for slot in (1, 2)]
    if not everyone:
        requests.append(new_request(3, temperature=0.0))
    sampler = sampler_with(requests, masked=[(100, 120), (290, VOCAB)])
    slots = [request.slot for request in requests]
    for step in range(3):
        logits = random_logits(len(slots), VOCAB, seed=step)
        logits[:, 295] = 30.0
        sampled = sampler(logits.clone(), slots, torch.full((len(slots),), step))
        for row in (0, 1):
            (raw,) = prompt_logprobs(logits[row : row + 1], sampled.token_ids[row : row + 1], 4)
            assert sampled.logprobs()[row] == raw
            assert raw.top_ids[0] == 295


def test_no_row_that_asks_means_no_list():
    sampler = sampler_with([new_request(1), new_request(2, temperature=0.0)])
    sampled = sampler(random_logits(2, VOCAB), [1, 2], torch.zeros(2, dtype=torch.int64))
    assert sampled.logprobs() is None
    assert sampled.logprob_table is None
