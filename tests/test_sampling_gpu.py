"""On CUDA: the same tokens as on CPU, rows independent of the batch, and no wait for the device."""

import pytest
import torch
from sampling_tools import new_request

from bireme.sampling.logprobs import prompt_logprobs
from bireme.sampling.params import SlotSampling
from bireme.sampling.sampler import Sampler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KINDS = [
    {"temperature": 0.0},
    {},
    {"top_k": 20, "top_p": 0.9},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    {"logit_bias": {3: 4.0}, "min_tokens": 3, "temperature": 0.0, "logprobs": 5},
    {"top_k": 300, "temperature": 1.5, "logprobs": 0},
]


def sampler_on(device, num_slots, vocab_size):
    tables = SlotSampling(num_slots, vocab_size, torch.device(device), [(vocab_size - 40, vocab_size), (9, 12)])
    for slot in range(1, num_slots + 1):
        tables.install(new_request(slot, seed=slot, suppressed=[5], **KINDS[slot % len(KINDS)]))
    return Sampler(tables)


def logits_of(num_rows, vocab_size, step):
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(step)) * 4
    logits[:, ::5] = (logits[:, ::5] * 2).round() / 2
    return logits


@pytest.mark.parametrize("vocab_size", [4096, 50_001, 248_320])
def test_cuda_draws_the_tokens_that_cpu_draws_and_each_row_draws_them_alone(vocab_size):
    on_cpu, on_cuda = (sampler_on(device, 16, vocab_size) for device in ("cpu", "cuda"))
    alone = sampler_on("cuda", 16, vocab_size)
    slots = list(range(1, 17))
    for step in range(4):
        logits = logits_of(16, vocab_size, step)
        positions = torch.full((16,), step)
        here = on_cpu(logits.clone(), slots, positions)
        there = on_cuda(logits.cuda(), slots, positions.cuda())
        assert there.token_ids.tolist() == here.token_ids.tolist()
        for ours, theirs in zip(here.logprobs(), there.logprobs(), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert (ours.rank, ours.top_ids) == (theirs.rank, theirs.top_ids)
                assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-5)
        for row in range(16):
            single = alone(logits[row : row + 1].cuda(), [slots[row]], positions[:1].cuda())
            assert single.token_ids.tolist() == there.token_ids[row : row + 1].tolist()
            if there.logprobs()[row] is not None:
                assert single.logprobs()[0] == there.logprobs()[row]


def test_equal_logits_go_to_the_smallest_id_on_cuda():
    for vocab_size in (7, 4096, 248_320):
        values = torch.randint(0, 3, (9, vocab_size), generator=torch.Generator().manual_seed(1)).float()
        expected = [int((row == row.max()).nonzero()[0, 0]) for row in values]
        assert values.cuda().argmax(dim=-1).tolist() == expected
        assert [int(row.unsqueeze(0).cuda().argmax(dim=-1)) for row in values] == expected


def test_prompt_logprobs_on_cuda_do_not_depend_on_the_batch():
    logits, targets = logits_of(9, 50_001, 0).cuda(), (torch.arange(9) * 5000).cuda()
    whole = prompt_logprobs(logits, targets, 5)
    for row in range(9):
        assert prompt_logprobs(logits[row : row + 1].clone(), targets[row : row + 1], 5) == [whole[row]]


def test_installing_and_sampling_never_wait_for_the_device():
    sampler = sampler_on("cuda", 16, 4096)
    logits, positions = logits_of(16, 4096, 0).cuda(), torch.zeros(16, dtype=torch.int64).cuda()
    sampler(logits.clone(), list(range(1, 17)), positions)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slot in range(1, 17):
            sampler.tables.install(new_request(slot, seed=slot, suppressed=[5], **KINDS[(slot + 3) % len(KINDS)]))
            sampler(logits.clone(), list(range(1, 17)), positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
