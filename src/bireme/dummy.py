"""A tiny random Qwen3.5 checkpoint in Hugging Face form, complete with tokenizer and chat template.

For tests, the demo and benchmarks: the text means nothing, everything else is as in a real checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from bireme.checkpoint.hf_config import load_model_config
from bireme.checkpoint.loader import random_tensor
from bireme.checkpoint.names import Layout
from bireme.checkpoint.shard_spec import checkpoint_shapes
from bireme.config import ModelConfig

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
DEFAULT_VOCAB_SIZE = 512
# Where Qwen3.5's tokenizer cuts text before merging; AutoTokenizer assumes these cuts for model_type qwen3_5.
_WORD_PATTERNS = (
    r"'(?i:[sdmt]|ll|ve|re)",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"\p{N}",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
_SMALLEST_TOKENIZER = 256 + len(SPECIAL_TOKENS) + len(ADDED_TOKENS)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": DEFAULT_VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "full_attention_interval": 4,
    "layer_types": None,
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
}


def write_dummy_checkpoint(
    folder: str | Path,
    *,
    seed: int = 0,
    layout: Literal["text", "multimodal", "language_model"] = "text",
    num_shards: int = 1,
    tokenizer: bool = True,
    tokenizer_vocab_size: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str = "cpu",
    **config_overrides: Any,
) -> ModelConfig:
    """Write a checkpoint into ``folder`` (made if absent) and return its config.

    Args:
        layout: "text" has a flat config.json and the prefix ``model.``; "multimodal" nests ``text_config``, has the
            prefix ``model.language_model.`` and a few ``mtp.*`` and ``model.visual.*`` tensors; "language_model" is the
            same with the prefix ``language_model.model.``.
        num_shards: safetensors files; more than one come with an index.
        tokenizer: also write a byte-level BPE tokenizer with Qwen's special tokens and a chat template.
        tokenizer_vocab_size: ids that the tokenizer knows (default: the smaller of vocab_size and 512); the ids from
            there to vocab_size have no token, as in real checkpoints.
        dtype: of all tensors but A_log, which is float32.
        device: where the weights are drawn: a GPU is quicker, and draws others.
        config_overrides: text config fields of config.json, e.g. ``hidden_size=64``, ``tie_word_embeddings=False``,
            ``layer_types=[...]`` (sets num_hidden_layers), ``rope_theta``.

    Raises:
        ValueError: an unknown override, or a vocabulary too small for the tokenizer.
        ConfigError: overrides that make no valid model.
    """
    write_dummy_folder(
        folder,
        layout=layout,
        tokenizer=tokenizer,
        tokenizer_vocab_size=tokenizer_vocab_size,
        dtype=dtype,
        **config_overrides,
    )
    folder = Path(folder)
    model = load_model_config(folder)
    _write_weights(folder, model, Layout[layout.upper()], num_shards, getattr(torch, dtype), seed, device)
    return model


def write_dummy_folder(
    folder: str | Path,
    *,
    layout: Literal["text", "multimodal", "language_model"] = "text",
    tokenizer: bool = True,
    tokenizer_vocab_size: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    **config_overrides: Any,
) -> None:
    """Write what a checkpoint has beside its weights; arguments and errors as in ``write_dummy_checkpoint``."""
    unknown = sorted(set(config_overrides) - set(_DEFAULTS))
    if unknown:
        raise ValueError(f"the dummy checkpoint does not know {', '.join(unknown)}; it knows {', '.join(_DEFAULTS)}")
    fields = _DEFAULTS | config_overrides
    if fields["layer_types"] is not None:
        fields["layer_types"] = list(fields["layer_types"])
        fields["num_hidden_layers"] = len(fields["layer_types"])
    if tokenizer_vocab_size is None:
        tokenizer_vocab_size = min(fields["vocab_size"], DEFAULT_VOCAB_SIZE)
    if tokenizer and not _SMALLEST_TOKENIZER <= tokenizer_vocab_size <= fields["vocab_size"]:
        raise ValueError(
            f"a tokenizer of {tokenizer_vocab_size} ids cannot be written: it needs at least {_SMALLEST_TOKENIZER} and "
            f"at most vocab_size = {fields['vocab_size']} (or pass tokenizer=False)"
        )

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    first_special = tokenizer_vocab_size - len(ADDED_TOKENS) - len(SPECIAL_TOKENS) if tokenizer else 0
    endoftext, _, im_end = range(first_special, first_special + 3)
    _write_json(folder / "config.json", _config(fields, layout, dtype, eos_token_id=endoftext))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": endoftext,
            "eos_token_id": [im_end, endoftext],
            "pad_token_id": endoftext,
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
        },
    )
    if tokenizer:
        _write_tokenizer(folder, tokenizer_vocab_size)


def _config(fields: dict[str, Any], layout: str, dtype: str, eos_token_id: int) -> dict[str, Any]:
    text = {name: value for name, value in fields.items() if name not in ("rope_theta", "partial_rotary_factor")}
    if text["layer_types"] is None:
        del text["layer_types"]
    pairs = int(fields["head_dim"] * fields["partial_rotary_factor"]) // 2
    text |= {
        "model_type": "qwen3_5_text",
        "dtype": dtype,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": eos_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": fields["rope_theta"],
            "partial_rotary_factor": fields["partial_rotary_factor"],
            "mrope_interleaved": True,
            "mrope_section": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3],
        },
    }
    if layout == "text":
        return {"architectures": ["Qwen3_5ForCausalLM"], **text}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": fields["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5_vision",
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": fields["hidden_size"],
        },
    }


def _write_weights(
    folder: Path, model: ModelConfig, layout: Layout, num_shards: int, dtype: torch.dtype, seed: int, device: str
) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for bare, shape in checkpoint_shapes(model).items():
        tensor = random_tensor(bare, shape, shape[-1], generator)
        tensors[layout.full_name(bare)] = (tensor if bare.endswith("A_log") else tensor.to(dtype)).cpu()
    if layout is not Layout.TEXT:
        visual = "model.visual" if layout is Layout.MULTIMODAL else "visual"
        unread = {f"{visual}.patch_embed.proj.bias": 32, f"{visual}.merger.norm.bias": 32, "mtp.norm.weight": 8}
        for name, rows in unread.items():
            tensors[name] = torch.randn(rows, generator=generator, device=device).to(dtype).cpu()
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = names[len(names) * i // num_shards : len(names) * (i + 1) // num_shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total_size}, "weight_map": weight_map},
    )


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(_WORD_PATTERNS)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    num_base = vocab_size - len(SPECIAL_TOKENS) - len(ADDED_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=num_base,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    if tokenizer.get_vocab_size() != num_base:
        raise ValueError(
            f"a tokenizer of {vocab_size} ids cannot be trained: the text yields only "
            f"{tokenizer.get_vocab_size() + vocab_size - num_base}"
        )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is not none and content is defined -%}
{%- for part in content -%}
{%- if part.type != 'text' -%}{{ raise_exception('only text content is supported, not ' ~ part.type) }}{%- endif -%}
{{ part.text }}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set first = messages[0] if messages else none -%}
{%- set system = text_of(first.content) if first and first.role == 'system' else '' -%}
{%- if tools -%}
{{ '<|im_start|>system\\nYou can call these functions:\\n<tools>' }}
{%- for tool in tools -%}{{ '\\n' ~ (tool | tojson) }}{%- endfor -%}
{{ '\\n</tools>\\nTo call one, write:\\n<tool_call>\\n<function=NAME>\\n' }}
{{- '<parameter=NAME>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>' }}
{%- if system -%}{{ '\\n\\n' ~ system }}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- elif system -%}
{{ '<|im_start|>system\\n' ~ system ~ '<|im_end|>\\n' }}
{%- endif -%}
{%- set turn = namespace(last_user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set turn.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = text_of(message.content) -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}{{ raise_exception('the system message must come first') }}{%- endif -%}
{%- elif message.role == 'user' -%}
{{ '<|im_start|>user\\n' ~ content ~ '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}
{%- set thought = message.reasoning_content or '' -%}
{%- if not thought and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim -%}
{%- set content = content.split('</think>')[-1] | trim -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if thought and loop.index0 > turn.last_user -%}{{ '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{%- endif -%}
{{ content }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '\\n' if not loop.first else '\\n\\n' if content else '' }}
{{- '<tool_call>\\n<function=' ~ function.name ~ '>\\n' }}
{%- for name, value in function.arguments | items -%}
{{ '<parameter=' ~ name ~ '>\\n' ~ (value if value is string else value | tojson) ~ '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' ~ content ~ '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{ raise_exception('unknown role ' ~ message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else -%}{{ '<think>\\n' }}{%- endif -%}
{%- endif -%}
"""
"""System, user, assistant, tool messages in the manner of Qwen3.5: the prompt opens the thought, or also closes it."""

_TEXT = """\
The galley left the harbour before the sun was up, with two banks of oars on either side and a drum to keep the time.
Every rower pulls when the drum sounds; nobody rows alone, and nobody waits for a slower bench than their own.
The captain reads the wind, the pilot reads the water, and the cook reads whatever book the last passenger left behind.
"How far is it to the island?" asked the boy. "Twelve hours with this wind," said the pilot, "and thirty without it."
By noon the coast was a thin grey line, and by evening there was nothing around them but water and the first stars.
They carried olives, copper, rope, two hundred jars of oil and one very old map, which was wrong in most of its details.
In 1402 such a ship would have needed 180 rowers; a later one made do with 96, and went 7.5 knots in a calm sea.
It isn't the strongest bench that makes a ship fast. It's the one that doesn't break the rhythm when the others do.
Question: what is the sum of 17 and 25? Answer: 42. Question: what is 9 times 8? Answer: 72.
A function takes a list of numbers and returns the largest one: def largest(numbers): return max(numbers)
{"name": "weather", "arguments": {"city": "Genoa", "days": 3, "unit": "celsius"}}
Der Wind kam von Süden, und die See war ruhig. La mer était calme, et le vent venait du sud. El viento venía del sur.
船は夜明け前に港を出た。海は静かで、風は南から吹いていた。 배는 새벽이 되기 전에 항구를 떠났다. 船在日出之前离开了港口。
Ship signals: 🚢 🌊 ⭐ 🧭, and a lantern at the stern.
"""
