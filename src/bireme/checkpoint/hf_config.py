"""``config.json`` and ``generation_config.json`` of a Hugging Face checkpoint folder → ModelConfig (no torch).

Whatever the file asks for and the engine does not do is refused here, by the name of the field.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bireme.config import FULL_ATTENTION, LINEAR_ATTENTION, GenerationDefaults, ModelConfig
from bireme.errors import ConfigError, InvalidRequestError
from bireme.types import SamplingParams

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
DTYPES = ("float32", "bfloat16", "float16")

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)
_MUST_BE_ABSENT_OR_FALSE = ("attention_bias", "mlp_bias", "use_sliding_window")
_EXPERT_FIELDS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_PLAIN_ROPE_TYPES = ("default", "mrope")  # the three rows of mrope positions are equal for text: plain rope


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read the text model's sizes from ``folder/config.json``, flat or nested under ``text_config``.

    ``eos_token_ids`` joins those of generation_config.json and config.json.

    Raises:
        ConfigError: not a checkpoint folder; a missing or malformed field; anything the engine does not implement.
    """
    path = checkpoint_folder(folder) / "config.json"
    outer = _read_json(path)
    fields = _Fields(path, outer)
    text = fields.text

    model_type = fields.either("model_type")
    for value in (model_type, outer.get("model_type", model_type)):
        if value not in MODEL_TYPES:
            raise fields.error("model_type", f"{value!r}: Bireme runs {' and '.join(MODEL_TYPES)} (dense Qwen3.5)")
    _refuse_unimplemented(fields)
    sizes = {name: fields.size(name) for name in _SIZES}
    if sizes["linear_conv_kernel_dim"] < 2:
        raise fields.error("linear_conv_kernel_dim", f"{sizes['linear_conv_kernel_dim']}: it must be at least 2")
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if sizes[many] % sizes[few]:
            raise fields.error(many, f"{sizes[many]}, which {few} ({sizes[few]}) does not divide")
    rope_theta, rotary_dim = _rope(fields, sizes["head_dim"])
    tied = text.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))
    if not isinstance(tied, bool):
        raise fields.error("tie_word_embeddings", f"{tied!r}: it must be true or false")
    return ModelConfig(
        model_type=model_type,
        layer_types=_layer_types(fields),
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        rms_norm_eps=fields.positive("rms_norm_eps", fields.require("rms_norm_eps")),
        tie_word_embeddings=tied,
        eos_token_ids=_eos_token_ids(path, fields, sizes["vocab_size"]),
        dtype=_dtype(fields),
        **sizes,
    )


def load_generation_defaults(folder: str | Path) -> GenerationDefaults:
    """Sampling defaults of ``folder/generation_config.json``; all None when there is no such file.

    ``"do_sample": false`` means greedy: temperature 0.

    Raises:
        ConfigError: not a checkpoint folder, or a value that SamplingParams would not take.
    """
    path = checkpoint_folder(folder) / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    content = _read_json(path)

    values = {name: content[name] for name in GenerationDefaults.__struct_fields__ if content.get(name) is not None}
    for name, value in values.items():
        param = "max_tokens" if name == "max_new_tokens" else name
        try:
            SamplingParams(**{param: value})
        except InvalidRequestError as error:
            raise ConfigError(f"{path}: {name}{str(error).removeprefix(param)}") from error
        except OverflowError as error:
            raise ConfigError(f"{path}: {name} is no number that can be used: {error}") from error
    if content.get("do_sample") is False:
        values["temperature"] = 0.0
    return GenerationDefaults(**values)


def checkpoint_folder(folder: str | Path) -> Path:
    """``folder`` as a Path that is known to be a folder with a config.json.

    Raises:
        ConfigError: it does not exist, is a file, or holds no config.json.
    """
    if not str(folder):
        raise ConfigError("cannot load the model: its name is empty (a folder, or pocket)")
    path = Path(folder)
    if not path.exists():
        raise ConfigError(f"cannot load the model: the folder {path} does not exist (Bireme loads local folders only)")
    if not path.is_dir():
        raise ConfigError(
            f"cannot load the model: {path} is a file; pass the folder that holds config.json and the safetensors files"
        )
    if not (path / "config.json").is_file():
        names = sorted(entry.name for entry in path.iterdir())
        found = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"
        raise ConfigError(
            f"cannot load the model: {path} is not a checkpoint, it has no config.json (it holds {found})"
        )
    return path


class _Fields:
    """Checked access to the text config's fields; every error names file and field."""

    def __init__(self, path: Path, outer: dict[str, Any]) -> None:
        self.path = path
        self.outer = outer
        text = outer.get("text_config", outer)
        if not isinstance(text, dict):
            raise ConfigError(f"{path}: text_config is {text!r}: it must be an object")
        self.text = text

    def error(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {name} is {what}")

    def require(self, name: str) -> Any:
        value = self.text.get(name)
        if value is None:
            nested = " from text_config" if self.text is not self.outer else ""
            raise ConfigError(f"{self.path}: {name} is missing{nested}")
        return value

    def size(self, name: str) -> int:
        value = self.require(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"{value!r}: it must be a positive integer")
        return value

    def positive(self, name: str, value: Any) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value <= 0:
            raise self.error(name, f"{value!r}: it must be a positive number")
        return float(value)

    def either(self, name: str) -> Any:
        """The text config's value, else the outer config's, else None."""
        value = self.text.get(name)
        return self.outer.get(name) if value is None else value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"cannot read {path}: it holds {type(content).__name__}, not an object")
    return content


def _refuse_unimplemented(fields: _Fields) -> None:
    for name in _EXPERT_FIELDS:
        if fields.either(name):
            raise fields.error(name, f"{fields.either(name)!r}: mixture-of-experts models are not supported")
    for name in ("quantization_config", "compression_config"):
        quantization = fields.either(name)
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise fields.error(name, f"set (quant_method {method!r}): quantized checkpoints are not supported")
    activation = fields.text.get("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"{activation!r}: only 'silu' is supported")
    for name in _MUST_BE_ABSENT_OR_FALSE:
        if fields.text.get(name):
            raise fields.error(name, f"{fields.text[name]!r}: only false is supported")
    if fields.text.get("attn_output_gate", True) is not True:
        raise fields.error("attn_output_gate", f"{fields.text['attn_output_gate']!r}: only true is supported")


def _layer_types(fields: _Fields) -> tuple[str, ...]:
    num_layers = fields.size("num_hidden_layers")
    layer_types = fields.text.get("layer_types")
    if layer_types is None:
        interval = fields.size("full_attention_interval") if "full_attention_interval" in fields.text else 4
        return tuple(LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(num_layers))
    if not isinstance(layer_types, list):
        raise fields.error("layer_types", f"{layer_types!r}: it must be a list")
    for i, layer_type in enumerate(layer_types):
        if layer_type not in (LINEAR_ATTENTION, FULL_ATTENTION):
            raise fields.error(
                f"layer_types[{i}]", f"{layer_type!r}: only {LINEAR_ATTENTION!r} and {FULL_ATTENTION!r} are supported"
            )
    if len(layer_types) != num_layers:
        raise fields.error("layer_types", f"{len(layer_types)} entries long, but num_hidden_layers is {num_layers}")
    return tuple(layer_types)


def _rope(fields: _Fields, head_dim: int) -> tuple[float, int]:
    """rope_theta and the rotated width, from ``rope_parameters`` or the older separate fields."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.text.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.error(name, f"{value!r}: it must be an object")
        for layer_type in (LINEAR_ATTENTION, FULL_ATTENTION):
            if layer_type in value:
                raise fields.error(f"{name}.{layer_type}", "set: rope per layer type is not supported")
        for key in ("rope_type", "type"):
            if value.get(key, "default") not in _PLAIN_ROPE_TYPES:
                raise fields.error(f"{name}.{key}", f"{value[key]!r}: rope scaling is not supported, only 'default'")
        if value.get("factor", 1.0) != 1.0:
            raise fields.error(f"{name}.factor", f"{value['factor']!r}: rope scaling is not supported")
        rope.update(value)
    for name in ("rope_theta", "partial_rotary_factor"):
        if rope.get(name) is None:
            rope[name] = fields.text.get(name)
    if rope["rope_theta"] is None:
        raise ConfigError(f"{fields.path}: rope_theta is missing (in rope_parameters, or by itself)")
    factor = 0.25 if rope["partial_rotary_factor"] is None else rope["partial_rotary_factor"]
    factor = fields.positive("partial_rotary_factor", factor)
    rotary_dim = int(head_dim * factor)
    if factor > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        raise fields.error(
            "partial_rotary_factor",
            f"{factor:g}, which rotates {rotary_dim} of head_dim {head_dim}: it must be even and in [2, head_dim]",
        )
    return fields.positive("rope_theta", rope["rope_theta"]), rotary_dim


def _eos_token_ids(path: Path, fields: _Fields, vocab_size: int) -> tuple[int, ...]:
    generation_path = path.with_name("generation_config.json")
    generation = _read_json(generation_path) if generation_path.exists() else {}
    ids: dict[int, None] = {}
    for origin, config in ((generation_path, generation), (path, fields.text), (path, fields.outer)):
        value = config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise ConfigError(
                    f"{origin}: eos_token_id holds {token_id!r}: it must be an id in [0, vocab_size = {vocab_size})"
                )
            ids[token_id] = None
    return tuple(ids)


def _dtype(fields: _Fields) -> str:
    for name in ("dtype", "torch_dtype"):
        value = fields.either(name)
        if value is not None:
            if not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES:
                raise fields.error(name, f"{value!r}: it must be one of {', '.join(DTYPES)}")
            return value.removeprefix("torch.")
    return "bfloat16"
