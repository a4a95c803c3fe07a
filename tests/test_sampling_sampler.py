"""The batched pass: each row's token against its definition, alone and in every kind of company."""

import itertools

import numpy as np
import pytest
import torch
from sampling_tools import VOCAB, draw, new_request, processed, sampler_with, token_by_definition

from bireme.sampling import draw as draw_module
from bireme.sampling import sampler as sampler_module
from bireme.sampling.draw import draw_among, draw_full
from bireme.sampling.philox import key_schedule

KINDS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 1.1},
    "bias": {"logit_bias": {5: 4.0, 299: -3.0}, "top_k": 40},
    "min_tokens": {"min_tokens": 4, "top_p": 0.95},
    "top_k of one": {"top_k": 1, "temperature": 2.0},
}


def random_logits(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def requests_of_all_kinds(seed=100):
    return [
        new_request(slot, seed=seed + slot, prompt=[4, 5, 6, slot], suppressed=[0, 1, 17], **params)
        for slot, params in enumerate(KINDS.values(), start=1)
    ]


@pytest.mark.parametrize("masked", [(), ((290, 300),), ((0, 2), (100, 120), (280, 300))])
def test_twenty_steps_of_a_mixed_batch_give_each_row_the_token_of_its_definition(masked):
    requests = requests_of_all_kinds()
    sampler = sampler_with(requests, masked=masked)
    slots = [request.slot for request in requests]
    outputs = [[] for _ in requests]
    for step in range(20):
        logits = random_logits(len(slots), VOCAB, seed=step)
        expected = [
            token_by_definition(row, request, output, masked)
            for row, request, output in zip(logits.tolist(), requests, outputs, strict=True)
        ]
        tokens = draw(sampler, logits, slots, [len(output) for output in outputs])
        assert tokens == expected
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_draws_the_same_token_alone_and_as_row_0_3_7_among_any_neighbours(kind):
    logits = random_logits(16, VOCAB, seed=1)
    logits[:, ::3] = (logits[:, ::3] * 2).round() / 2
    wanted = new_request(9, seed=77, suppressed=[3, 9], **KINDS[kind])
    for position in (0, 1, 5):
        alone = draw(sampler_with([wanted]), logits[:1], [9], [position])
        for place, width in ((0, 4), (3, 8), (7, 16)):
            others = [
                new_request(slot, seed=slot, suppressed=[2], **params)
                for slot, params in zip((s for s in range(1, 17) if s != 9), itertools.cycle(KINDS.values()))
            ]
            slots = [request.slot for request in others[: width - 1]]
            slots.insert(place, 9)
            batch = logits[1 : width + 1].clone() if width < 16 else logits.clone()
            batch[place] = logits[0]
            positions = [3] * width
            positions[place] = position
            tokens = draw(sampler_with([wanted, *others]), batch, slots, positions)
            assert tokens[place] == alone[0]


def test_rows_may_come_in_any_order_and_leave_again():
    requests = requests_of_all_kinds()
    sampler = sampler_with(requests)
    logits = {
        request.slot: random_logits(VOCAB, seed=request.slot)
        for request in requests
        if "penal" not in list(KINDS)[request.slot - 1]
    }
    whole = dict(
        zip(logits, draw(sampler, torch.stack(list(logits.values())), list(logits), [2] * len(logits)), strict=True)
    )
    rng = np.random.default_rng(0)
    for _ in range(30):
        slots = rng.permutation(list(logits))[: rng.integers(1, len(logits) + 1)].tolist()
        tokens = draw(sampler, torch.stack([logits[slot] for slot in slots]), slots, [2] * len(slots))
        assert tokens == [whole[slot] for slot in slots]


def test_tiles_do_not_change_a_token(monkeypatch):
    requests = [new_request(slot, seed=slot, top_p=0.999, min_p=0.001 * slot) for slot in range(1, 9)]
    requests += [new_request(slot, seed=slot) for slot in range(9, 17)]
    logits, slots = random_logits(16, 3001, scale=0.3), list(range(1, 17))
    whole = draw(sampler_with(requests, vocab_size=3001), logits, slots, [3] * 16)
    monkeypatch.setattr(draw_module, "CPU_TILE", 500)
    monkeypatch.setattr(sampler_module, "FILTER_TILE", 9000)
    assert draw(sampler_with(requests, vocab_size=3001), logits, slots, [3] * 16) == whole


def test_two_seeds_differ_and_a_seed_repeats():
    seeds = [1, 2, 1, -1, 2**63 - 1, 1 + 2**32]
    sampler = sampler_with([new_request(slot, seed=seed) for slot, seed in enumerate(seeds, start=1)], num_slots=6)
    logits = torch.zeros(6, VOCAB)
    drawn = torch.tensor([draw(sampler, logits, [1, 2, 3, 4, 5, 6], [position] * 6) for position in range(50)])
    assert drawn[:, 0].equal(drawn[:, 2])
    for a, b in itertools.combinations([0, 1, 3, 4, 5], 2):
        assert (drawn[:, a] == drawn[:, b]).sum() < 6


def test_positions_of_one_seed_draw_independently():
    num_positions = 20_000
    keys = key_schedule(torch.full((num_positions,), 5), torch.zeros(num_positions, dtype=torch.int64))
    tokens = draw_full(torch.ones(num_positions, 4), keys, torch.arange(num_positions))
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).double()
    expected = (num_positions - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7  # chi-square, 15 degrees of freedom, 0.1 %


def chi_square(tokens, probabilities):
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    expected = (probabilities * len(tokens))[probabilities > 0]
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())


def test_draws_follow_the_probabilities():
    num_draws = 40_000
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.004, 0.001, 0.0], dtype=torch.float64)
    weights = (probabilities / 0.4).float().expand(num_draws, -1)
    keys = key_schedule(torch.full((num_draws,), 9), torch.full((num_draws,), 8))
    positions = torch.arange(num_draws)
    tokens = draw_full(weights, keys, positions)
    assert chi_square(tokens, probabilities) < 26.1  # 8 degrees of freedom, 0.1 %
    ids = torch.tensor([7, 3, 9, 0, 1, 2, 8, 4, 6, 5]).expand(num_draws, -1)
    assert draw_among(ids, weights.gather(1, ids), keys, positions).equal(tokens)


@pytest.mark.parametrize(
    ("params", "kept"),
    [({"top_k": 3}, 3), ({"top_p": 0.85}, 4), ({"min_p": 0.2}, 4), ({"temperature": 0.5}, 8), ({}, 8)],
)
def test_sampled_tokens_follow_the_filtered_distribution(params, kept):
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)
    num_slots = 4000
    sampler = sampler_with(
        [new_request(slot, seed=slot, **params) for slot in range(1, num_slots + 1)], num_slots=num_slots, vocab_size=8
    )
    logits = probabilities.log().float().expand(num_slots, -1)
    slots = list(range(1, num_slots + 1))
    tokens = torch.tensor([draw(sampler, logits, slots, [position] * num_slots) for position in range(5)]).flatten()
    target = probabilities ** (1 / params.get("temperature", 1.0))
    target[kept:] = 0
    assert chi_square(tokens, target / target.sum()) < 24.4  # at most 7 degrees of freedom, 0.1 %


def test_greedy_rows_take_the_smallest_id_among_equals():
    sampler = sampler_with([new_request(1, temperature=0.0), new_request(2, temperature=9e-6), new_request(3, top_k=1)])
    logits = torch.zeros(3, VOCAB)
    logits[:, [250, 17, 90]] = 5.0
    assert draw(sampler, logits, [1, 2, 3], [0, 0, 0]) == [17, 17, 17]


def test_undecodable_ids_are_never_drawn():
    masked = [(0, 3), (50, 60), (200, VOCAB)]
    requests = [new_request(s, seed=s, **params) for s, params in enumerate(list(KINDS.values())[:7], start=1)]
    requests.append(new_request(8, temperature=0.0, logit_bias={55: 100.0, 250: 100.0}))
    sampler = sampler_with(requests, masked=masked)
    logits = torch.zeros(8, VOCAB)
    for start, end in masked:
        logits[:, start:end] = 9.0
    for position in range(40):
        tokens = draw(sampler, logits, list(range(1, 9)), [position] * 8)
        assert not any(start <= token < end for token in tokens for start, end in masked)


def test_penalties_at_temperature_zero_follow_tokens_the_host_has_not_read():
    # Nothing here looks at a token before all steps have run: counts are kept where the draw happens.
    request = new_request(2, temperature=0.0, presence_penalty=0.5, repetition_penalty=1.2, frequency_penalty=0.25)
    plain = new_request(1, temperature=0.0)
    sampler = sampler_with([request, plain])
    logits = random_logits(2, VOCAB, seed=3)
    drawn = [sampler(logits.clone(), [1, 2], torch.tensor([step, step])).token_ids for step in range(30)]
    output = []
    for tokens in drawn:
        assert tokens[1] == int(processed(logits[1].tolist(), request, output).argmax())
        assert tokens[0] == int(logits[0].argmax())
        output.append(int(tokens[1]))
    assert len(set(output)) > 3


def test_min_tokens_holds_eos_back_until_enough_tokens_are_out():
    requests = [
        new_request(slot, seed=slot, min_tokens=3, suppressed=[7], **params)
        for slot, params in enumerate([{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}], start=1)
    ]
    sampler = sampler_with(requests)
    logits = torch.zeros(4, VOCAB)
    logits[:, 7] = 50.0
    for position in range(6):
        tokens = draw(sampler, logits, [1, 2, 3, 4], [position] * 4)
        assert [token == 7 for token in tokens] == [position >= 3] * 4


def test_one_token_survives_whatever_is_masked():
    everything = list(range(VOCAB))
    requests = [
        new_request(1, min_tokens=9, suppressed=everything),  # nothing would be left: suppression is dropped
        new_request(2, logit_bias={token_id: -100.0 for token_id in everything}, top_p=1e-6),
        new_request(3, min_tokens=9, suppressed=everything[:-1], min_p=1.0, top_p=0.01),
        new_request(4, temperature=100.0, top_k=1000, min_p=1.0),
    ]
    logits = random_logits(4, VOCAB)
    tokens = draw(sampler_with(requests), logits, [1, 2, 3, 4], [0] * 4)
    assert tokens[0] == token_by_definition(logits[0].tolist(), new_request(1))
    assert tokens[1] == int(logits[1].argmax())
    assert tokens[2] == VOCAB - 1
    assert tokens[3] == int(logits[3].argmax())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_of_broken_logits_stays_in_range_and_harms_no_neighbour(bad):
    kinds = list(KINDS.values())[:7]
    sampler = sampler_with([new_request(s, seed=s, **params) for s, params in enumerate(kinds * 2, start=1)])
    logits = random_logits(14, VOCAB)
    good = draw(sampler, logits, list(range(1, 15)), [0] * 14)
    logits[:7] = bad
    tokens = draw(sampler, logits, list(range(1, 15)), [0] * 14)
    assert all(0 <= token < VOCAB for token in tokens)
    assert tokens[7:] == good[7:]


def test_padding_rows_of_slot_0_are_greedy():
    sampler = sampler_with([new_request(1, seed=4)])
    logits = random_logits(3, VOCAB)
    tokens = draw(sampler, logits, [0, 1, 0], [0, 0, 0])
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[2] == int(logits[2].argmax())


def test_an_all_greedy_step_costs_little_more_than_its_argmax():
    import time

    sampler = sampler_with([new_request(slot, temperature=0.0) for slot in range(1, 17)], vocab_size=4096)
    logits, slots, positions = random_logits(16, 4096), list(range(1, 17)), torch.zeros(16, dtype=torch.int64)
    array = logits.numpy()

    def fastest(call):
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    assert fastest(lambda: sampler(logits, slots, positions)) < 2 * fastest(lambda: array.argmax(axis=1)) + 30e-6
