"""config.json and generation_config.json: what is understood, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bireme.checkpoint.hf_config import load_generation_defaults, load_model_config
from bireme.config import FULL_ATTENTION, LINEAR_ATTENTION, GenerationDefaults, RankShape, rank_shape
from bireme.errors import ConfigError

# The 27B model's text config, field by field as its page in the project's notes gives it.
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
ABSENT = object()
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes config.json with changes to the text config (ABSENT removes a field), nested on request."""

    def write(*, nested: bool = False, outer: dict[str, Any] | None = None, **changes: Any) -> Path:
        text = {name: value for name, value in (TEXT | changes).items() if value is not ABSENT}
        config = {"model_type": "qwen3_5", "text_config": text} if nested else text
        (tmp_path / "config.json").write_text(json.dumps(config | (outer or {})))
        return tmp_path

    return write


def test_a_flat_and_a_nested_config_are_read_alike(save: Save) -> None:
    flat = load_model_config(save())
    assert load_model_config(save(nested=True)) == flat
    assert (flat.hidden_size, flat.num_attention_heads, flat.num_key_value_heads) == (5120, 24, 4)
    assert (flat.num_layers, flat.num_linear_layers, flat.num_full_layers) == (64, 48, 16)
    assert flat.layer_types[:5] == (LINEAR_ATTENTION,) * 3 + (FULL_ATTENTION, LINEAR_ATTENTION)
    assert (flat.rope_theta, flat.rotary_dim, flat.rms_norm_eps) == (1e7, 64, 1e-6)
    assert (flat.dtype, flat.eos_token_ids, flat.tie_word_embeddings) == ("bfloat16", (248044,), False)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_text"])
def test_both_model_types_are_accepted(save: Save, model_type: str) -> None:
    assert load_model_config(save(model_type=model_type)).model_type == model_type


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 5e5}, "partial_rotary_factor": 0.5},
        {"rope_parameters": ABSENT, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {
            "rope_parameters": ABSENT,
            "rope_theta": 5e5,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10]},
        },
        {"rope_parameters": None, "rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ],
)
def test_old_and_new_spellings_of_rope_mean_the_same(save: Save, spelling: dict[str, Any]) -> None:
    model = load_model_config(save(**spelling))
    assert (model.rope_theta, model.rotary_dim) == (5e5, 128)


def test_the_rotated_share_is_a_quarter_when_nothing_says_otherwise(save: Save) -> None:
    assert load_model_config(save(rope_parameters={"rope_theta": 1e4})).rotary_dim == 64


def test_explicit_layer_types_win_over_the_interval(save: Save) -> None:
    types = [FULL_ATTENTION, LINEAR_ATTENTION]
    model = load_model_config(save(num_hidden_layers=2, layer_types=types))
    assert model.layer_types == tuple(types)


def test_the_interval_is_four_when_nothing_says_otherwise(save: Save) -> None:
    model = load_model_config(save(num_hidden_layers=5, full_attention_interval=ABSENT))
    assert model.layer_types == (LINEAR_ATTENTION,) * 3 + (FULL_ATTENTION, LINEAR_ATTENTION)


def test_eos_ids_of_both_files_are_joined(save: Save) -> None:
    folder = save(nested=True, outer={"eos_token_id": [5, 7]}, eos_token_id=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_model_config(folder).eos_token_ids == (9, 7, 5)


def test_a_nested_config_may_say_things_once_for_all_parts(save: Save) -> None:
    outer = {"tie_word_embeddings": True, "torch_dtype": "float16"}
    model = load_model_config(save(nested=True, outer=outer, tie_word_embeddings=ABSENT, dtype=ABSENT))
    assert (model.tie_word_embeddings, model.dtype) == (True, "float16")
    # The oracle's text model reads the text config's own value, whatever stands beside it.
    assert load_model_config(save(nested=True, outer=outer)).tie_word_embeddings is False


def test_a_config_written_by_transformers_is_read_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3_5TextConfig(num_hidden_layers=6, head_dim=128, rope_parameters={"rope_theta": 1e6})
    config.save_pretrained(tmp_path)
    model = load_model_config(tmp_path)
    assert model.layer_types == tuple(config.layer_types)
    assert (model.rope_theta, model.rotary_dim) == (1e6, 32)
    assert model.max_position_embeddings == config.max_position_embeddings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_next"}, ["model_type is 'qwen3_next'", "qwen3_5"]),
        ({"model_type": "qwen3_5_moe_text"}, ["model_type is 'qwen3_5_moe_text'"]),
        ({"num_experts": 128}, ["num_experts is 128", "mixture-of-experts"]),
        ({"moe_intermediate_size": 512}, ["moe_intermediate_size is 512"]),
        ({"num_experts_per_tok": 8}, ["num_experts_per_tok is 8"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config is set", "'fp8'"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ({"attention_bias": True}, ["attention_bias is True"]),
        ({"mlp_bias": True}, ["mlp_bias is True"]),
        ({"use_sliding_window": True}, ["use_sliding_window is True"]),
        ({"attn_output_gate": False}, ["attn_output_gate is False"]),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, ["layer_types[1] is 'sliding_attention'"]),
        ({"layer_types": ["full_attention"]}, ["layer_types is 1 entries long", "num_hidden_layers is 64"]),
        ({"layer_types": "full_attention"}, ["layer_types is 'full_attention'", "list"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e7}}, ["rope_type is 'yarn'"]),
        ({"rope_parameters": {"rope_theta": 1e7, "factor": 2.0}}, ["rope_parameters.factor is 2.0"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling.type is 'linear'"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e7}}}, ["rope_parameters.full_attention is set"]),
        ({"rope_parameters": 3}, ["rope_parameters is 3", "object"]),
        ({"rope_parameters": ABSENT}, ["rope_theta is missing"]),
        ({"rope_parameters": {"rope_theta": -1.0}}, ["rope_theta is -1.0", "positive"]),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}}, ["partial_rotary_factor is 1.5"]),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}, "head_dim": 12}, ["rotates 3 of"]),
        ({"num_attention_heads": 26}, ["num_attention_heads is 26", "num_key_value_heads (4)"]),
        ({"linear_num_value_heads": 40}, ["linear_num_value_heads is 40", "linear_num_key_heads (16)"]),
        ({"linear_conv_kernel_dim": 1}, ["linear_conv_kernel_dim is 1", "at least 2"]),
        ({"hidden_size": ABSENT}, ["hidden_size is missing"]),
        ({"vocab_size": "many"}, ["vocab_size is 'many'", "positive integer"]),
        ({"head_dim": 0}, ["head_dim is 0"]),
        ({"intermediate_size": True}, ["intermediate_size is True"]),
        ({"num_hidden_layers": -3}, ["num_hidden_layers is -3"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps is 0"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'"]),
        ({"eos_token_id": 248320}, ["eos_token_id holds 248320", "[0, vocab_size = 248320)"]),
        ({"eos_token_id": ["</s>"]}, ["eos_token_id holds '</s>'"]),
        ({"dtype": "float8"}, ["dtype is 'float8'"]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_what_cannot_be_run_is_refused_by_name(
    save: Save, nested: bool, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_model_config(save(nested=nested, **changes))
    message = str(raised.value)
    assert "config.json" in message
    for word in words:
        assert word in message


def test_a_config_without_a_model_type_is_refused(save: Save) -> None:
    with pytest.raises(ConfigError, match="model_type is None"):
        load_model_config(save(model_type=ABSENT))


def test_a_quantized_or_expert_model_is_refused_when_the_outer_config_says_so(save: Save) -> None:
    with pytest.raises(ConfigError, match="quantization_config"):
        load_model_config(save(nested=True, outer={"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ConfigError, match="'qwen3_5_moe'"):
        load_model_config(save(nested=True, outer={"model_type": "qwen3_5_moe"}))


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"text_config": 3, "model_type": "qwen3_5"}'])
def test_a_broken_config_is_refused_by_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_generation_defaults_are_read(save: Save) -> None:
    folder = save()
    assert load_generation_defaults(folder) == GenerationDefaults()
    content = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0,
        "repetition_penalty": 1.05,
    }
    content |= {"max_new_tokens": 2048, "transformers_version": "5.0"}
    (folder / "generation_config.json").write_text(json.dumps(content))
    assert load_generation_defaults(folder) == GenerationDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0, repetition_penalty=1.05, max_new_tokens=2048
    )


def test_a_checkpoint_that_asks_not_to_sample_is_greedy_by_default(save: Save) -> None:
    folder = save()
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    assert load_generation_defaults(folder).temperature == 0.0


@pytest.mark.parametrize("field", [{"temperature": "hot"}, {"top_k": 2.5}, {"top_p": True}, {"max_new_tokens": [1]}])
def test_a_generation_default_of_the_wrong_kind_is_refused(save: Save, field: dict[str, Any]) -> None:
    folder = save()
    (folder / "generation_config.json").write_text(json.dumps(field))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {next(iter(field))} is "):
        load_generation_defaults(folder)


@pytest.mark.parametrize(
    ("tp_size", "kv_heads", "replicas"), [(1, 4, 1), (2, 2, 1), (4, 1, 1), (8, 1, 2)], ids=lambda value: str(value)
)
def test_the_27b_geometry_splits_over_up_to_eight_ranks(save: Save, tp_size: int, kv_heads: int, replicas: int) -> None:
    assert rank_shape(load_model_config(save()), tp_size) == RankShape(
        tp_size=tp_size,
        num_attention_heads=24 // tp_size,
        num_key_value_heads=kv_heads,
        kv_replicas=replicas,
        linear_num_key_heads=16 // tp_size,
        linear_num_value_heads=48 // tp_size,
        intermediate_size=17408 // tp_size,
        vocab_size=248320 // tp_size,
    )


@pytest.mark.parametrize(
    ("changes", "tp_size", "words"),
    [
        ({}, 0, ["--tensor-parallel-size is 0", "at least 1"]),
        ({}, 16, ["num_attention_heads is 24", "16"]),
        ({}, 3, ["num_key_value_heads is 4", "3"]),
        ({}, 6, ["num_key_value_heads is 4", "6"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, ["num_attention_heads is 6", "4"]),
        ({"linear_num_key_heads": 2, "linear_num_value_heads": 8}, 4, ["linear_num_key_heads is 2", "4"]),
        ({"linear_num_key_heads": 3, "linear_num_value_heads": 9}, 2, ["linear_num_key_heads is 3", "2"]),
        ({"intermediate_size": 1002}, 4, ["intermediate_size is 1002", "4"]),
    ],
)
def test_a_split_that_does_not_divide_is_refused_with_the_field_and_both_numbers(
    save: Save, changes: dict[str, Any], tp_size: int, words: list[str]
) -> None:
    model = load_model_config(save(**changes))
    with pytest.raises(ConfigError) as raised:
        rank_shape(model, tp_size)
    for word in [*words, "--tensor-parallel-size"]:
        assert word in str(raised.value)


def test_a_vocabulary_that_does_not_divide_is_rounded_up(save: Save) -> None:
    model = load_model_config(save(vocab_size=248319, eos_token_id=ABSENT))
    assert rank_shape(model, 4).vocab_size == 62080


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1},
        {"temperature": 10**400, "do_sample": False},
        {"top_p": 5},
        {"top_p": 0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"max_new_tokens": -5},
        {"max_new_tokens": 0},
    ],
    ids=str,
)
def test_a_generation_default_out_of_its_range_is_refused_by_file_and_field(save: Save, field: dict[str, Any]) -> None:
    folder = save()
    (folder / "generation_config.json").write_text(json.dumps(field))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {next(iter(field))} is "):
        load_generation_defaults(folder)


def test_an_empty_model_name_is_refused_as_such() -> None:
    with pytest.raises(ConfigError, match="empty"):
        load_model_config("")
