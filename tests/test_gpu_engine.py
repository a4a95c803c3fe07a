"""The whole engine on a CUDA device: the tokens of transformers there, on one rank and on two that share the GPU.

Where there is none, the same tests of the pocket model and of the server run on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bireme import LLM, SamplingParams
from bireme.local_server import running_server
from bireme.pocket import model_path

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]

PROMPTS = [[1], [7, 8, 9], list(range(64)), list(range(100, 230)), [5] * 65]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint(hidden_size=64, intermediate_size=64, num_hidden_layers=4, head_dim=32))


def answers(folder: str, params: SamplingParams = GREEDY, **options: object) -> list[list[int]]:
    with LLM(folder, device="cuda:0", max_model_len=1024, max_num_seqs=8, **options) as llm:
        return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.gpu
def test_greedy_answers_on_cuda_are_those_of_transformers_there(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to("cuda")
    for prompt, token_ids in zip(PROMPTS, answers(folder, dtype="float32"), strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + token_ids], device="cuda")).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == token_ids


@pytest.mark.gpu
def test_seeded_draws_on_cuda_do_not_depend_on_the_number_of_ranks(folder: str) -> None:
    seeded = SamplingParams(temperature=1, seed=7, top_p=0.9, max_tokens=24, ignore_eos=True)
    alone = answers(folder, seeded, dtype="float32")
    assert answers(folder, seeded, dtype="float32", tensor_parallel_size=2) == alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_pocket_model_answers_in_bfloat16(device: str, tp_size: int, enforce_eager: bool) -> None:
    if device == "cpu" and enforce_eager:
        pytest.skip("a CPU has no graphs: both ways are one")
    conversations = [
        [{"role": "user", "content": f"What is the capital of {country}?"}] for country in ("France", "Italy", "Japan")
    ]
    with LLM(
        model_path(),
        device=device,
        dtype="bfloat16",
        tensor_parallel_size=tp_size,
        enforce_eager=enforce_eager,
        max_num_seqs=8,
        kv_cache_memory_bytes=400 << 20,
    ) as llm:
        results = llm.chat(
            conversations, SamplingParams(temperature=0, max_tokens=16), chat_template_kwargs={"enable_thinking": False}
        )
    for result, capital in zip(results, ("Paris", "Rome", "Tokyo"), strict=True):
        assert capital in result.outputs[0].text


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_server_answers_twenty_requests_at_once_and_leaves_cleanly(device: str, tp_size: int) -> None:
    flags = ["--device", device, "--tp", str(tp_size), "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(400 << 20)]
    question = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with running_server("pocket", *flags) as server:

        def ask(_: int) -> str:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=question, timeout=120)
            answer.raise_for_status()
            return answer.json()["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(ask, range(20)))
        assert server.stop() == 0
    assert all("Paris" in answer for answer in answers)
