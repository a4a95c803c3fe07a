"""The dummy checkpoint is a real one: transformers loads and runs it, tokenizer and chat template included."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from bireme.checkpoint.hf_config import load_generation_defaults, load_model_config
from bireme.config import ModelConfig
from bireme.dummy import ADDED_TOKENS, SPECIAL_TOKENS, write_dummy_checkpoint
from bireme.errors import ConfigError

Write = Callable[..., Path]
SMALL: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=16)
SMALL |= dict(linear_key_head_dim=8, linear_value_head_dim=8)


@pytest.mark.parametrize("layout", ["text", "multimodal"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_it_with_no_key_missing_or_left_over(checkpoint: Write, layout: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    num_shards = 1 if tied else 3
    folder = checkpoint(**SMALL, layout=layout, tie_word_embeddings=tied, num_shards=num_shards)
    oracle, info = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    model = load_model_config(folder)
    config = oracle.config
    for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "linear_num_value_heads"):
        assert getattr(config, name) == getattr(model, name)
    assert tuple(config.layer_types) == model.layer_types
    assert config.rope_parameters["rope_theta"] == model.rope_theta
    assert config.rope_parameters["partial_rotary_factor"] * config.head_dim == model.rotary_dim
    assert config.tie_word_embeddings is model.tie_word_embeddings is tied


def test_the_oracle_writes_varied_text_with_it(checkpoint: Write) -> None:
    """Random weights must not collapse to one token, or equality of greedy outputs would show nothing."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.Qwen3_5ForCausalLM.from_pretrained(checkpoint())
    prompt = torch.tensor([[40, 41, 42]])
    mask = torch.ones_like(prompt)
    with torch.no_grad():
        logits = oracle(prompt).logits
        output = oracle.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=24, eos_token_id=None)
    assert 0.5 < float(logits.std()) < 5.0
    assert len(set(output[0, 3:].tolist())) > 8


@pytest.mark.parametrize("layout", ["text", "multimodal"])
def test_transformers_and_tokenizers_agree_on_its_tokenizer(checkpoint: Write, layout: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = checkpoint(**SMALL, layout=layout)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (
        "The galley left<|im_end|> it's 123 배는 🚢 <think>x</think>\n\n  a",
        "naïve, WE'LL see\r\n\tdef f(x): return x**2  ",
        "日本語とe\u0301",
    ):
        encoded = ours.encode(text)
        assert theirs(text).input_ids == encoded.ids
        assert ours.decode(encoded.ids, skip_special_tokens=False) == text.replace("e\u0301", "é")
    assert theirs.eos_token_id == ours.token_to_id("<|im_end|>")


def test_its_special_tokens_are_single_ids_at_the_end_of_the_vocabulary(checkpoint: Write) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint(**SMALL) / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS + ADDED_TOKENS]
    assert ids == list(range(503, 512))
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.encode("<|im_start|><tool_call>").ids == [ids[1], ids[5]]
    assert tokenizer.decode([ids[1], ids[3], ids[2]]) == "<think>", "only the three <|…|> tokens are special"


def test_its_eos_ids_are_those_of_the_tokenizer(checkpoint: Write) -> None:
    folder = checkpoint(**SMALL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = {tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
    assert set(load_model_config(folder).eos_token_ids) == expected
    assert load_generation_defaults(folder).temperature == 0.7


def render(folder: Path, **arguments: Any) -> str:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(arguments.pop("messages"), tokenize=False, **arguments)


def test_its_template_opens_the_thought_or_closes_it_at_once(checkpoint: Write) -> None:
    folder = checkpoint(**SMALL)
    parts = [{"type": "text", "text": "Hi"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(folder, messages=messages) == start
    asked = render(folder, messages=messages, add_generation_prompt=True)
    assert asked == f"{start}<|im_start|>assistant\n<think>\n"
    quiet = render(folder, messages=messages, add_generation_prompt=True, enable_thinking=False)
    assert quiet == f"{start}<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_its_template_drops_old_thoughts_and_writes_tool_calls_as_xml(checkpoint: Write) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sea", "depth": 3}}}
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo"},
        {"role": "user", "content": "Three"},
        {"role": "assistant", "content": "", "reasoning_content": "see", "tool_calls": [call]},
        {"role": "tool", "content": "deep"},
    ]
    text = render(checkpoint(**SMALL), messages=messages)
    assert "<|im_start|>assistant\nTwo<|im_end|>\n" in text
    assert "<|im_start|>assistant\n<think>\nsee\n</think>\n\n<tool_call>\n<function=look>\n" in text
    assert "<parameter=at>\nsea\n</parameter>\n<parameter=depth>\n3\n</parameter>\n</function>\n</tool_call>" in text
    assert text.endswith("<|im_start|>user\n<tool_response>\ndeep\n</tool_response><|im_end|>\n")


def test_no_norm_weight_or_bias_is_neutral(checkpoint: Write) -> None:
    for name, tensor in load_file(checkpoint(**SMALL) / "model.safetensors").items():
        assert tensor.isfinite().all()
        if tensor.dim() == 1:
            neutral = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
            assert (tensor - neutral).abs().mean() > 0.05, name


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    files = []
    for i, seed in enumerate((5, 5, 6)):
        write_dummy_checkpoint(tmp_path / str(i), seed=seed, tokenizer=False, **SMALL)
        files.append((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    layers = ["linear_attention", "full_attention", "linear_attention"]
    rope = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    model = write_dummy_checkpoint(tmp_path, tokenizer=False, vocab_size=31, layer_types=layers, **rope, **SMALL)
    assert isinstance(model, ModelConfig)
    assert (model.vocab_size, model.layer_types, model.rope_theta, model.rotary_dim) == (31, tuple(layers), 5000.0, 8)
    assert not (tmp_path / "tokenizer.json").exists()
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 3


def test_a_misspelt_override_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not know num_layers"):
        write_dummy_checkpoint(tmp_path, num_layers=3)


@pytest.mark.parametrize("options", [{"vocab_size": 100}, {"tokenizer_vocab_size": 513}, {"tokenizer_vocab_size": 20}])
def test_a_vocabulary_that_cannot_hold_the_tokenizer_is_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs at least 265"):
        write_dummy_checkpoint(tmp_path, **options)


def test_an_invalid_geometry_is_refused_like_any_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads is 4, which num_key_value_heads \(3\) does not divide"):
        write_dummy_checkpoint(tmp_path, num_key_value_heads=3)
