"""Products of few rows with large weights, at the speed at which the weights can be read.

One program multiplies a tile of outputs with a part of the inputs. The weight tile is the wide operand of the matrix
instruction and the rows, padded to 16, 32 or 64, are the narrow one. Weights with few outputs are also split along
their inputs, so that every multiprocessor has something to read; whoever comes next sums the parts
(``norm.add_rms_norm``, or a kernel of its own here). Neither the tiles nor the order of the sums depend on the other
rows of a batch. Many rows go to cuBLAS, and so do shapes for which it was measured to be faster (``tuning/``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bireme.kernels.triton.launch import INTERPRETED, num_sms, pdl
from bireme.kernels.triton.norm import sum_parts

MAX_ROWS = 64
"""More rows than this go to cuBLAS."""

MAX_PARTS = 8
"""Parts that a weight's inputs are split into, at most."""

SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the kernel of this module cuts a product.

    Attributes:
        block_out: outputs of a program; 64 or more keep to Hopper's warp-group instructions.
        block_in: inputs of a step.
        parts: into how many parts the inputs are split, each summed by programs of its own.
        num_warps, num_stages: of the launch.
        tma: tiles are copied by the bulk tensor engine instead of by the threads.

    Tried and dropped, measured by ``bench/tune_linear.py``: SwiGLU computed where its result is read (slower for every
    shape), and weights fetched into L2 before the kernel in front has ended (within 2 % either way).
    """

    block_out: int = 64
    block_in: int = 128
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 4
    tma: bool = False


@triton.jit(do_not_specialize=["num_rows", "steps_of_part"])
def _skinny_kernel(
    x,
    weight,
    x_box,
    weight_box,
    out,
    num_rows,
    out_size,
    in_size,
    x_stride,
    steps_of_part,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[part, row, output] = Σ over the part's inputs of weight[output, input] · x[row, input]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_output = tl.program_id(0) * BLOCK_OUT
    part = tl.program_id(1)
    outputs = first_output + tl.arange(0, BLOCK_OUT)
    first = part * steps_of_part * BLOCK_IN
    last = tl.minimum(first + steps_of_part * BLOCK_IN, in_size)
    # Outputs past the end read the last one's weights, which need no mask then; they are not stored.
    weight_rows = weight + tl.minimum(outputs, out_size - 1).to(tl.int64) * in_size
    if PDL:
        tl.extra.cuda.gdc_wait()

    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_IN)
    real = rows[None, :] < num_rows
    weight_tile = weight_rows[:, None] + columns[None, :]
    x_tile = x + rows[None, :].to(tl.int64) * x_stride + columns[:, None]
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in range(first, last, BLOCK_IN):
        if TMA:
            w = weight_box.load([first_output, start])
        elif EVEN:
            w = tl.load(weight_tile + start)
        else:
            w = tl.load(weight_tile + start, mask=columns[None, :] + start < last, other=0.0)
        if TMA:
            values = x_box.load([0, start]).T
        elif EVEN:
            values = tl.load(x_tile + start, mask=real, other=0.0)
        else:
            values = tl.load(x_tile + start, mask=real & (columns[:, None] + start < last), other=0.0)
        total = tl.dot(w, values, total, input_precision="ieee")
    target = out + (part.to(tl.int64) * num_rows + rows[None, :]) * out_size + outputs[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=real & (outputs[:, None] < out_size))


@triton.jit
def _sum_kernel(parts, out, size, part_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = offsets < size
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = sum_parts(parts, offsets, within, part_stride, PARTS)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=within)


# Which kernel, and how it is cut.


@functools.lru_cache(maxsize=1)
def tuned() -> dict[tuple[int, int], list[tuple[int, Tiling | None]]]:
    """The table of ``tuning/h200.json``: (out, in) → [(rows up to which it holds, tiling or None for cuBLAS)]."""
    text = resources.files("bireme.kernels.triton").joinpath("tuning", "h200.json").read_text(encoding="utf-8")
    return read_table(json.loads(text))


def read_table(table: Mapping[str, Any]) -> dict[tuple[int, int], list[tuple[int, Tiling | None]]]:
    """Parse a table: ``{"shapes": {"<out>x<in>": {"<rows>": {"backend": "cublas"} or a tiling's fields}}}``."""
    parsed = {}
    for shape, entries in table["shapes"].items():
        out_size, in_size = map(int, shape.split("x"))
        parsed[out_size, in_size] = sorted(
            (
                (int(rows), None if entry["backend"] == "cublas" else Tiling(**_without_backend(entry)))
                for rows, entry in entries.items()
            ),
            key=lambda item: item[0],
        )
    return parsed


def _without_backend(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "backend"}


def default_tiling(out_size: int, in_size: int, num_rows: int, sms: int) -> Tiling | None:
    """A tiling for a shape that the table does not have: about three programs for each multiprocessor.

    A weight is split along its inputs only when its outputs alone make too few programs. Many rows, which every
    program reads again, want wider tiles; with many outputs as well, cuBLAS is the safer choice (None).
    """
    many = num_rows > 32
    block_out, block_in = (128 if many else 64), (128 if in_size >= 512 and not many else 64)
    tiles, steps = triton.cdiv(out_size, block_out), triton.cdiv(in_size, block_in)
    if tiles >= 1.5 * sms:
        return None if many else Tiling(block_out, block_in)
    parts = max(1, min(round((2 if many else 3) * sms / tiles), steps // 4, MAX_PARTS))
    return Tiling(block_out, block_in, parts)


@functools.lru_cache(maxsize=4096)
def choose(out_size: int, in_size: int, num_rows: int, device: torch.device) -> Tiling | None:
    """How ``num_rows`` rows are multiplied with an [out_size, in_size] weight; None: by cuBLAS."""
    if num_rows > MAX_ROWS or in_size % 8:
        return None
    for rows, tiling in tuned().get((out_size, in_size), ()):
        if num_rows <= rows:
            return tiling
    return default_tiling(out_size, in_size, num_rows, num_sms(device))


def run_tiled(x: Tensor, weight: Tensor, tiling: Tiling, dtype: torch.dtype, *, raw: bool = False) -> Tensor:
    """Multiply as ``tiling`` says.

    Args:
        x: [N, in]; rows may be strided, N ≤ 64.
        weight: [out, in], contiguous.
        dtype: of the result.
        raw: give partial sums, when there are any, unsummed.

    Returns:
        [N, out] in ``dtype``, or with ``raw`` and more than one part [S, N, out] float32.
    """
    num_rows = x.shape[0]
    out_size, in_size = weight.shape
    steps_of_part = triton.cdiv(triton.cdiv(in_size, tiling.block_in), tiling.parts)
    parts = triton.cdiv(in_size, steps_of_part * tiling.block_in)
    result: Tensor
    if parts > 1:
        result = torch.empty(parts, num_rows, out_size, dtype=torch.float32, device=x.device)
    else:
        result = torch.empty(num_rows, out_size, dtype=dtype, device=x.device)
    if num_rows == 0:
        return torch.empty(0, out_size, dtype=dtype, device=x.device)
    block_rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    launch = pdl(x.device)
    boxes: list[Any] = [None, None]
    if tiling.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        # The stride of a single row may be anything.
        strides = [x.stride(0) if num_rows > 1 else in_size, 1]
        boxes[0] = TensorDescriptor(x, list(x.shape), strides, [block_rows, tiling.block_in])
        boxes[1] = TensorDescriptor.from_tensor(weight, [tiling.block_out, tiling.block_in])
    _skinny_kernel[(triton.cdiv(out_size, tiling.block_out), parts)](
        x,
        weight,
        *boxes,
        result,
        num_rows,
        out_size,
        in_size,
        x.stride(0),
        steps_of_part,
        BLOCK_OUT=tiling.block_out,
        BLOCK_IN=tiling.block_in,
        BLOCK_ROWS=block_rows,
        EVEN=in_size % tiling.block_in == 0,
        TMA=tiling.tma,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch,
    )
    if parts == 1 or raw:
        return result
    return sum_partials(result, dtype)


def sum_partials(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, N, out] float32 → their sum in the order of S, [N, out], rounded once to ``dtype``."""
    num_parts, num_rows, out_size = parts.shape
    out = torch.empty(num_rows, out_size, dtype=dtype, device=parts.device)
    size = num_rows * out_size
    _sum_kernel[(triton.cdiv(size, SUM_BLOCK),)](
        parts, out, size, size, PARTS=num_parts, BLOCK=SUM_BLOCK, num_warps=4, **pdl(parts.device)
    )
    return out


# The operations.


def pack_linear_weight(weight: Tensor) -> Tensor:
    """A checkpoint's [out, in] weight in the layout that ``linear`` reads: as it is, contiguous."""
    return weight.contiguous()


def _tiling(x: Tensor, weight: Tensor) -> Tiling | None:
    if x.dtype is torch.float32 and not INTERPRETED:
        return None
    return choose(weight.shape[0], weight.shape[1], x.shape[0], x.device)


def linear(x: Tensor, packed: Tensor) -> Tensor:
    """[N, in] times a weight from ``pack_linear_weight`` → [N, out], summed in float32 and rounded once."""
    tiling = _tiling(x, packed)
    return F.linear(x, packed) if tiling is None else run_tiled(x, packed, tiling, x.dtype)


def linear_partials(x: Tensor, packed: Tensor) -> Tensor:
    """``linear`` for a result that goes to ``add_rms_norm``: [N, out], or partial sums [S, N, out] float32."""
    tiling = _tiling(x, packed)
    return F.linear(x, packed) if tiling is None else run_tiled(x, packed, tiling, x.dtype, raw=True)


def vocab_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[R, H] times a row-major vocabulary shard [V, H] → [R, V] float32; few rows keep the sums' full precision."""
    tiling = _tiling(hidden, weight)
    if tiling is None:
        return F.linear(hidden, weight).float()
    return run_tiled(hidden, weight, tiling, torch.float32)
