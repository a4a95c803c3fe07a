"""The noise: published Philox4x32-10 vectors, and what a number may depend on."""

import numpy as np
import pytest
import torch
from sampling_tools import python_uniform

from bireme.sampling.philox import MASK, _log_uniform, key_schedule, log_uniform_at, log_uniform_range, philox4x32

# From the known-answer file of the Random123 library: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK, MASK, MASK, MASK), (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def keys_of(*seeds):
    seeds = [seed & (2**64 - 1) for seed in seeds]
    return key_schedule(torch.tensor([s & MASK for s in seeds]), torch.tensor([s >> 32 for s in seeds]))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
@pytest.mark.parametrize("as_tensors", [False, True])
def test_philox_gives_the_published_answers(counter, key, expected, as_tensors):
    keys = key_schedule(torch.tensor([key[0]]), torch.tensor([key[1]]))
    words = [np.full((1, 1), word, dtype=np.int64) for word in counter]
    if as_tensors:
        keys = [(torch.from_numpy(low), torch.from_numpy(high)) for low, high in keys]
        words = [torch.from_numpy(word) for word in words]
    assert tuple(word.item() for word in philox4x32(tuple(words), keys)) == expected


def test_broadcast_counters_equal_a_python_loop():
    seeds, positions = [5, -1, 2**63 - 1, -(2**63)], torch.tensor([0, 1, 77, 2**31])
    noise = log_uniform_range(keys_of(*seeds), positions, 8, 9)
    for row, seed in enumerate(seeds):
        for column in range(9):
            uniform = python_uniform(seed, int(positions[row]), 8 + column)
            assert noise[row, column].item() == pytest.approx(np.log(uniform), rel=1e-14)


def test_chosen_ids_get_the_same_numbers_as_a_range():
    generator = torch.Generator().manual_seed(0)
    keys, positions = keys_of(3, 4, 5), torch.tensor([9, 9, 10])
    whole = log_uniform_range(keys, positions, 0, 1001)
    ids = torch.stack([torch.randperm(1001, generator=generator)[:57] for _ in range(3)])
    assert torch.equal(log_uniform_at(keys, positions, ids), whole.gather(1, ids))
    assert torch.equal(log_uniform_range(keys, positions, 400, 601), whole[:, 400:])


def test_a_row_gets_the_same_noise_alone_and_in_any_batch():
    seeds, positions = list(range(16)), torch.arange(16) * 3
    whole = log_uniform_range(keys_of(*seeds), positions, 0, 1003)
    for row in (0, 3, 7, 15):
        alone = log_uniform_range(keys_of(seeds[row]), positions[row : row + 1], 0, 1003)
        assert torch.equal(alone[0], whole[row])


def test_noise_is_finite_and_negative_at_the_extreme_words():
    noise = _log_uniform(torch.tensor([0, 1, MASK - 1, MASK], dtype=torch.float64))
    assert torch.isfinite(noise).all()
    assert (noise < 0).all()
    assert noise[3].item() == pytest.approx(-(2.0**-33))
    assert noise[0].item() == pytest.approx(-33 * np.log(2))


def test_seeds_and_positions_change_every_number():
    same_position = log_uniform_range(keys_of(1, 2, 1 + 2**32), torch.zeros(3, dtype=torch.int64), 0, 4096)
    same_seed = log_uniform_range(keys_of(1, 1), torch.tensor([0, 1]), 0, 4096)
    for a, b in ((same_position[0], same_position[1]), (same_position[0], same_position[2]), tuple(same_seed)):
        assert (a == b).sum() <= 1
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.06


def test_noise_is_exponentially_distributed():
    noise = -log_uniform_range(keys_of(*range(64)), torch.arange(64), 0, 4096).flatten()
    # The share below each decile of the unit exponential; 262,144 numbers, so 0.1 has a standard error of 0.0006.
    edges = torch.tensor([-np.log1p(-q / 10) for q in range(1, 10)], dtype=torch.float64)
    shares = torch.histc(torch.bucketize(noise, edges).double(), 10, 0, 9) / len(noise)
    assert (shares - 0.1).abs().max() < 0.0030
