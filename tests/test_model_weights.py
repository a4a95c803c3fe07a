"""Taking weights by name: each exactly once, in the right shape, folded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model_tools import write_model
from torch import Tensor

from bireme.checkpoint.loader import load_rank_weights
from bireme.config import ModelConfig
from bireme.distributed import NullGroup
from bireme.errors import CheckpointError
from bireme.models.qwen3_5 import Qwen3_5ForCausalLM


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> tuple[ModelConfig, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("model")
    config = write_model(folder, "kv2_group6_ratio3_untied_6_layers")
    return config, dict(load_rank_weights(folder, config, tp_rank=0, tp_size=1, dtype=torch.float32, device="cpu"))


def build(config: ModelConfig) -> Qwen3_5ForCausalLM:
    return Qwen3_5ForCausalLM(config, NullGroup(), dtype=torch.float32, device="cpu")


def test_the_model_expects_exactly_what_the_loader_yields(weights):
    config, tensors = weights
    expected = {name: shape for name, shape, _ in build(config).expected()}
    assert expected == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_weights_may_come_in_any_order(weights):
    config, tensors = weights
    straight, reverse = build(config), build(config)
    straight.load_weights(tensors.items())
    reverse.load_weights(reversed(tensors.items()))
    stored = list(straight.weights())
    assert len(stored) == len(tensors)
    assert all(torch.equal(one, other) for one, other in zip(stored, reverse.weights(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda items: items[:-1], "1 missing, the first is "),
        (lambda items: [*items, items[0]], "embed_tokens.weight came twice"),
        (
            lambda items: [*items, ("layers.0.mlp.router.weight", torch.ones(1))],
            "layers.0.mlp.router.weight is not part",
        ),
        (lambda items: [(items[0][0], items[0][1][:-1]), *items[1:]], r"embed_tokens.weight has shape \[299, 64\]"),
    ],
)
def test_a_missing_repeated_unknown_or_misshapen_weight_is_refused_by_name(
    weights, change: Callable[[list], list], message: str
):
    config, tensors = weights
    with pytest.raises(CheckpointError, match=message):
        build(config).load_weights(change(list(tensors.items())))


def test_norm_weights_and_decay_are_folded_once_in_float32(weights):
    config, tensors = weights
    model = build(config)
    model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    layer = model.layers[0]
    assert torch.equal(layer.input_layernorm.weight, tensors["layers.0.input_layernorm.weight"] + 1)
    assert layer.linear_attention is not None
    assert torch.equal(layer.linear_attention.norm_weight, tensors["layers.0.linear_attn.norm.weight"])
    assert torch.equal(layer.linear_attention.neg_exp_a, -tensors["layers.0.linear_attn.A_log"].exp())
    half = Qwen3_5ForCausalLM(config, NullGroup(), dtype=torch.bfloat16, device="cpu")
    half.load_weights(
        (name, tensor if name.endswith("A_log") else tensor.bfloat16()) for name, tensor in tensors.items()
    )
    assert half.norm.weight.dtype is torch.float32
    assert torch.equal(half.norm.weight, tensors["norm.weight"].bfloat16().float() + 1)
    assert half.layers[0].linear_attention is not None
    assert torch.equal(half.layers[0].linear_attention.neg_exp_a, layer.linear_attention.neg_exp_a)
