"""A checkpoint that is not what its config says is refused by name, from the headers, before a tensor is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bireme.checkpoint.headers import verify_checkpoint
from bireme.checkpoint.hf_config import load_model_config
from bireme.checkpoint.loader import load_rank_weights
from bireme.errors import CheckpointError, ConfigError

Write = Callable[..., Path]
TINY: dict[str, Any] = dict(
    tokenizer=False,
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    layer_types=("linear_attention", "full_attention"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    tie_word_embeddings=False,
)
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def copy(checkpoint: Write, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint that the test may break."""

    def make(**options: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(checkpoint(**TINY | options), folder)
        return folder

    return make


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object], file: str = "model.safetensors") -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
    change(tensors)
    save_file(tensors, folder / file)


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content["weight_map"])
    path.write_text(json.dumps(content))


def message_of(folder: Path) -> str:
    """The refusal, which must be the same from the headers alone and from the loader before its first tensor."""
    model = load_model_config(folder)
    with pytest.raises(CheckpointError) as verified:
        verify_checkpoint(folder, model)
    with pytest.raises(CheckpointError) as loaded:
        next(load_rank_weights(folder, model, tp_rank=0, tp_size=2, dtype=torch.float32, device="cpu"))
    assert str(verified.value) == str(loaded.value)
    return str(verified.value)


def test_a_missing_tensor_is_named_with_its_shape(copy: Write) -> None:
    folder = copy()
    edit(folder, lambda tensors: tensors.pop(UP))
    message = message_of(folder)
    assert f"{UP}, expected shape [24, 16], is missing from model.safetensors" in message
    assert str(folder) in message


def test_a_missing_tensor_is_named_in_the_checkpoints_own_layout(copy: Write) -> None:
    folder = copy(layout="multimodal")
    edit(folder, lambda tensors: tensors.pop("model.language_model.norm.weight"))
    assert "model.language_model.norm.weight, expected shape [16], is missing" in message_of(folder)


def test_an_untied_model_without_its_output_matrix_is_refused(copy: Write) -> None:
    folder = copy(layout="language_model")
    edit(folder, lambda tensors: tensors.pop("language_model.lm_head.weight"))
    message = message_of(folder)
    assert "language_model.lm_head.weight, expected shape [40, 16], is missing" in message
    assert "tie_word_embeddings false" in message


def test_an_unknown_tensor_is_named_with_file_and_shape(copy: Write) -> None:
    folder = copy()
    edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(24)}))
    assert "model.layers.0.mlp.up_proj.bias [24] in model.safetensors is no tensor of this model" in message_of(folder)


def test_a_renamed_tensor_is_reported_as_unknown_and_as_missing(copy: Write) -> None:
    folder = copy()
    edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up.weight": tensors.pop(UP)}))
    message = message_of(folder)
    assert "model.layers.0.mlp.up.weight [24, 16] in model.safetensors is no tensor" in message
    assert f"{UP}, expected shape [24, 16], is missing" in message


def test_a_layer_past_the_configs_count_says_so(copy: Write) -> None:
    folder = copy()
    edit(folder, lambda tensors: tensors.update({UP.replace("0", "2"): torch.zeros(24, 16)}))
    assert "model.layers.2.mlp.up_proj.weight" in message_of(folder)
    assert "num_hidden_layers 2" in message_of(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(copy: Write) -> None:
    folder = copy()
    edit(folder, lambda tensors: tensors.update({UP: torch.zeros(16, 24)}))
    assert f"{UP} in model.safetensors: expected shape [24, 16], found [16, 24]" in message_of(folder)


def test_a_convolution_without_its_middle_dimension_is_misshapen(copy: Write) -> None:
    folder = copy()
    name = "model.layers.0.linear_attn.conv1d.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].transpose(1, 2).contiguous()}))
    assert f"{name} in model.safetensors: expected shape [24, 1, 4], found [24, 4, 1]" in message_of(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool, torch.float64])
def test_a_type_that_is_no_plain_float_is_refused(copy: Write, dtype: torch.dtype) -> None:
    folder = copy()
    edit(folder, lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    assert f"{UP} in model.safetensors: expected a type of F32, BF16, F16, found " in message_of(folder)


@pytest.mark.parametrize("lost", [1, 1000])
def test_a_truncated_file_is_named_with_both_sizes(copy: Write, lost: int) -> None:
    folder = copy(num_shards=2)
    path = folder / "model-00002-of-00002.safetensors"
    size = path.stat().st_size
    with path.open("rb+") as file:
        file.truncate(size - lost)
    message = message_of(folder)
    assert f"{path} is truncated: it has {size - lost} bytes" in message and f"needs {size}" in message


@pytest.mark.parametrize("kept", [0, 7, 8, 100])
def test_a_file_cut_within_its_header_is_named(copy: Write, kept: int) -> None:
    folder = copy()
    path = folder / "model.safetensors"
    with path.open("rb+") as file:
        file.truncate(kept)
    assert f"{path} is truncated or not a safetensors file: it has {kept} bytes" in message_of(folder)


def test_a_file_with_trailing_bytes_is_refused(copy: Write) -> None:
    folder = copy()
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 4)
    assert "model.safetensors is longer than its header says" in message_of(folder)


def test_a_header_that_is_not_json_is_refused(copy: Write) -> None:
    folder = copy()
    (folder / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"nope" + bytes(64))
    assert "model.safetensors is not a safetensors file" in message_of(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}',
    ],
)
def test_a_malformed_header_is_refused_by_file(copy: Write, header: bytes) -> None:
    folder = copy()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "model.safetensors has a malformed safetensors header" in message_of(folder)


def test_a_git_lfs_pointer_is_recognised(copy: Write) -> None:
    folder = copy()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert "is a Git LFS pointer" in message_of(folder)


def test_an_index_that_names_a_missing_file_is_refused(copy: Write) -> None:
    folder = copy(num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = message_of(folder)
    assert "model.safetensors.index.json lists files that do not exist: model-00002-of-00003.safetensors" in message
    assert "the first is model.layers." in message


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(copy: Write) -> None:
    folder = copy(num_shards=2)
    edit_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": "model-00001-of-00002.safetensors"}))
    expected = "index.json lists model.norm.weight in model-00001-of-00002.safetensors, which does not hold it"
    assert expected in message_of(folder)


def test_a_tensor_that_the_index_does_not_list_is_refused(copy: Write) -> None:
    folder = copy(num_shards=2)
    edit_index(folder, lambda weight_map: weight_map.pop("model.norm.weight"))
    message = message_of(folder)
    assert "model-00002-of-00002.safetensors holds model.norm.weight [16]" in message
    assert "index.json does not list" in message


def test_a_tensor_in_two_files_is_refused(copy: Write) -> None:
    folder = copy(num_shards=2)
    name = "model.norm.weight"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(16)}), "model-00001-of-00002.safetensors")
    files = "in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors"
    assert f"{name} is there twice: {files}" in message_of(folder)


def test_a_tensor_under_two_names_is_refused(copy: Write) -> None:
    folder = copy()
    edit(folder, lambda tensors: tensors.update({"model.language_model.norm.weight": torch.zeros(16)}))
    message = message_of(folder)
    assert "is there twice" in message and "model.norm.weight" in message
    assert "model.language_model.norm.weight" in message


def test_a_single_file_beside_an_index_is_ambiguous(copy: Write) -> None:
    folder = copy(num_shards=2)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model.safetensors")
    assert "both model.safetensors and model.safetensors.index.json" in message_of(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}'])
def test_a_malformed_index_is_refused(copy: Write, content: str) -> None:
    folder = copy(num_shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json is not a safetensors index" in message_of(folder)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_may_not_point_out_of_its_folder(copy: Write, file: str) -> None:
    folder = copy(num_shards=2)
    edit_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": file}))
    assert f"lists the file {file!r}" in message_of(folder)


def test_a_folder_without_safetensors_says_what_it_found(copy: Write) -> None:
    folder = copy()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = message_of(folder)
    assert "holds no .safetensors file" in message and "pytorch_model.bin" in message


def test_many_problems_are_counted_not_listed(copy: Write) -> None:
    folder = copy()
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[:12]])
    message = message_of(folder)
    assert message.count("is missing") == 8 and "and 4 more" in message


def test_a_file_that_changes_after_the_check_still_fails_by_name(copy: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy()
    model = load_model_config(folder)
    import bireme.checkpoint.loader as loader

    index = loader.index_checkpoint(folder, model)
    monkeypatch.setattr(loader, "index_checkpoint", lambda folder, model: index)
    edit(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=r"cannot read model\.embed_tokens\.weight from .*model\.safetensors"):
        list(load_rank_weights(folder, model, tp_rank=0, tp_size=1, dtype=torch.float32, device="cpu"))


def test_a_tensor_that_no_parameter_takes_is_noticed_at_the_end(copy: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy()
    model = load_model_config(folder)
    import bireme.checkpoint.loader as loader

    shards = list(loader.rank_shards(model, 0, 1))
    monkeypatch.setattr(loader, "rank_shards", lambda *_: shards[:-1])
    with pytest.raises(CheckpointError, match=r"left 1 tensors unread \(lm_head\.weight\)"):
        list(load_rank_weights(folder, model, tp_rank=0, tp_size=1, dtype=torch.float32, device="cpu"))


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("x"), "is a file"),
        (lambda path: path.mkdir(), "has no config.json (it holds nothing)"),
        (lambda path: (path.mkdir(), (path / "weights.bin").write_text("x")), "it holds weights.bin"),
    ],
)
def test_a_path_that_is_no_checkpoint_says_why(
    tmp_path: Path, prepare: Callable[[Path], object], expected: str
) -> None:
    path = tmp_path / "thing"
    prepare(path)
    with pytest.raises(ConfigError) as raised:
        load_model_config(path)
    assert expected in str(raised.value) and str(path) in str(raised.value)


def test_an_index_whose_weight_map_is_a_list_is_told_so(copy: Write) -> None:
    folder = copy(num_shards=2)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    assert "weight_map must be an object of tensor names and file names, and is a list" in message_of(folder)
