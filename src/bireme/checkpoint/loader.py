"""Weights of one rank, streamed from a checkpoint: only its own bytes, stitched, cast, on the device.

The engine's parameter names and shapes are those of ``shard_spec.parameter_table``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bireme.checkpoint.headers import (
    FLOAT_BYTES,
    CheckpointIndex,
    LoadReport,
    TensorEntry,
    index_checkpoint,
    verify_checkpoint,
)
from bireme.checkpoint.names import LM_HEAD
from bireme.checkpoint.progress import Progress
from bireme.checkpoint.shard_spec import Segment, Shard, rank_shards
from bireme.config import ModelConfig
from bireme.errors import CheckpointError

__all__ = ["LoadReport", "load_rank_weights", "random_rank_weights", "random_tensor", "verify_checkpoint"]


def load_rank_weights(
    folder: str | Path,
    model: ModelConfig,
    *,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, rank-local tensor in its final dtype on ``device``), each parameter exactly once.

    Of each checkpoint tensor only the rows or columns that this rank owns are read. ``A_log`` stays float32; padding
    rows of the vocabulary are zero. Nothing is held back: the caller may drop each tensor once it is in place.

    Args:
        progress: called after every parameter with (bytes read so far, bytes to read in all) of this rank; see
            ``progress.progress_bar``.

    Raises:
        CheckpointError: before the first tensor, when headers and model disagree (see ``verify_checkpoint``); at the
            end, when a tensor was left over or a parameter not filled; at a file that changes underneath.
        ConfigError: not a checkpoint folder, or a split that does not divide.
    """
    index = index_checkpoint(folder, model)
    shards = list(rank_shards(model, tp_rank, tp_size))
    total = sum(_segment_bytes(index, segment) for shard in shards for segment in shard.segments)
    unread = set(index.entries)
    done = 0
    with ExitStack() as stack:
        reader = _Reader(index.folder, stack)
        for shard in shards:
            target = _empty(shard, dtype, device)
            for segment in shard.segments:
                entry = index.entries[segment.source.name]
                piece = reader.read(entry, segment.dim, segment.start, segment.stop)
                _place(target, piece, segment, shard)
                unread.discard(segment.source.name)
                done += _segment_bytes(index, segment)
            # A source of which this rank owns nothing (vocabulary rows past the last) is accounted for all the same.
            unread.difference_update(source.name for source in shard.parameter.sources)
            yield shard.parameter.name, target
            if progress is not None:
                progress(done, total)
    if unread or done != total:
        raise CheckpointError(
            f"loading {index.folder} for rank {tp_rank} of {tp_size} left {len(unread)} tensors unread "
            f"({', '.join(sorted(unread)[:8])}) and read {done} of {total} bytes"
        )


def random_rank_weights(
    model: ModelConfig,
    *,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    """The same iterator with random weights of sane scale, for load_format "dummy": needs no files.

    Replicated parameters are equal on all ranks; sharded ones are drawn by each rank for itself.

    Raises:
        ConfigError: a split that does not divide.
    """
    generator = torch.Generator(device)
    for shard in rank_shards(model, tp_rank, tp_size):
        parameter = shard.parameter
        owner = tp_rank if parameter.dim is not None else 0
        generator.manual_seed(zlib.crc32(f"{seed}/{parameter.name}/{owner}".encode()))
        values = random_tensor(parameter.name, shard.shape, parameter.sources[0].shape[-1], generator)
        if shard.num_padding:
            values[shard.shape[0] - shard.num_padding :] = 0
        yield parameter.name, values if parameter.is_float32 else values.to(dtype)


def random_tensor(name: str, shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """Random values that behave: activations of order one, decays short and long, no norm or bias at its neutral value.

    Args:
        name: bare checkpoint name or parameter name; its ending decides the distribution.
        fan_in: inputs that each output sums over (of the whole tensor, not of a rank's shard).

    Returns:
        float32 [*shape] on the generator's device.
    """
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if name.endswith("A_log"):
        return noise.sub_(0.5)
    if name.endswith("dt_bias"):
        return noise
    if name.endswith("linear_attn.norm.weight"):
        return noise.mul_(0.2).add_(1.0)
    if len(shape) == 1:
        return noise.mul_(0.2)
    gain = 2.0 if name == LM_HEAD else 1.0
    return noise.mul_(gain / math.sqrt(fan_in))


class _Reader:
    """Keeps each safetensors file open (mapped) while its tensors are read, and reads slices of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._files: dict[str, Any] = {}

    def read(self, entry: TensorEntry, dim: int | None, start: int, stop: int) -> Tensor:
        """Elements [start, stop) along ``dim`` (None: all), in the file's dtype, on the CPU."""
        try:
            if entry.file not in self._files:
                mapped = safe_open(self._folder / entry.file, framework="pt")
                self._files[entry.file] = self._stack.enter_context(mapped)
            view = self._files[entry.file].get_slice(entry.name)
            if dim is None:
                return view[:]
            return view[start:stop] if dim == 0 else view[:, start:stop]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {entry.name} from {self._folder / entry.file}: {error}") from error


def _empty(shard: Shard, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    target = torch.empty(shard.shape, dtype=torch.float32 if shard.parameter.is_float32 else dtype, device=device)
    if shard.num_padding:
        target[shard.shape[0] - shard.num_padding :] = 0
    return target


def _place(target: Tensor, piece: Tensor, segment: Segment, shard: Shard) -> None:
    for dim in shard.parameter.drop_dims:
        piece = piece.squeeze(dim)
    if segment.dim is not None:
        target = target.narrow(segment.dim, segment.offset, segment.stop - segment.start)
    if piece.shape != target.shape:
        raise CheckpointError(
            f"stitching {segment.source.name} into {shard.parameter.name}: expected a piece of shape "
            f"{list(target.shape)}, found {list(piece.shape)}"
        )
    target.copy_(piece)


def _segment_bytes(index: CheckpointIndex, segment: Segment) -> int:
    return segment.num_elements * FLOAT_BYTES[index.entries[segment.source.name].dtype]
