"""The offline API on real ranks with a tiny random model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bireme import LLM, SamplingParams

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 32}
PROMPTS = [[1], [7, 8, 9], list(range(64)), list(range(100, 230)), [5] * 65]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint(**TINY))


def answers(folder: str, tp_size: int, params: SamplingParams, **options: int) -> list[list[int]]:
    with LLM(folder, tensor_parallel_size=tp_size, dtype="float32", **options) as llm:
        return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_two_ranks_give_the_tokens_of_one_greedy_and_seeded_and_however_prompts_are_cut(folder: str) -> None:
    for params in (
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1, seed=7, top_p=0.9, max_tokens=12, ignore_eos=True),
    ):
        alone = answers(folder, 1, params)
        assert answers(folder, 2, params) == alone
        assert answers(folder, 1, params, max_num_seqs=2, max_num_batched_tokens=64) == alone


def test_greedy_answers_are_those_of_transformers(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = answers(folder, 1, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for prompt, token_ids in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + token_ids])).logits[0]
        # Teacher forcing: by induction the answer is the greedy one exactly when each token is its position's argmax.
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == token_ids


def test_prompt_logprobs_are_the_log_softmax_of_transformers(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompt = PROMPTS[3]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, logprobs=3)
    with LLM(folder, dtype="float32", max_num_batched_tokens=64, max_num_seqs=4) as llm:
        result = llm.generate([prompt], params, use_tqdm=False)[0]
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    for position, entry in enumerate(result.prompt_logprobs[1:]):
        assert entry is not None
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[position, token_id]), abs=1e-4)
        assert prompt[position + 1] in entry
    assert result.outputs[0].logprobs is not None
    best = max(result.outputs[0].logprobs[0].values(), key=lambda entry: entry.logprob)
    assert best.rank == 1
    assert best.logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)


def test_a_script_that_forgets_to_close_ends_by_itself_and_leaves_no_rank(folder: str) -> None:
    script = f"""
from bireme import LLM, SamplingParams
llm = LLM({folder!r}, tensor_parallel_size=2)
params = SamplingParams(max_tokens=4, ignore_eos=True)
print(len(llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0].token_ids))
"""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert out.strip() == "4"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
