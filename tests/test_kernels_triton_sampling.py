"""The device's draw against the plain one, token for token: in Triton's interpreter on CPUs, compiled on a GPU."""

import os

import pytest
import torch

from bireme.sampling.draw import draw_among, draw_full
from bireme.sampling.philox import MASK, key_schedule
from bireme.sampling.processors import min_p_filter, top_k_top_p, weights_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from bireme.kernels.triton import sampling as kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
VOCABULARIES = [7, 4200] if INTERPRETED else [7, 130, 5003, 151_936, 248_320]
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def expected(logits, temperature, seeds, positions, min_p, top_k, top_p):
    keys = key_schedule(torch.tensor([s & MASK for s in seeds]), torch.tensor([s >> 32 & MASK for s in seeds]))
    if top_k is None:
        weights = weights_of(logits, temperature)
        return draw_full(weights if min_p is None else min_p_filter(weights, min_p), keys, positions)
    ids, weights = top_k_top_p(logits, temperature, top_k, top_p, int(top_k.max()))
    return draw_among(ids, weights if min_p is None else min_p_filter(weights, min_p), keys, positions)


def drawn(logits, temperature, seeds, positions, min_p, top_k, top_p):
    def there(x):
        return None if x is None else x.to(DEVICE)

    low, high = torch.tensor([[s & MASK] for s in seeds]), torch.tensor([[s >> 32 & MASK] for s in seeds])
    return kernels.draw_tokens(
        there(logits),
        there(temperature),
        there(low),
        there(high),
        there(positions),
        min_p=there(min_p),
        top_k=there(top_k),
        top_p=there(top_p),
        smallest_k=0 if top_k is None else int(top_k.min()),
        largest_k=0 if top_k is None else int(top_k.max()),
    ).cpu()


def rows_of(vocab_size, num_rows=5, *, ties, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    if ties:
        logits = (logits * 2).round() / 2
    temperature = torch.tensor([[0.7], [1.0], [1.5], [0.3], [1.0]])[:num_rows]
    seeds = [3, 1 << 40, 77, (1 << 63) + 5, 12][:num_rows]
    return logits, temperature, seeds, torch.arange(num_rows) * 1000


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("min_p", [None, 0.1])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_draw_from_all_tokens_is_the_plain_draw(vocab_size, min_p, ties):
    rows = rows_of(vocab_size, ties=ties)
    least = None if min_p is None else torch.full((5, 1), min_p)
    assert drawn(*rows, least, None, None).tolist() == expected(*rows, least, None, None).tolist()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        ([1, 2, 5, 20, 64], [float("inf")] * 5),
        ([20, 20, 20, 20, 20], [0.8, 0.95, 0.1, 0.999, float("inf")]),
        ([65, 100, 300, 1, 20], [0.9, float("inf"), 0.99, 0.5, 0.2]),
        ([None, None, None, None, None], [0.9, 0.5, 0.99, 0.1, 0.95]),
        ([None, 20, 400, None, 2], [0.9, 0.5, float("inf"), float("inf"), 0.95]),
    ],
)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_top_k_and_top_p_leave_exactly_the_tokens_of_the_plain_filter(vocab_size, top_k, top_p, ties):
    k = torch.tensor([[min(vocab_size, vocab_size if value is None else value)] for value in top_k])
    p = torch.tensor([[value] for value in top_p], dtype=torch.float64)
    for seed in range(1 if INTERPRETED else 3):
        rows = rows_of(vocab_size, ties=ties, seed=seed)
        assert drawn(*rows, None, k, p).tolist() == expected(*rows, None, k, p).tolist()


def test_min_p_applies_after_top_k():
    rows, k = rows_of(5003, ties=False), torch.full((5, 1), 30)
    p, least = torch.full((5, 1), 0.9, dtype=torch.float64), torch.full((5, 1), 0.2)
    assert drawn(*rows, least, k, p).tolist() == expected(*rows, least, k, p).tolist()


@pytest.fixture
def filled_memory():
    """Memory that nobody has written holds the largest integer: an address made from it lies far outside."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("top_k", [None, 20, 200])
def test_masked_tokens_are_never_drawn_and_a_row_of_nan_stays_in_range(top_k, filled_memory):
    logits, temperature, seeds, positions = rows_of(5003, ties=False)
    logits[:] = float("-inf")
    logits[0, 4000] = logits[1, 17] = logits[2, 5002] = 0.0
    logits[3] = float("nan")
    logits[4, 100:103] = 1.0
    k = None if top_k is None else torch.full((5, 1), top_k)
    p = None if top_k is None else torch.full((5, 1), 0.9, dtype=torch.float64)
    ids = drawn(logits, temperature, seeds, positions, None, k, p).tolist()
    assert ids[:3] == [4000, 17, 5002]
    assert 0 <= ids[3] < 5003
    assert ids[4] in {100, 101, 102}


def test_a_row_draws_the_same_alone():
    logits, temperature, seeds, positions = rows_of(5003, ties=True)
    for k, p in ((None, None), (40, 0.9), (500, 0.9)):
        top_k = None if k is None else torch.full((5, 1), k)
        top_p = None if p is None else torch.full((5, 1), p, dtype=torch.float64)
        together = drawn(logits, temperature, seeds, positions, None, top_k, top_p).tolist()
        for row in range(5):
            one = slice(row, row + 1)
            parts = [None if x is None else x[one] for x in (top_k, top_p)]
            alone = drawn(logits[one], temperature[one], seeds[one], positions[one], None, *parts)
            assert alone.tolist() == [together[row]]
