"""The model against transformers, in float32, on random models with no weight at its neutral value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from model_tools import GEOMETRIES, TOLERANCE, Driver, load_model, write_model
from torch import Tensor

from bireme.checkpoint.loader import load_rank_weights
from bireme.config import ModelConfig
from bireme.distributed import NullGroup
from bireme.models.qwen3_5 import Qwen3_5ForCausalLM

NUM_PROMPT = 130
NUM_DECODE = 32


@pytest.fixture(scope="module", params=GEOMETRIES)
def case(request, tmp_path_factory) -> tuple[Path, ModelConfig, list[int], Tensor]:
    """(folder, config, token ids, the oracle's logits at every position)."""
    import transformers

    folder = tmp_path_factory.mktemp("model")
    config = write_model(folder, request.param, seed=1)
    oracle = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    token_ids = torch.randint(0, config.vocab_size, (NUM_PROMPT + NUM_DECODE,), generator=generator)
    with torch.inference_mode():
        logits = oracle(token_ids[None], use_cache=False).logits[0]
    return folder, config, token_ids.tolist(), logits.clone()


def test_prefill_and_decode_logits_equal_transformers_at_every_position(case):
    folder, config, token_ids, expected = case
    driver = Driver(load_model(folder, config))
    driver.open(3, len(token_ids))
    driver.fill_with_nan()
    _, (prompt,) = driver.step(prefill=[(3, token_ids[:NUM_PROMPT])])
    assert prompt.shape == (NUM_PROMPT, config.vocab_size)
    assert prompt.dtype is torch.float32
    assert (prompt - expected[:NUM_PROMPT]).abs().max() < TOLERANCE
    for position in range(NUM_PROMPT, len(token_ids)):
        logits, _ = driver.step(decode=[(3, token_ids[position])])
        assert (logits[0] - expected[position]).abs().max() < TOLERANCE, f"decode at position {position}"


MISTAKES: dict[str, Callable[[str, Tensor], Tensor]] = {
    "1 added to the gated norm": lambda name, w: w + 1 if name.endswith("linear_attn.norm.weight") else w,
    "no 1 added to the layer norms": lambda name, w: w - 1 if name.endswith("layernorm.weight") else w,
    "1 added twice to the final norm": lambda name, w: w + 1 if name == "norm.weight" else w,
    "no 1 added to q_norm": lambda name, w: w - 1 if name.endswith("q_norm.weight") else w,
    "no 1 added to k_norm": lambda name, w: w - 1 if name.endswith("k_norm.weight") else w,
    "dt_bias of the next head": lambda name, w: w.roll(1) if name.endswith("dt_bias") else w,
    "A_log of the next head": lambda name, w: w.roll(1) if name.endswith("A_log") else w,
    "convolution taps reversed": lambda name, w: w.flip(-1) if name.endswith("conv1d.weight") else w,
    "gates and queries swapped": lambda name, w: swap_gates(w) if name.endswith("qkv_proj.weight") else w,
    "gate and up swapped": lambda name, w: w.roll(len(w) // 2, 0) if name.endswith("gate_up_proj.weight") else w,
}


def swap_gates(qkv: Tensor) -> Tensor:
    """Exchange the first two head-sized groups of rows: query and gate of head 0."""
    head_dim = 32
    return torch.cat((qkv[head_dim : 2 * head_dim], qkv[:head_dim], qkv[2 * head_dim :]))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_misread_weight_would_show_in_the_logits(case, mistake):
    folder, config, token_ids, expected = case

    def misread() -> Iterator[tuple[str, Tensor]]:
        weights = load_rank_weights(folder, config, tp_rank=0, tp_size=1, dtype=torch.float32, device="cpu")
        for name, tensor in weights:
            yield name, MISTAKES[mistake](name, tensor)

    model = Qwen3_5ForCausalLM(config, NullGroup(), dtype=torch.float32, device="cpu")
    model.load_weights(misread())
    driver = Driver(model)
    driver.open(1, 40)
    _, (logits,) = driver.step(prefill=[(1, token_ids[:40])])
    assert (logits - expected[:40]).abs().max() > 100 * TOLERANCE


def test_bfloat16_runs_and_stays_near_float32(case):
    folder, config, token_ids, expected = case
    model = load_model(folder, config, dtype=torch.bfloat16)
    driver = Driver(model)
    driver.open(2, len(token_ids))
    driver.fill_with_nan()
    _, (prompt,) = driver.step(prefill=[(2, token_ids[:NUM_PROMPT])])
    rows = [prompt]
    for position in range(NUM_PROMPT, len(token_ids)):
        rows.append(driver.step(decode=[(2, token_ids[position])])[0])
    logits = torch.cat(rows)
    assert logits.dtype is torch.float32
    assert driver.kv.k.dtype is torch.bfloat16
    assert driver.state.conv.dtype is torch.bfloat16
    assert driver.state.recurrent.dtype is torch.float32
    difference = (logits.log_softmax(-1) - expected.log_softmax(-1)).abs()
    assert difference.mean() < 0.1
    assert difference[NUM_PROMPT:].mean() < 0.1
