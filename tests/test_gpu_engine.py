"""The whole engine on a CUDA device: the tokens of transformers there, on one rank and on two that share the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bireme import LLM, SamplingParams
from bireme.pocket import model_path

pytestmark = pytest.mark.gpu

PROMPTS = [[1], [7, 8, 9], list(range(64)), list(range(100, 230)), [5] * 65]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint(hidden_size=64, intermediate_size=64, num_hidden_layers=4, head_dim=32))


def answers(folder: str, params: SamplingParams = GREEDY, **options: object) -> list[list[int]]:
    with LLM(folder, device="cuda:0", max_model_len=1024, max_num_seqs=8, **options) as llm:
        return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_greedy_answers_on_cuda_are_those_of_transformers_there(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to("cuda")
    for prompt, token_ids in zip(PROMPTS, answers(folder, dtype="float32"), strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + token_ids], device="cuda")).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == token_ids


def test_seeded_draws_on_cuda_do_not_depend_on_the_number_of_ranks(folder: str) -> None:
    seeded = SamplingParams(temperature=1, seed=7, top_p=0.9, max_tokens=24, ignore_eos=True)
    alone = answers(folder, seeded, dtype="float32")
    assert answers(folder, seeded, dtype="float32", tensor_parallel_size=2) == alone


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_pocket_model_answers_in_bfloat16(tp_size: int) -> None:
    with LLM(model_path(), device="cuda:0", dtype="bfloat16", tensor_parallel_size=tp_size, max_num_seqs=8) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        result = llm.chat(
            question, SamplingParams(temperature=0, max_tokens=16), chat_template_kwargs={"enable_thinking": False}
        )
    assert "Paris" in result[0].outputs[0].text
