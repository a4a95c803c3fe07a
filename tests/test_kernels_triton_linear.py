"""Products, norms, SwiGLU and the vocabulary's ends: Triton's interpreter on CPUs, compiled kernels on a GPU.

What is compared with: the same formula in float64 from the same rounded inputs.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor
from triton_tools import INTERPRETED, mend_interpreter

from bireme.kernels import reference

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
if INTERPRETED:
    mend_interpreter()

ops = importlib.import_module("bireme.kernels.triton.linear")
norm = importlib.import_module("bireme.kernels.triton.norm")
mlp = importlib.import_module("bireme.kernels.triton.mlp")
embedding = importlib.import_module("bireme.kernels.triton.embedding")
Tiling = ops.Tiling

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies no bfloat16
STEP = 2.0**-11 if INTERPRETED else 2.0**-8
"""Half the distance between neighbours of DTYPE, relative: one rounding."""
EPS = 1e-6
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def _no_gradients_and_a_seed():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().t()


def assert_rounded_once(result: Tensor, exact: Tensor, *, sums: float = 5e-5) -> None:
    """Within one rounding of ``exact``, with float32 sums in front of it."""
    assert result.isfinite().all()
    bound = exact.abs() * STEP * 1.01 + exact.abs().amax() * sums
    worst = ((result.double() - exact).abs() - bound).amax()
    assert worst <= 0, f"{worst.item():.3g} past the bound"


def swiglu_exact(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


SHAPES = [(64, 64), (96, 80), (130, 200), (8, 8)] if INTERPRETED else [(64, 64), (96, 80), (2560, 4096), (5120, 6144)]
ROWS = [1, 3, 17] if INTERPRETED else [1, 7, 16, 17, 33, 64]
TILINGS = [
    Tiling(64, 64),
    Tiling(64, 32, parts=3),
    Tiling(128, 64, parts=2, num_stages=3),
    Tiling(64, 64, parts=2, tma=True),
] + ([] if INTERPRETED else [Tiling(64, 128, parts=4), Tiling(128, 128, 2, 8, 3, tma=True)])


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tiled_product_is_rounded_once(shape, rows, tiling):
    x, weight = randn(rows, shape[1]), randn(*shape, scale=shape[1] ** -0.5)
    exact = product(x, weight)
    assert_rounded_once(ops.run_tiled(x, weight, tiling, DTYPE), exact)
    wide = ops.run_tiled(x, weight, tiling, torch.float32)
    assert wide.dtype is torch.float32
    torch.testing.assert_close(wide.double(), exact, atol=5e-4, rtol=1e-4)
    raw = ops.run_tiled(x, weight, tiling, DTYPE, raw=True)
    if raw.dim() == 3:
        assert raw.dtype is torch.float32 and raw.shape[0] <= tiling.parts
        torch.testing.assert_close(raw.double().sum(0), exact, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_nothing_is_read_or_written_outside_the_operands(tiling):
    """Rows and weights lie within NaN; what is around the result stays."""
    rows, out_size, in_size = 5, 96, 80
    inputs = torch.full((rows + 4, in_size + 16), torch.nan, dtype=DTYPE, device=DEVICE)
    inputs[:rows, :in_size] = randn(rows, in_size)
    table = torch.full((out_size + 64, in_size), torch.nan, dtype=DTYPE, device=DEVICE)
    table[:out_size] = randn(out_size, in_size)
    x, weight = inputs[:rows, :in_size], table[:out_size]
    result = ops.run_tiled(x, weight, tiling, torch.float32)
    torch.testing.assert_close(result.double(), product(x, weight), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(tiling):
    shape = (96, 80) if INTERPRETED else (2560, 4096)
    x, weight = randn(64, shape[1]), randn(*shape)
    close = {"atol": 1e-4, "rtol": 1e-4} if INTERPRETED else {"atol": 0, "rtol": 0}  # numpy's order of sums varies
    whole = ops.run_tiled(x, weight, tiling, torch.float32)
    for rows in (1, 16, 20):
        torch.testing.assert_close(ops.run_tiled(x[:rows], weight, tiling, torch.float32), whole[:rows], **close)
    x[1:] = torch.nan
    torch.testing.assert_close(ops.run_tiled(x, weight, tiling, torch.float32)[0], whole[0], **close)


@pytest.mark.parametrize("rows", [0, 1, 16, 64, 65])
def test_the_operations_agree_with_the_reference(rows):
    out_size, in_size = (96, 80) if INTERPRETED else (2560, 4096)
    x, weight = randn(rows, in_size), randn(out_size, in_size, scale=in_size**-0.5)
    packed = ops.pack_linear_weight(weight)
    exact = product(x, weight)
    if rows:
        assert_rounded_once(ops.linear(x, packed), exact, sums=STEP)  # cuBLAS may round parts of a sum
        logits = ops.vocab_logits(x, weight)
        assert logits.dtype is torch.float32
        assert_rounded_once(logits, exact, sums=STEP)
    assert ops.linear(x, packed).shape == ops.vocab_logits(x, weight).shape == (rows, out_size)
    residual = randn(rows, out_size)
    before = residual.clone()
    partial = ops.linear_partials(x, packed)
    normed, stream = norm.add_rms_norm(partial, residual, torch.ones(out_size, device=DEVICE), EPS)
    assert stream is residual and normed.shape == residual.shape
    if rows:
        torch.testing.assert_close(residual.double(), before.double() + exact, atol=4 * STEP, rtol=4 * STEP)


@pytest.mark.parametrize("rows", [1, 5, 20] if INTERPRETED else [1, 16, 20, 64, 200])
def test_a_feed_forward_block_and_the_next_norm_agree_with_the_reference(monkeypatch, rows):
    """The layers themselves, with a value between them that only these kernels understand."""
    from bireme import kernels
    from bireme.distributed import NullGroup
    from bireme.layers.mlp import MLP
    from bireme.layers.norm import RMSNorm

    hidden, inner = (64, 640) if INTERPRETED else (2560, 9216)
    x, residual = randn(rows, hidden), randn(rows, hidden)
    weights = {
        "gate_up_proj.weight": randn(2 * inner, hidden, scale=hidden**-0.5),
        "down_proj.weight": randn(hidden, inner, scale=inner**-0.5),
        "weight": randn(hidden, scale=0.2),
    }
    results = []
    for compiled in (False, True):
        chosen = importlib.import_module("bireme.kernels.triton") if compiled else reference
        monkeypatch.setattr(kernels, "for_device", lambda device, chosen=chosen: chosen)
        block = MLP(hidden, inner, NullGroup(), device=torch.device(DEVICE))
        following = RMSNorm(hidden, EPS, device=torch.device(DEVICE))
        for layer in (block, following):
            for name, _, take in layer.expected():
                take(weights[name])
        results.append(following.add_forward(block.forward(x), residual.clone()))
    for plain, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel.double(), plain.double(), atol=6 * STEP, rtol=6 * STEP)


def test_float32_models_are_multiplied_in_full_precision():
    if INTERPRETED:
        pytest.skip("the interpreter stands in for the kernel, not for cuBLAS")
    x, weight = torch.randn(3, 4096, device=DEVICE), torch.randn(512, 4096, device=DEVICE)
    for result in (ops.linear(x, weight), ops.linear_partials(x, weight), ops.vocab_logits(x, weight)):
        torch.testing.assert_close(result.double(), product(x, weight), atol=1e-3, rtol=1e-5)


# norms, activation, embedding

SIZES = [8, 80, 256] if INTERPRETED else [8, 80, 2560, 4096, 5120]
NORM_ROWS = [1, 5] if INTERPRETED else [1, 5, 64, 16384]


def normed_exact(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("rows", NORM_ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_is_rounded_once(size, rows):
    x, weight = randn(rows, size, scale=3.0), torch.randn(size, device=DEVICE)
    assert_rounded_once(norm.rms_norm(x, weight, EPS), normed_exact(x, weight), sums=1e-6)


def test_rms_norm_takes_heads_and_a_weight_for_each():
    x, weight = randn(5, 3, 64), torch.randn(3, 64, device=DEVICE)
    assert_rounded_once(norm.rms_norm(x, weight, EPS), normed_exact(x, weight), sums=1e-6)


def test_rms_norm_of_zeros_is_zero():
    assert not norm.rms_norm(torch.zeros(2, 80, dtype=DTYPE, device=DEVICE), torch.ones(80, device=DEVICE), EPS).any()


@pytest.mark.parametrize("parts", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("rows", NORM_ROWS[:3])
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_rounds_the_product_and_then_the_sum(size, rows, parts):
    residual, weight = randn(rows, size), torch.randn(size, device=DEVICE)
    x = torch.randn(parts, rows, size, device=DEVICE) if parts else randn(rows, size)
    total = x
    if parts:
        total = x[0].clone()
        for part in x[1:]:
            total += part
    expected = residual + total.to(DTYPE)
    normed, stream = norm.add_rms_norm(x, residual, weight, EPS)
    assert stream is residual
    assert torch.equal(residual, expected)
    assert_rounded_once(normed, normed_exact(expected, weight), sums=1e-6)


@pytest.mark.parametrize("rows", NORM_ROWS)
@pytest.mark.parametrize("size", [8, 1100] if INTERPRETED else [8, 1100, 17408])
def test_silu_and_mul_is_rounded_once(size, rows):
    gate_up = randn(rows, 2 * size, scale=4.0)
    result = mlp.silu_and_mul(gate_up)
    assert_rounded_once(result, swiglu_exact(gate_up), sums=1e-6)


def test_silu_of_large_gates_is_finite():
    gate_up = torch.tensor([[-200.0, 200.0, -3.0, 1.0, 1.0, 1.0]], device=DEVICE).to(DTYPE)
    assert mlp.silu_and_mul(gate_up).tolist()[0][:2] == [0.0, 200.0]


@pytest.mark.parametrize("hidden", [8, 1030])
def test_embedding_takes_whole_tables_and_shards(hidden):
    table = randn(12, hidden)
    token_ids = torch.tensor([0, 3, 4, 11, 7, 5], device=DEVICE)
    assert torch.equal(embedding.embed(token_ids, table, None), table[token_ids])
    shards = [embedding.embed(token_ids, table[first : first + 4].contiguous(), first) for first in (0, 4, 8)]
    for first, shard in zip((0, 4, 8), shards, strict=True):
        expected = reference.embed(token_ids, table[first : first + 4], first)
        assert torch.equal(shard, expected)


def test_empty_batches_give_empty_results():
    weight = torch.ones(16, device=DEVICE)
    assert norm.rms_norm(randn(0, 16), weight, EPS).shape == (0, 16)
    assert norm.add_rms_norm(randn(0, 16), randn(0, 16), weight, EPS)[0].shape == (0, 16)
    assert mlp.silu_and_mul(randn(0, 16)).shape == (0, 8)
    assert embedding.embed(torch.zeros(0, dtype=torch.int64, device=DEVICE), randn(4, 16), None).shape == (0, 16)


@pytest.mark.skipif(INTERPRETED, reason="graphs need a device")
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_captured_chain_gives_what_the_eager_one_gives(rows):
    """Product, norm, SwiGLU product, norm, with early launches on and off: the same bits every time."""
    from bireme.kernels.triton.launch import pdl_off

    hidden, inner = 2560, 4096
    up, down = randn(2 * inner, hidden, scale=hidden**-0.5), randn(hidden, inner, scale=inner**-0.5)
    weight = torch.ones(hidden, device=DEVICE)
    start = randn(rows, hidden)

    def chain() -> tuple[Tensor, Tensor]:
        residual = start.clone()
        x = norm.rms_norm(residual, weight, EPS)
        for _ in range(4):
            x, residual = norm.add_rms_norm(
                ops.linear_partials(mlp.silu_and_mul(ops.linear(x, up)), down), residual, weight, EPS
            )
        return x, residual

    with pdl_off():
        expected = chain()
    torch.cuda.synchronize()
    for active in (False, True):
        with pdl_off(active):
            chain()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = chain()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result[0], expected[0])
        assert torch.equal(result[1], expected[1])


# the table


def test_the_table_in_the_package_is_well_formed():
    for (out_size, in_size), entries in ops.tuned().items():
        assert out_size > 0 and in_size % 8 == 0
        assert [rows for rows, _ in entries] == sorted({rows for rows, _ in entries})
        for _, tiling in entries:
            if tiling is not None:
                assert tiling.block_out in (32, 64, 128, 256) and 1 <= tiling.parts <= ops.MAX_PARTS


def test_a_table_says_up_to_how_many_rows_an_entry_holds():
    table = ops.read_table(
        {"shapes": {"64x128": {"64": {"backend": "cublas"}, "16": {"backend": "triton", "parts": 4, "tma": True}}}}
    )
    assert table == {(64, 128): [(16, Tiling(parts=4, tma=True)), (64, None)]}


@pytest.mark.parametrize("shape", [(2560, 9216), (5120, 17408), (5120, 6144), (64, 64), (248320, 5120)], ids=str)
def test_the_default_cut_reads_every_input_in_a_few_parts(shape):
    for rows in (1, 16, 64):
        tiling = ops.default_tiling(*shape, rows, 132)
        if tiling is None:
            assert rows > 32 and shape[0] > 5120
            continue
        assert 1 <= tiling.parts <= ops.MAX_PARTS
        if shape[0] <= 5120 and shape[1] >= 4096:
            assert tiling.parts > 1
