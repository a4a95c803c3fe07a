"""Which tensor lies in which safetensors file, from the files' headers alone (no torch, no tensor data read).

The safetensors format: 8 bytes of little-endian header length, a JSON header that gives each tensor's dtype, shape and
byte range, then the data.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from bireme.checkpoint.hf_config import checkpoint_folder
from bireme.checkpoint.names import LM_HEAD, Part, guess_layout, parse_name
from bireme.checkpoint.shard_spec import checkpoint_shapes
from bireme.config import ModelConfig
from bireme.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOAT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""Data types that can be loaded, by their safetensors names, with their size."""

_OTHER_BITS = {"F4": 4, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64}
_MAX_PROBLEMS = 8
_LFS_POINTER = b"version https://git-lfs"


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor as a file's header describes it. ``name`` is the checkpoint's full name, ``dtype`` as in safetensors."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds: tensors of the text model, and those left unread, counted by kind.

    ``num_duplicates``: an lm_head beside tied embeddings, which is the embedding matrix again.
    ``unused_files``: safetensors files that the index does not list.
    """

    num_files: int
    num_tensors: int
    num_bytes: int
    num_mtp: int = 0
    num_visual: int = 0
    num_duplicates: int = 0
    unused_files: tuple[str, ...] = ()


class CheckpointIndex(msgspec.Struct, frozen=True):
    """Bare name → entry of every tensor that the model needs, checked against the model's shapes."""

    folder: Path
    entries: dict[str, TensorEntry]
    report: LoadReport


def verify_checkpoint(folder: str | Path, model: ModelConfig) -> LoadReport:
    """Check a checkpoint folder against ``model`` without reading tensor data; run it before any rank starts.

    Raises:
        CheckpointError: see ``index_checkpoint``.
        ConfigError: not a checkpoint folder.
    """
    return index_checkpoint(folder, model).report


def index_checkpoint(folder: str | Path, model: ModelConfig) -> CheckpointIndex:
    """Find every tensor of ``model`` in the folder's safetensors files.

    Raises:
        CheckpointError: no safetensors file; a truncated or malformed file; an index that names a missing file or a
            tensor that its file lacks; a tensor missing, unknown, misshapen, twice there or of a type that cannot be
            loaded. The message names tensors, files, and expected and found shapes; it lists the first 8 problems.
        ConfigError: not a checkpoint folder.
    """
    path = checkpoint_folder(folder)
    files, weight_map, unused = _find_files(path)
    problems: list[str] = []
    found = [entry for file in files for entry in read_header(path / file)]
    if weight_map is not None:
        problems += _check_weight_map(weight_map, found)
    expected = checkpoint_shapes(model)
    counts: Counter[Part] = Counter()
    duplicates = 0
    entries: dict[str, TensorEntry] = {}
    for entry in found:
        name = parse_name(entry.name)
        if name.part in (Part.MTP, Part.VISUAL):
            counts[name.part] += 1
        elif name.bare == LM_HEAD and model.tie_word_embeddings:
            duplicates += 1
        elif name.part is Part.UNKNOWN or name.bare not in expected:
            problems.append(_unknown(entry, model))
        elif name.bare in entries:
            other = entries[name.bare]
            problems.append(
                f"{entry.name} is there twice: in {other.file}"
                + (f" as {other.name}" if other.name != entry.name else "")
                + f" and in {entry.file}"
            )
        else:
            entries[name.bare] = entry
            problems += _check_entry(entry, expected[name.bare])
    problems += _missing(expected, entries, files)
    if problems:
        shown = "".join(f"\n  - {problem}" for problem in problems[:_MAX_PROBLEMS])
        more = f"\n  - and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        raise CheckpointError(f"cannot load the checkpoint {path}:{shown}{more}")
    report = LoadReport(
        num_files=len(files),
        num_tensors=len(entries),
        num_bytes=sum(entry.num_bytes for entry in entries.values()),
        num_mtp=counts[Part.MTP],
        num_visual=counts[Part.VISUAL],
        num_duplicates=duplicates,
        unused_files=unused,
    )
    return CheckpointIndex(path, entries, report)


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file, in the header's order; also proves that the file has all their bytes.

    Raises:
        CheckpointError: unreadable, malformed or truncated; names the file and the sizes.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if size < 8 or length > size - 8:
                if start == _LFS_POINTER[:8]:
                    raise CheckpointError(
                        f"{path} is a Git LFS pointer of {size} bytes, not the weights: download the file itself"
                    )
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file: it has {size} bytes, and its first 8 announce a "
                    f"header of {length}"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON ({error})") from error
    try:
        header.pop("__metadata__", None)
        entries = [_parse_entry(path.name, name, fields) for name, fields in header.items()]
        data_size = max((fields["data_offsets"][1] for fields in header.values()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path} has a malformed safetensors header: {error!r}") from error
    if 8 + length + data_size != size:
        kind = "truncated" if size < 8 + length + data_size else "longer than its header says"
        last = max(header, key=lambda name: header[name]["data_offsets"][1], default="no tensor")
        raise CheckpointError(
            f"{path} is {kind}: it has {size} bytes, but its header, up to {last}, needs {8 + length + data_size}"
        )
    return entries


def _parse_entry(file: str, name: str, fields: dict[str, Any]) -> TensorEntry:
    begin, end = fields["data_offsets"]
    shape = tuple(int(size) for size in fields["shape"])
    dtype = str(fields["dtype"])
    bits = 8 * FLOAT_BYTES[dtype] if dtype in FLOAT_BYTES else _OTHER_BITS.get(dtype, 8)
    if end - begin != (math.prod(shape) * bits + 7) // 8:
        raise ValueError(f"{name} of shape {list(shape)} and type {dtype} cannot take {end - begin} bytes")
    return TensorEntry(file, name, dtype, shape, end - begin)


def _find_files(path: Path) -> tuple[list[str], dict[str, str] | None, tuple[str, ...]]:
    """The files to read, the index's weight map (None without an index), and files that the index does not list."""
    present = sorted(file.name for file in path.glob("*.safetensors"))
    index = path / INDEX_FILE
    if not index.exists():
        if not present:
            others = sorted(
                file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.npz") for file in path.glob(pattern)
            )
            hint = f" ({', '.join(others[:3])}: only safetensors can be loaded)" if others else ""
            raise CheckpointError(f"cannot load the checkpoint {path}: it holds no .safetensors file{hint}")
        return present, None, ()
    if SINGLE_FILE in present:
        raise CheckpointError(
            f"cannot load the checkpoint {path}: it holds both {SINGLE_FILE} and {INDEX_FILE}; remove the stale one"
        )
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        found = "a list" if isinstance(weight_map, list) else "something else"
        raise CheckpointError(
            f"{index} is not a safetensors index: weight_map must be an object of tensor names and file names, and is "
            f"{'missing' if weight_map is None else found}"
        )
    files = sorted(set(weight_map.values()))
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{index} lists the file {file!r}: it must be a file name in the same folder")
    missing = [file for file in files if file not in present]
    if missing:
        first = next(name for name, file in weight_map.items() if file == missing[0])
        raise CheckpointError(
            f"{index} lists files that do not exist: {', '.join(missing[:_MAX_PROBLEMS])} "
            f"({sum(file in missing for file in weight_map.values())} tensors, the first is {first})"
        )
    return files, weight_map, tuple(file for file in present if file not in files)


def _check_weight_map(weight_map: dict[str, str], found: list[TensorEntry]) -> list[str]:
    problems = []
    places = {(entry.name, entry.file) for entry in found}
    for name, file in weight_map.items():
        if (name, file) not in places:
            problems.append(f"{INDEX_FILE} lists {name} in {file}, which does not hold it")
    for entry in found:
        if entry.name not in weight_map:
            problems.append(f"{entry.file} holds {entry.name} {list(entry.shape)}, which {INDEX_FILE} does not list")
    return problems


def _check_entry(entry: TensorEntry, expected: tuple[int, ...]) -> list[str]:
    if entry.shape != expected:
        return [f"{entry.name} in {entry.file}: expected shape {list(expected)}, found {list(entry.shape)}"]
    if entry.dtype not in FLOAT_BYTES:
        return [f"{entry.name} in {entry.file}: expected a type of {', '.join(FLOAT_BYTES)}, found {entry.dtype}"]
    return []


def _unknown(entry: TensorEntry, model: ModelConfig) -> str:
    hint = ""
    bare = parse_name(entry.name).bare.split(".")
    if bare[0] == "layers" and len(bare) > 1 and bare[1].isdecimal() and int(bare[1]) >= model.num_layers:
        hint = f" (config.json has num_hidden_layers {model.num_layers})"
    return f"{entry.name} {list(entry.shape)} in {entry.file} is no tensor of this model{hint}"


def _missing(expected: dict[str, tuple[int, ...]], entries: dict[str, TensorEntry], files: list[str]) -> list[str]:
    where = files[0] if len(files) == 1 else f"all {len(files)} files"
    layout = guess_layout(entry.name for entry in entries.values())
    problems = []
    for bare, shape in expected.items():
        if bare not in entries:
            hint = " (config.json has tie_word_embeddings false)" if bare == LM_HEAD else ""
            problems.append(f"{layout.full_name(bare)}, expected shape {list(shape)}, is missing from {where}{hint}")
    return problems
