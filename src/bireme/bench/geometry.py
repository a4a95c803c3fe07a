"""Models to measure without their weights: Qwen3.5's sizes by name, or any config.json, as folders to be opened.

``NAME:LAYERS`` is a geometry cut to its first layers, for comparisons that need weights in files.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bireme.checkpoint.hf_config import load_model_config
from bireme.checkpoint.loader import random_tensor
from bireme.checkpoint.names import Layout
from bireme.checkpoint.shard_spec import checkpoint_shapes
from bireme.dummy import write_dummy_folder
from bireme.errors import ConfigError
from bireme.pocket import NAME as POCKET
from bireme.pocket import resolve

NUM_DECODABLE = 248_077
"""Ids that Qwen3.5's tokenizer has a token for, of 248,320 in the model."""

_DAMPED = ("out_proj.weight", "o_proj.weight", "down_proj.weight", "lm_head.weight")
_FILE_BYTES = 2 << 30

_FAMILY: dict[str, Any] = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262_144,
}


def _sizes(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, value_heads: int, tied: bool
) -> dict[str, Any]:
    return _FAMILY | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "linear_num_value_heads": value_heads,
        "tie_word_embeddings": tied,
    }


GEOMETRIES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "0.8b": _sizes(1024, 24, 8, 2, 3584, 16, True),
    "2b": _sizes(2048, 24, 8, 2, 6144, 16, True),
    "4b": _sizes(2560, 32, 16, 4, 9216, 32, True),
    "9b": _sizes(4096, 32, 16, 4, 12288, 32, False),
    "27b": _sizes(5120, 64, 24, 4, 17408, 48, False),
}
"""Text configs by size; ``tiny`` is the random model of the tests."""


def geometry_fields(name: str) -> dict[str, Any]:
    """Config fields of a named geometry, maybe cut (``27b:8``).

    Raises:
        ConfigError: an unknown name, or layers that are no number from 1 to the geometry's own.
    """
    base, _, cut = name.partition(":")
    fields = GEOMETRIES.get(base.lower())
    if fields is None:
        raise ConfigError(
            f"--geometry is {name!r}: it must be one of {', '.join(GEOMETRIES)}, {POCKET}, or the path of a config.json"
        )
    if not cut:
        return dict(fields)
    most = fields.get("num_hidden_layers", 8)
    if not cut.isdecimal() or not 1 <= int(cut) <= most:
        raise ConfigError(f"--geometry is {name!r}: {base} can be cut to 1 to {most} layers")
    return fields | {"num_hidden_layers": int(cut)}


@contextlib.contextmanager
def geometry_folder(name: str, *, tokenizer: bool = False) -> Iterator[Path]:
    """A folder with the geometry's config.json and no weights, gone when the block ends; for load_format "dummy".

    Args:
        name: a name, ``pocket``, or the path of a config.json (or of a folder that holds one).
        tokenizer: also write one, with a token for as many ids as in the real models.

    Raises:
        ConfigError: neither a known name nor a file.
    """
    with tempfile.TemporaryDirectory(prefix="bireme-geometry-") as temporary:
        folder = Path(temporary)
        given = Path(resolve(POCKET)) if name == POCKET else Path(name)
        path = given / "config.json" if given.is_dir() else given
        if path.is_file():
            shutil.copy(path, folder / "config.json")
            for extra in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                if tokenizer and (path.parent / extra).is_file():
                    shutil.copy(path.parent / extra, folder)
        else:
            write_geometry(folder, name, tokenizer=tokenizer)
        yield folder


def write_geometry(folder: Path, name: str, *, tokenizer: bool = False) -> None:
    """Write a named geometry's config.json, and a tokenizer if asked, into ``folder``."""
    fields = geometry_fields(name)
    write_dummy_folder(folder, dtype="bfloat16", tokenizer=tokenizer, **fields)
    if tokenizer:
        widen_tokenizer(folder / "tokenizer.json", min(fields.get("vocab_size", 0), NUM_DECODABLE))


def write_weights(folder: Path, name: str, *, device: str, seed: int = 5) -> None:
    """Write a geometry with random weights in bfloat16, for comparisons with transformers or between numbers of ranks.

    What blocks and head put out is damped, for undamped random models amplify rounding, in transformers as here. A_log
    has values that bfloat16 can hold, for transformers reads it so.

    Args:
        device: where the weights are drawn; a GPU is quicker, and draws others.
    """
    write_geometry(folder, name)
    model = load_model_config(folder)
    generator = torch.Generator(device).manual_seed(seed)
    shapes = list(checkpoint_shapes(model).items())
    weight_map: dict[str, str] = {}
    batch: dict[str, Tensor] = {}
    for number, (bare, shape) in enumerate(shapes):
        tensor = random_tensor(bare, shape, shape[-1], generator)
        if bare.endswith(_DAMPED):
            tensor.mul_(0.3)
        tensor = tensor.to(torch.bfloat16)
        batch[Layout.TEXT.full_name(bare)] = (tensor.float() if bare.endswith("A_log") else tensor).cpu()
        if number == len(shapes) - 1 or sum(each.nbytes for each in batch.values()) > _FILE_BYTES:
            file = f"model-{number:05}.safetensors"
            save_file(batch, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(batch, file)
            batch = {}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def widen_tokenizer(path: Path, num_ids: int) -> None:
    """Give a token to every id below ``num_ids`` that has none: a few letters behind a space. No merge leads there."""
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    # An added token keeps its id only where the vocabulary has it, too.
    vocab.update((token["content"], token["id"]) for token in content["added_tokens"])
    taken = set(vocab.values())
    for token_id in range(num_ids):
        if token_id not in taken:
            vocab[f"Ġ{_letters(token_id)}"] = token_id
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _letters(number: int) -> str:
    """Five letters, upper and lower in turn, so that no trained token looks like it."""
    digits = [number // 26**place % 26 for place in range(5)]
    return "".join(chr((97 if index % 2 else 65) + digit) for index, digit in enumerate(digits))
