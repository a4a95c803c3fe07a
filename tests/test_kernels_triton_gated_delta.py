"""Gated DeltaNet's Triton kernels against the reference: interpreted at small sizes, on the GPU at real ones."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from triton_tools import mend_interpreter  # noqa: E402

from bireme.kernels import reference  # noqa: E402
from bireme.kernels.triton import gated_delta_decode, gated_delta_prefill  # noqa: E402
from bireme.kernels.triton.gated_delta_decode import DecodeShape  # noqa: E402
from bireme.kernels.triton.launch import pdl_off  # noqa: E402

if INTERPRETED:
    mend_interpreter()

EPS = 1e-6
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="small sizes run in Triton's interpreter only")


@pytest.fixture(autouse=True)
def _no_gradients_and_a_seed():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


class Delta:
    """Random weights and states of one layer; slot 0 and ``nan_slots`` hold NaN."""

    def __init__(self, num_k_heads, group, dim, *, num_slots, dtype=torch.float32, device="cpu", nan_slots=()):
        num_v_heads = num_k_heads * group
        self.values = num_v_heads * dim
        self.channels = 2 * num_k_heads * dim + self.values
        self.width = self.channels + self.values + 2 * num_v_heads
        self.dtype, self.device = dtype, device
        self.weights = [
            torch.randn(4, self.channels) * 0.5,
            torch.randn(num_v_heads),
            -torch.rand(num_v_heads) * 2.0 - 0.01,
            torch.randn(dim) + 1.0,
        ]
        self.weights = [weight.to(device) for weight in self.weights]
        self.recurrent = torch.randn(num_slots, num_v_heads, dim, dim, device=device) * 0.2
        self.conv = torch.randn(num_slots, 3, self.channels, device=device).to(dtype)
        for slot in (0, *nan_slots):
            self.recurrent[slot], self.conv[slot] = torch.nan, torch.nan

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, self.width, device=self.device).to(self.dtype)

    def states(self) -> tuple[Tensor, Tensor]:
        return self.recurrent.clone(), self.conv.clone()

    def decode(self, rows: Tensor, slots: Tensor, states: tuple[Tensor, Tensor], **options) -> Tensor:
        """With the Triton kernel; the output begins as NaN."""
        out = torch.full((len(rows), self.values), torch.nan, dtype=self.dtype, device=self.device)
        return gated_delta_decode.gdn_decode(rows, *self.weights, *states, slots, None, False, EPS, out, **options)

    def expected_decode(self, rows: Tensor, slots: Tensor, states: tuple[Tensor, Tensor]) -> Tensor:
        """With the reference, one row at a time, so that NaN on slot 0 stays there."""
        return torch.cat(
            [
                reference.gdn_decode(
                    rows[row : row + 1], *self.weights, *states, slots[row : row + 1], None, False, EPS
                )
                for row in range(len(rows))
            ]
        )

    def prefill(
        self, rows: Tensor, layout: Layout, states: tuple[Tensor, Tensor], implementation=None, **options
    ) -> Tensor:
        implementation = implementation or gated_delta_prefill
        out = torch.full((len(rows), self.values), torch.nan, dtype=self.dtype, device=self.device)
        return implementation.gdn_prefill(
            rows, *self.weights, *states, *layout.tensors, layout.seq_lens, layout.starts, EPS, out, **options
        )


class Layout:
    """Rows of a prefill as the kernels take them; ``padding`` appends that many entries and rows without tokens."""

    def __init__(self, slots, seq_lens, starts, *, padding=0, device="cpu"):
        self.seq_lens, self.starts = seq_lens, starts
        offsets = torch.tensor([0, *seq_lens, *[0] * padding]).cumsum(0).to(torch.int32)
        entries = [
            (row, int(offsets[row]) + at, min(64, length - at), starts[row] + at)
            for row, length in enumerate(seq_lens)
            for at in range(0, length, 64)
        ]
        entries += [(0, 0, 0, 0)] * padding
        self.tensors = [
            torch.tensor([*slots, *[0] * padding]).to(device),
            offsets.to(device),
            torch.tensor([*starts, *[0] * padding], dtype=torch.int32).to(device),
            torch.tensor(entries, dtype=torch.int32).to(device),
        ]


def assert_others_unchanged(found, before, used):
    for now, then in zip(found, before, strict=True):
        others = [slot for slot in range(1, len(now)) if slot not in used]
        assert torch.equal(now[others].nan_to_num(99.0), then[others].nan_to_num(99.0))


def nan_scratch(monkeypatch):
    """Uninitialised memory becomes NaN (or garbage integers) wherever the kernels' wrappers ask for it."""
    empty, new_empty = torch.empty, Tensor.new_empty

    def filled(tensor):
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(-7)

    monkeypatch.setattr(torch, "empty", lambda *args, **options: filled(empty(*args, **options)))
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *args, **options: filled(new_empty(self, *args, **options)))


def assert_close_in_bfloat16(found: Tensor, expected: Tensor, bound: float = 0.02) -> None:
    """Root mean square of the difference, as a share of the expected one's; and no single outlier."""
    found, expected = found.float(), expected.float()
    assert found.isfinite().all()
    scale = expected.square().mean().sqrt()
    error = (found - expected).square().mean().sqrt() / scale
    worst = (found - expected).abs().max() / scale
    print(f"relative rms error {error:.2e}, worst {worst:.2e}")
    assert error < bound
    assert worst < 100 * bound


# small sizes, interpreted


@needs_interpreter
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (1, 4, 16, 2)])
def test_an_interpreted_decode_step_equals_the_reference(group, shape, monkeypatch):
    layer = Delta(2, group, 32, num_slots=6, nan_slots=[2])
    slots = torch.tensor([5, 1, 3])
    found, expected = layer.states(), layer.states()
    before = layer.states()
    want = [layer.expected_decode(rows, slots, expected) for rows in (layer.rows(3), layer.rows(3))]
    torch.manual_seed(0)
    layer2 = Delta(2, group, 32, num_slots=6, nan_slots=[2])
    nan_scratch(monkeypatch)
    for step in range(2):  # twice: counters are zero again
        got = layer.decode(layer2.rows(3), slots, found, shape=DecodeShape(*shape))
        torch.testing.assert_close(got, want[step], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found[0][1:], expected[0][1:], atol=1e-5, rtol=1e-5, equal_nan=True)
    assert torch.equal(found[1][1:].nan_to_num(9.0), expected[1][1:].nan_to_num(9.0))
    assert_others_unchanged(found, before, [5, 1, 3])


@needs_interpreter
@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (1, 4, 16, 2)])
def test_interpreted_padding_rows_that_share_slot_zero_disturb_nobody(shape):
    layer = Delta(2, 3, 32, num_slots=5)
    rows, slots = layer.rows(6), torch.tensor([0, 4, 0, 0, 2, 0])
    found, expected, before = layer.states(), layer.states(), layer.states()
    got = layer.decode(rows, slots, found, shape=DecodeShape(*shape))
    want = layer.expected_decode(rows, slots, expected)
    torch.testing.assert_close(got[[1, 4]], want[[1, 4]], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found[0][1:], expected[0][1:], atol=1e-5, rtol=1e-5)
    assert torch.equal(found[1][1:], expected[1][1:])
    assert_others_unchanged(found, before, [4, 2])
    assert all(int(counters.abs().max()) == 0 for counters in gated_delta_decode._counters[torch.device("cpu")])


@needs_interpreter
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_interpreted_ragged_prefill_equals_the_reference(group, monkeypatch):
    seq_lens, starts, slots = [1, 65, 3, 130, 63, 64], [0, 64, 5, 0, 192, 0], [5, 1, 8, 3, 9, 2]
    fresh = [5, 3, 2]
    layer = Delta(1, group, 16, num_slots=10, nan_slots=[*fresh, 6])
    layout = Layout(slots, seq_lens, starts, padding=2)
    exact = Layout(slots, seq_lens, starts)
    rows = layer.rows(sum(seq_lens))
    found, expected, before = layer.states(), layer.states(), layer.states()
    want = layer.prefill(rows, exact, expected, reference)
    nan_scratch(monkeypatch)
    got = layer.prefill(rows, layout, found, block_v=16)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found[0][slots], expected[0][slots], atol=1e-5, rtol=1e-4)
    assert torch.equal(found[1][slots], expected[1][slots])
    assert_others_unchanged(found, before, slots)


@needs_interpreter
def test_interpreted_prefill_in_pieces_leaves_the_state_that_one_piece_leaves():
    layer = Delta(2, 2, 16, num_slots=4, nan_slots=[1, 2])
    rows, states = layer.rows(150), layer.states()
    whole = layer.prefill(rows, Layout([1], [150], [0]), states)
    pieces, start = [], 0
    for length in (64, 1, 2, 63, 20):
        pieces.append(layer.prefill(rows[start : start + length], Layout([2], [length], [start]), states))
        start += length
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(states[0][2], states[0][1], atol=1e-5, rtol=1e-4)
    assert torch.equal(states[1][2], states[1][1])


@needs_interpreter
def test_an_interpreted_prompt_of_one_repeated_token_is_solved_as_exactly():
    """Every off-diagonal element of A is then near its largest: products of powers of A would overflow in float32."""
    layer = Delta(1, 2, 16, num_slots=2)
    layer.weights[2] = torch.full((2,), -1e-4)
    rows = layer.rows(1).expand(128, -1).contiguous()
    rows[:, -4:-2] = 8.0
    found, expected = layer.states(), layer.states()
    layout = Layout([1], [128], [0])
    want = layer.prefill(rows, layout, expected, reference)
    torch.testing.assert_close(layer.prefill(rows, layout, found), want, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found[0][1], expected[0][1], atol=1e-4, rtol=1e-4)


@needs_interpreter
@pytest.mark.parametrize("repeated", [False, True])
def test_interpreted_prefill_in_bfloat16_errs_by_its_rounding_only(repeated):
    """A repeated token is the hard case: what a chunk's tokens write then nearly cancels."""
    layer = Delta(1, 1, 128, num_slots=2, dtype=torch.bfloat16)
    rows = layer.rows(200)
    if repeated:
        layer.weights[2] = torch.full((1,), -1e-4)
        rows = rows[:1].expand(200, -1).contiguous()
        rows[:, -2] = 6.0
    layout = Layout([1], [200], [0])
    found, expected = layer.states(), layer.states()
    want = layer.prefill(rows, layout, expected, reference)
    assert_close_in_bfloat16(layer.prefill(rows, layout, found), want)
    assert_close_in_bfloat16(found[0][1], expected[0][1])


@needs_interpreter
def test_interpreted_strong_decay_neither_overflows_nor_gives_nan():
    layer = Delta(1, 1, 16, num_slots=2)
    layer.weights[1], layer.weights[2] = torch.full((1,), 10.0), torch.full((1,), -50.0)
    rows, layout = layer.rows(100), Layout([1], [100], [0])
    found, expected = layer.states(), layer.states()
    want = layer.prefill(rows, layout, expected, reference)
    torch.testing.assert_close(layer.prefill(rows, layout, found), want, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found[0][1], expected[0][1], atol=1e-5, rtol=1e-4)


def test_sizes_that_the_kernels_do_not_know_are_refused_by_number():
    layer = Delta(1, 1, 16, num_slots=2)
    with pytest.raises(ValueError, match="linear_conv_kernel_dim is 3"):
        gated_delta_decode.num_key_heads(layer.weights[0][:3], layer.recurrent)
    with pytest.raises(ValueError, match=r"head dimensions are 16 \(keys\) and 24"):
        gated_delta_decode.num_key_heads(layer.weights[0], layer.recurrent.new_empty(2, 1, 16, 24))


# real sizes, on the GPU

GEOMETRIES = [(16, 1), (16, 2), (16, 3), (8, 3)]
"""(key heads, value heads a key head): 0.8B, 4B and 9B, 27B, half of 27B."""


def on_gpu(num_k_heads, group, num_slots, **options) -> Delta:
    return Delta(num_k_heads, group, 128, num_slots=num_slots, dtype=torch.bfloat16, device="cuda", **options)


def assert_counters_are_zero():
    for buffers in gated_delta_decode._counters.values():
        assert all(int(counters.abs().max()) == 0 for counters in buffers)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 16, 70])
@pytest.mark.parametrize("shape", [None, (1, 4), (2, 4), (4, 2), (1, 4, 32, 2), (1, 4, 32, 3), (1, 2, 16, 3)])
@pytest.mark.parametrize(("num_k_heads", "group"), GEOMETRIES)
def test_a_decode_step_at_real_sizes_equals_the_reference(num_k_heads, group, shape, num_rows):
    layer = on_gpu(num_k_heads, group, 80, nan_slots=[7])
    slots = torch.randperm(72, device="cuda")[:num_rows] + 8
    found, expected, before = layer.states(), layer.states(), layer.states()
    for _ in range(3):
        rows = layer.rows(num_rows)
        want = reference.gdn_decode(rows, *layer.weights, *expected, slots, None, False, EPS)
        got = layer.decode(rows, slots, found, shape=shape and DecodeShape(*shape))
        assert_close_in_bfloat16(got, want, 0.005)
    assert_close_in_bfloat16(found[0][slots], expected[0][slots], 0.005)
    assert torch.equal(found[1][slots], expected[1][slots])
    assert_others_unchanged(found, before, slots.tolist())
    assert_counters_are_zero()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [None, (4, 4), (1, 4, 32, 3)])
def test_many_padding_rows_on_slot_zero_neither_hang_nor_touch_others(shape):
    layer = on_gpu(16, 3, 6)
    slots = torch.tensor([3, *[0] * 60, 5], device="cuda")
    found, expected, before = layer.states(), layer.states(), layer.states()
    for _ in range(5):
        rows = layer.rows(62)
        got = layer.decode(rows, slots, found, shape=shape and DecodeShape(*shape))
        want = reference.gdn_decode(rows[[0, 61]], *layer.weights, *expected, slots[[0, 61]], None, False, EPS)
        assert_close_in_bfloat16(got[[0, 61]], want, 0.005)
    assert torch.equal(found[1][[3, 5]], expected[1][[3, 5]])
    assert_others_unchanged(found, before, [3, 5])
    assert_counters_are_zero()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [None, (2, 4), (4, 4), (1, 4, 32, 3)])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_captured_decode_step_replays_with_other_slots_and_rows(num_rows, shape):
    layer = on_gpu(16, 3, 40)
    rows, slots = layer.rows(num_rows), torch.zeros(num_rows, dtype=torch.int64, device="cuda")
    found, expected = layer.states(), layer.states()
    options = {"shape": shape}
    layer.decode(rows, slots, found, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = layer.decode(rows, slots, found, **options)
        second = layer.decode(rows, slots, found, **options)  # two steps follow each other at once
    for _ in range(6):
        slots.copy_(torch.randperm(39, device="cuda")[:num_rows] + 1)
        rows.copy_(layer.rows(num_rows))
        graph.replay()
        for got in (first, second):
            want = reference.gdn_decode(rows, *layer.weights, *expected, slots, None, False, EPS)
            assert_close_in_bfloat16(got, want, 0.005)
    assert_close_in_bfloat16(found[0][1:], expected[0][1:], 0.005)
    assert torch.equal(found[1][1:], expected[1][1:])
    assert_counters_are_zero()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16x3"])
@pytest.mark.parametrize(("num_k_heads", "group"), GEOMETRIES)
def test_ragged_prefill_at_real_sizes_equals_the_reference(num_k_heads, group, precision, monkeypatch):
    seq_lens = [1, 65, 3, 130, 63, 64, 2, 700]
    starts, slots = [0, 64, 5, 0, 192, 0, 0, 64], [5, 1, 8, 3, 9, 2, 7, 4]
    layer = on_gpu(num_k_heads, group, 12, nan_slots=[5, 3, 2, 7, 6])
    rows = layer.rows(sum(seq_lens))
    found, expected, before = layer.states(), layer.states(), layer.states()
    want = layer.prefill(rows, Layout(slots, seq_lens, starts, device="cuda"), expected, reference)
    nan_scratch(monkeypatch)
    layout = Layout(slots, seq_lens, starts, padding=3, device="cuda")
    got = layer.prefill(rows, layout, found, precision=precision)
    for got_row, want_row in zip(got.split(seq_lens), want.split(seq_lens), strict=True):
        assert_close_in_bfloat16(got_row, want_row)
    for slot in slots:
        assert_close_in_bfloat16(found[0][slot], expected[0][slot])
    assert torch.equal(found[1][slots], expected[1][slots])
    assert_others_unchanged(found, before, slots)


@pytest.mark.gpu
@pytest.mark.parametrize("block_v", [16, 32, 64])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_tiling_of_the_scan_gives_the_reference_over_many_chunks(block_v, stages):
    layer = on_gpu(16, 3, 3, nan_slots=[1])
    rows, layout = layer.rows(2049), Layout([1], [2049], [0], device="cuda")
    found, expected = layer.states(), layer.states()
    want = layer.prefill(rows, layout, expected, reference)
    got = layer.prefill(rows, layout, found, block_v=block_v, scan_stages=stages)
    assert_close_in_bfloat16(got, want)
    assert_close_in_bfloat16(found[0][1], expected[0][1])


@pytest.mark.gpu
def test_prefill_in_pieces_leaves_the_state_of_one_piece_and_decode_continues_from_it():
    layer = on_gpu(16, 2, 4, nan_slots=[1, 2])
    rows, states = layer.rows(400), layer.states()
    whole = layer.prefill(rows, Layout([1], [400], [0], device="cuda"), states)
    pieces, start = [], 0
    for length in (128, 64, 1, 2, 63, 42, 100):
        pieces.append(
            layer.prefill(rows[start : start + length], Layout([2], [length], [start], device="cuda"), states)
        )
        start += length
    assert_close_in_bfloat16(torch.cat(pieces), whole)
    assert_close_in_bfloat16(states[0][2], states[0][1])
    assert torch.equal(states[1][2], states[1][1])
    expected = (states[0].clone(), states[1].clone())
    rows, slots = layer.rows(2), torch.tensor([2, 1], device="cuda")
    want = reference.gdn_decode(rows, *layer.weights, *expected, slots, None, False, EPS)
    assert_close_in_bfloat16(layer.decode(rows, slots, states), want, 0.005)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16x3"])
def test_a_prompt_of_one_repeated_token_is_solved_as_exactly(precision):
    layer = on_gpu(16, 2, 2)
    layer.weights[2] = torch.full((32,), -1e-4, device="cuda")
    rows = layer.rows(1).expand(640, -1).contiguous()
    rows[:, -64:-32] = 6.0
    layout = Layout([1], [640], [0], device="cuda")
    found, expected = layer.states(), layer.states()
    want = layer.prefill(rows, layout, expected, reference)
    assert_close_in_bfloat16(layer.prefill(rows, layout, found, precision=precision), want)
    assert_close_in_bfloat16(found[0][1], expected[0][1])


@pytest.mark.gpu
def test_a_captured_prefill_replays_with_other_rows_and_rows_without_tokens():
    layer = on_gpu(16, 3, 12)
    num_tokens, num_rows, num_chunks = 256, 5, 4 + 5
    plans = [
        ([4, 9], [256, 0], [0, 0]),
        ([5, 3, 2, 0], [1, 64, 65, 126], [0, 64, 5, 0]),  # the last one is padding on slot 0
        ([7], [256], [128]),
        ([4, 9, 1, 2, 3], [100, 100, 50, 3, 3], [256, 0, 0, 70, 128]),
    ]
    buffers = [
        torch.zeros(num_rows, dtype=torch.int64, device="cuda"),
        torch.zeros(num_rows + 1, dtype=torch.int32, device="cuda"),
        torch.zeros(num_rows, dtype=torch.int32, device="cuda"),
        torch.zeros(num_chunks, 4, dtype=torch.int32, device="cuda"),
    ]
    rows = layer.rows(num_tokens)
    found, expected = layer.states(), layer.states()

    def run() -> Tensor:
        bounds = [num_tokens] * num_rows, [1000] * num_rows
        return gated_delta_prefill.gdn_prefill(rows, *layer.weights, *found, *buffers, *bounds, EPS)

    before = layer.states()
    run()  # no tokens at all
    assert_others_unchanged(found, before, [])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for slots, seq_lens, starts in [*plans, *plans]:
        rows.copy_(layer.rows(num_tokens))
        before = tuple(state.clone() for state in found)
        layout = Layout(slots, seq_lens, starts, device="cuda")
        for buffer, tensor in zip(buffers, layout.tensors, strict=True):
            buffer.zero_()
            buffer[: len(tensor)].copy_(tensor)
        buffers[1][len(seq_lens) :] = num_tokens
        graph.replay()
        live = [row for row, length in enumerate(seq_lens) if length and slots[row]]
        used = [slots[row] for row in live]
        exact = Layout(used, [seq_lens[row] for row in live], [starts[row] for row in live], device="cuda")
        kept = sum(exact.seq_lens)
        want = layer.prefill(rows[:kept], exact, expected, reference)
        assert_close_in_bfloat16(out[:kept], want)
        assert_close_in_bfloat16(found[0][used], expected[0][used])
        assert torch.equal(found[1][used], expected[1][used])
        assert_others_unchanged(found, before, used)
        for now, then in zip(found, expected, strict=True):
            then.copy_(now)


@pytest.mark.gpu
def test_dependent_launches_give_what_plain_launches_give():
    layer = on_gpu(16, 3, 6)
    rows, step = layer.rows(300), layer.rows(2)
    slots = torch.tensor([2, 5], device="cuda")
    results = []
    for plain in (False, True):
        states = layer.states()
        with pdl_off(plain):
            outputs = [layer.prefill(rows, Layout([2, 5], [200, 100], [0, 64], device="cuda"), states)]
            outputs += [layer.decode(step, slots, states) for _ in range(4)]
        results.append((*outputs, states[0][1:], states[1][1:]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
