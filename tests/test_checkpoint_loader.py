"""Loading: what arrives on each rank, that nothing else is read, and how values are cast."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bireme.checkpoint import progress as progress_module
from bireme.checkpoint.headers import index_checkpoint, read_header
from bireme.checkpoint.hf_config import load_model_config
from bireme.checkpoint.loader import _Reader, load_rank_weights, random_rank_weights, verify_checkpoint
from bireme.checkpoint.names import parse_name
from bireme.checkpoint.shard_spec import parameter_table, rank_shards
from bireme.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig, rank_shape

Write = Callable[..., Path]
TINY: dict[str, Any] = dict(
    tokenizer=False,
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    layer_types=(LINEAR_ATTENTION, FULL_ATTENTION, LINEAR_ATTENTION),
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    linear_num_key_heads=8,
    linear_num_value_heads=16,
    linear_key_head_dim=4,
    linear_value_head_dim=6,
    tie_word_embeddings=False,
)
LAYOUTS = ("text", "multimodal", "language_model")


def read_all(folder: Path) -> dict[str, Tensor]:
    """Bare name → full tensor of every text tensor in the folder."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            tensors[parse_name(name).bare] = tensor
    return tensors


def load(folder: Path, model: ModelConfig, rank: int = 0, size: int = 1, **options: Any) -> dict[str, Tensor]:
    options = {"dtype": torch.float32, "device": "cpu"} | options
    weights = list(load_rank_weights(folder, model, tp_rank=rank, tp_size=size, **options))
    assert len(dict(weights)) == len(weights), "a parameter came twice"
    return dict(weights)


def expected_weights(full: dict[str, Tensor], model: ModelConfig, rank: int, size: int) -> dict[str, Tensor]:
    """The rank's tensors, cut head by head from the full ones: written without the shard table."""
    shape = rank_shape(model, size)

    def heads(tensor: Tensor, width: int, dim: int = 0) -> Tensor:
        """This rank's share of equally wide heads along ``dim``."""
        return torch.cat(torch.split(tensor, width, dim)[slice(*share(tensor.shape[dim] // width))], dim)

    def share(count: int) -> tuple[int, int]:
        return rank * count // size, (rank + 1) * count // size

    def kv_heads(tensor: Tensor) -> Tensor:
        first = rank * model.num_key_value_heads // size
        return torch.cat(torch.split(tensor, model.head_dim)[first : first + shape.num_key_value_heads])

    def vocabulary(tensor: Tensor) -> Tensor:
        padded = torch.zeros(shape.vocab_size * size, model.hidden_size)
        padded[: model.vocab_size] = tensor
        return padded[rank * shape.vocab_size : (rank + 1) * shape.vocab_size]

    key_dim = model.linear_num_key_heads * model.linear_key_head_dim

    def qkv(tensor: Tensor) -> Tensor:
        q, k, v = tensor[:key_dim], tensor[key_dim : 2 * key_dim], tensor[2 * key_dim :]
        return torch.cat(
            [
                heads(q, model.linear_key_head_dim),
                heads(k, model.linear_key_head_dim),
                heads(v, model.linear_value_head_dim),
            ]
        )

    value_dim = model.linear_value_head_dim
    weights = {"embed_tokens.weight": vocabulary(full["embed_tokens.weight"]), "norm.weight": full["norm.weight"]}
    if not model.tie_word_embeddings:
        weights["lm_head.weight"] = vocabulary(full["lm_head.weight"])
    for i, layer_type in enumerate(model.layer_types):
        layer = f"layers.{i}."
        names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        if layer_type == LINEAR_ATTENTION:
            names.append("linear_attn.norm.weight")
            mixer = f"{layer}linear_attn."
            weights[f"{mixer}in_proj.weight"] = torch.cat(
                [
                    qkv(full[f"{mixer}in_proj_qkv.weight"]),
                    heads(full[f"{mixer}in_proj_z.weight"], value_dim),
                    heads(full[f"{mixer}in_proj_b.weight"], 1),
                    heads(full[f"{mixer}in_proj_a.weight"], 1),
                ]
            )
            weights[f"{mixer}conv1d.weight"] = qkv(full[f"{mixer}conv1d.weight"])[:, 0]
            weights[f"{mixer}dt_bias"] = heads(full[f"{mixer}dt_bias"], 1)
            weights[f"{mixer}A_log"] = heads(full[f"{mixer}A_log"], 1)
            weights[f"{mixer}out_proj.weight"] = heads(full[f"{mixer}out_proj.weight"], value_dim, dim=1)
        else:
            names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
            mixer = f"{layer}self_attn."
            weights[f"{mixer}qkv_proj.weight"] = torch.cat(
                [
                    heads(full[f"{mixer}q_proj.weight"], 2 * model.head_dim),
                    kv_heads(full[f"{mixer}k_proj.weight"]),
                    kv_heads(full[f"{mixer}v_proj.weight"]),
                ]
            )
            weights[f"{mixer}o_proj.weight"] = heads(full[f"{mixer}o_proj.weight"], model.head_dim, dim=1)
        weights[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(
            [heads(full[f"{layer}mlp.gate_proj.weight"], 1), heads(full[f"{layer}mlp.up_proj.weight"], 1)]
        )
        weights[f"{layer}mlp.down_proj.weight"] = heads(full[f"{layer}mlp.down_proj.weight"], 1, dim=1)
        weights |= {layer + name: full[layer + name] for name in names}
    return weights


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_each_rank_receives_exactly_its_heads_and_channels(checkpoint: Write, tp_size: int, kv_heads: int) -> None:
    folder = checkpoint(**TINY | {"num_key_value_heads": kv_heads})
    model = load_model_config(folder)
    full = read_all(folder)
    for rank in range(tp_size):
        weights = load(folder, model, rank, tp_size)
        expected = expected_weights(full, model, rank, tp_size)
        assert set(weights) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_all_layouts_and_file_counts_give_the_same_weights(
    checkpoint: Write, layout: str, num_shards: int, tied: bool
) -> None:
    folder = checkpoint(**TINY | {"layout": layout, "num_shards": num_shards, "tie_word_embeddings": tied})
    plain = checkpoint(**TINY | {"tie_word_embeddings": tied})
    model = load_model_config(folder)
    report = verify_checkpoint(folder, model)
    assert report.num_files == num_shards
    assert (report.num_mtp, report.num_visual) == ((0, 0) if layout == "text" else (1, 2))
    weights, expected = load(folder, model), load(plain, load_model_config(plain))
    assert ("lm_head.weight" in weights) is not tied
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_shards_without_an_index_are_found(checkpoint: Write, tmp_path: Path) -> None:
    folder = checkpoint(**TINY | {"num_shards": 3})
    for file in folder.iterdir():
        if file.name != "model.safetensors.index.json":
            (tmp_path / file.name).symlink_to(file)
    model = load_model_config(folder)
    assert verify_checkpoint(tmp_path, model) == verify_checkpoint(folder, model)


def test_an_output_matrix_beside_tied_embeddings_is_counted_and_skipped(checkpoint: Write, tmp_path: Path) -> None:
    folder = checkpoint(**TINY | {"tie_word_embeddings": True})
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = load_model_config(tmp_path)
    report = verify_checkpoint(tmp_path, model)
    assert (report.num_duplicates, report.num_tensors) == (1, len(tensors) - 1)
    assert "lm_head.weight" not in load(tmp_path, model)


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_each_rank_asks_for_its_own_slices_and_no_more(
    checkpoint: Write, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(**TINY)
    model = load_model_config(folder)
    read: Counter[tuple[str, int]] = Counter()
    plain_read = _Reader.read

    def counting_read(self: _Reader, entry: Any, dim: int | None, start: int, stop: int) -> Tensor:
        piece = plain_read(self, entry, dim, start, stop)
        # The element numbers within the tensor, cut the same way.
        numbers = torch.arange(piece.numel() if dim is None else torch.Size(entry.shape).numel()).view(entry.shape)
        kept = numbers if dim is None else numbers.narrow(dim, start, stop - start)
        assert piece.shape == kept.shape
        read.update((parse_name(entry.name).bare, int(i)) for i in kept.flatten())
        return piece

    monkeypatch.setattr(_Reader, "read", counting_read)
    for rank in range(tp_size):
        load(folder, model, rank, tp_size)
    sizes = {name: tensor.numel() for name, tensor in read_all(folder).items()}
    for parameter in parameter_table(model):
        for source in parameter.sources:
            owners = tp_size if parameter.dim is None else 1
            if source.name.endswith(("k_proj.weight", "v_proj.weight")):
                owners = max(1, tp_size // model.num_key_value_heads)
            counts = [read.pop((source.name, i)) for i in range(sizes[source.name])]
            assert set(counts) == {owners}, source.name
    assert not read


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_slices_of_rows_leave_the_rest_of_the_file_on_disk(tmp_path: Path) -> None:
    rows, columns = 16384, 1024  # 64 MiB, an eighth of which is large beside the pages that the kernel maps ahead
    path = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": torch.zeros(rows, columns)}, path)

    def mapped_bytes() -> int:
        total, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inside = line.endswith(str(path))
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
        return total

    (entry,) = read_header(path)
    with ExitStack() as stack:
        piece = _Reader(tmp_path, stack).read(entry, 0, rows // 2, rows // 2 + rows // 8)
        copied = piece.clone()
        assert copied.nbytes == entry.num_bytes // 8
        assert entry.num_bytes // 8 <= mapped_bytes() < entry.num_bytes // 4
        del piece


@pytest.mark.parametrize("rank", [0, 1])
def test_what_another_rank_owns_cannot_leak_in(checkpoint: Write, tmp_path: Path, rank: int) -> None:
    """All that this rank does not own is NaN in the file; its weights are as before."""
    folder = checkpoint(**TINY)
    model = load_model_config(folder)
    index = index_checkpoint(folder, model)
    tensors = load_file(folder / "model.safetensors")
    poisoned = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    for piece in rank_shards(model, rank, 2):
        for segment in piece.segments:
            name = index.entries[segment.source.name].name
            if segment.dim is None:
                poisoned[name] = tensors[name]
                continue
            cut = (segment.dim, segment.start, segment.stop - segment.start)
            poisoned[name].narrow(*cut).copy_(tensors[name].narrow(*cut))
    save_file(poisoned, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights, expected = load(tmp_path, model, rank, 2), load(folder, model, rank, 2)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_values_are_cast_to_the_engines_dtype_except_a_log(checkpoint: Write, stored: str, wanted: str) -> None:
    folder = checkpoint(**TINY | {"dtype": stored})
    model = load_model_config(folder)
    assert model.dtype == stored
    dtype = getattr(torch, wanted)
    weights = load(folder, model, 1, 2, dtype=dtype)
    for name, tensor in expected_weights(read_all(folder), model, 1, 2).items():
        kept = torch.float32 if name.endswith("A_log") else dtype
        assert weights[name].dtype == kept, name
        assert torch.equal(weights[name], tensor.to(kept)), name


def test_a_log_in_bfloat16_is_widened(checkpoint: Write, tmp_path: Path) -> None:
    folder = checkpoint(**TINY | {"dtype": "bfloat16"})
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = load(tmp_path, load_model_config(tmp_path), dtype=torch.bfloat16)
    assert weights["layers.0.linear_attn.A_log"].dtype == torch.float32


def test_progress_counts_this_ranks_bytes_up_to_the_total(checkpoint: Write) -> None:
    folder = checkpoint(**TINY)
    model = load_model_config(folder)
    seen: list[tuple[int, int]] = []
    weights = load(folder, model, 0, 2, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == len(weights)
    assert seen == sorted(seen)
    # Vocabulary size 50 divides by 2, so there is no padding, and float32 is stored as float32.
    total = sum(tensor.nbytes for tensor in weights.values())
    assert {total for _, total in seen} == {total}
    assert seen[-1] == (total, total)


def test_a_long_load_draws_a_bar_on_stderr_and_a_short_one_does_not(
    checkpoint: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(**TINY)
    model = load_model_config(folder)

    def printed(*, enabled: bool) -> tuple[str, str]:
        with progress_module.progress_bar("Loading weights", enabled=enabled) as progress:
            load(folder, model, progress=progress)
        return capsys.readouterr()

    assert printed(enabled=True) == ("", "")
    monkeypatch.setattr(progress_module, "SHOW_AFTER_SECONDS", -1.0)
    assert printed(enabled=False) == ("", "")
    out, err = printed(enabled=True)
    assert out == "" and "Loading weights" in err


@pytest.mark.parametrize("tp_size", [1, 4])
def test_random_weights_have_the_names_shapes_and_dtypes_of_real_ones(checkpoint: Write, tp_size: int) -> None:
    folder = checkpoint(**TINY)
    model = load_model_config(folder)
    for rank in range(tp_size):
        options: dict[str, Any] = dict(tp_rank=rank, tp_size=tp_size, dtype=torch.bfloat16, device="cpu")
        loaded = {n: (t.shape, t.dtype) for n, t in load_rank_weights(folder, model, **options)}
        drawn = list(random_rank_weights(model, **options, seed=3))
        assert [(n, (t.shape, t.dtype)) for n, t in drawn] == list(loaded.items())


def test_random_weights_depend_on_the_seed_and_agree_where_ranks_share_them() -> None:
    from test_checkpoint_shard_spec import make_model

    model = make_model(vocab_size=51)

    def draw(rank: int, seed: int) -> dict[str, Tensor]:
        weights = random_rank_weights(model, tp_rank=rank, tp_size=2, dtype=torch.float32, device="cpu", seed=seed)
        return dict(weights)

    first, again, other_seed, other_rank = draw(0, 1), draw(0, 1), draw(0, 2), draw(1, 1)
    for parameter in parameter_table(model):
        name = parameter.name
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other_seed[name])
        assert torch.equal(first[name], other_rank[name]) is (parameter.dim is None), name
        assert first[name].isfinite().all() and first[name].any()
    assert not other_rank["embed_tokens.weight"][-1].any(), "the padding row past the vocabulary is zero"


def test_the_report_lists_files_outside_the_index(checkpoint: Write, tmp_path: Path) -> None:
    folder = checkpoint(**TINY | {"num_shards": 2})
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    save_file({"stray": torch.zeros(1)}, tmp_path / "stray.safetensors")
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert verify_checkpoint(tmp_path, load_model_config(tmp_path)).unused_files == ("stray.safetensors",)
