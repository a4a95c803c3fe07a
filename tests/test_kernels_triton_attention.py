"""The attention kernels against the reference: in Triton's interpreter on CPUs, at real sizes on a GPU.

Caches hold NaN wherever no row has written, and results go into buffers of NaN.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_tools import INTERPRETED, mend_interpreter

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from bireme.kernels import reference
from bireme.kernels.triton import attention_decode, attention_inputs, attention_prefill

if INTERPRETED:
    mend_interpreter()
DEVICE = "cpu" if INTERPRETED else "cuda"
# Padding rows read block 0, which is NaN here: numpy warns where a device does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu
real_sizes = pytest.mark.skipif(INTERPRETED, reason="real sizes need a CUDA device")
EPS = 1e-6


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal but for rounding, in units of each row's typical value: means over many keys are small."""
    typical = expected.square().mean(-1, keepdim=True).sqrt()
    close = {"atol": 1e-4, "rtol": 1e-5} if found.dtype is torch.float32 else {"atol": 2e-2, "rtol": 1e-2}
    torch.testing.assert_close(found.float() / typical, expected / typical, **close)


@pytest.fixture(autouse=True)
def _no_gradients_and_a_seed():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def offsets_of(seq_lens: list[int]) -> Tensor:
    return torch.tensor([0, *seq_lens]).cumsum(0).to(torch.int32).to(DEVICE)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Cache:
    """K and V of rows in shuffled blocks; block 0, and everything beyond a row's context, is NaN."""

    def __init__(
        self, contexts: list[int], *, heads: int, dim: int, block_size: int = 16, dtype=torch.float32, extra_blocks=2
    ) -> None:
        counts = [-(-context // block_size) for context in contexts]
        shape = (sum(counts) + 3, heads, block_size, dim)
        self.k, self.v = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
        order = (torch.randperm(shape[0] - 1) + 1).tolist()
        tables = torch.zeros(len(contexts), max(counts) + extra_blocks, dtype=torch.int32)
        owned = torch.zeros(shape[0], block_size, dtype=torch.bool)
        for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
            flat = torch.arange(count * block_size).view(count, block_size) < context
            owned[blocks] = flat
        hidden = ~owned.to(DEVICE)[:, None, :, None]
        self.k.masked_fill_(hidden, torch.nan)
        self.v.masked_fill_(hidden, torch.nan)
        self.tables = tables.to(DEVICE)

    def wide(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.k.float(), self.v.float(), self.tables

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.k, self.v, self.tables


def query_and_gate(num: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries, and gates as strided as those inside a fused projection."""
    fused = torch.randn(num, 2 * heads * dim + 3 * dim, device=DEVICE).to(dtype)
    gate = fused[:, : 2 * heads * dim].view(num, heads, 2, dim).select(2, 1)
    return torch.randn(num, heads, dim, device=DEVICE).to(dtype), gate


def check_decode(contexts: list[int], *, group: int, kv_heads: int, dim: int, dtype, block_size: int) -> None:
    cache = Cache(contexts, heads=kv_heads, dim=dim, block_size=block_size, dtype=dtype)
    query, gate = query_and_gate(len(contexts), group * kv_heads, dim, dtype)
    lens = int32(contexts)
    out = torch.full((len(contexts), group * kv_heads * dim), torch.nan, device=DEVICE, dtype=dtype)
    found = attention_decode.paged_decode_attention(query, gate, *cache.args, lens, max(contexts), out)
    assert found is out
    expected = reference.paged_decode_attention(query.float(), gate.float(), *cache.wide(), lens, max(contexts))
    assert_close(found, expected)


def check_prefill(
    seq_lens: list[int], starts: list[int], *, group: int, kv_heads: int, dim: int, dtype, block_size: int
) -> None:
    contexts = [length + start for length, start in zip(seq_lens, starts, strict=True)]
    cache = Cache(contexts, heads=kv_heads, dim=dim, block_size=block_size, dtype=dtype)
    query, gate = query_and_gate(sum(seq_lens), group * kv_heads, dim, dtype)
    out = torch.full((sum(seq_lens), group * kv_heads * dim), torch.nan, device=DEVICE, dtype=dtype)
    rows = (offsets_of(seq_lens), int32(starts), seq_lens, starts)
    found = attention_prefill.paged_prefill_attention(query, gate, *cache.args, *rows, out)
    assert found is out
    expected = reference.paged_prefill_attention(query.float(), gate.float(), *cache.wide(), *rows)
    assert_close(found, expected)


# rotation, norms, cache writes


@pytest.mark.parametrize("num_tokens", [1, 3, 70])
def test_angles_far_into_a_context_have_the_cosines_of_the_reference(num_tokens):
    positions = torch.randint(0, 262_144, (num_tokens,), device=DEVICE)
    positions[-1] = 262_143
    frequencies = 1.0 / 1e7 ** (torch.arange(0, 64, 2, device=DEVICE) / 64)
    for found, expected in zip(
        attention_inputs.rotary_cos_sin(positions, frequencies),
        reference.rotary_cos_sin(positions, frequencies),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"), [(6, 2, 32, 8), (4, 4, 16, 16), (3, 1, 48, 12), (8, 1, 64, 16)]
)
@pytest.mark.parametrize("num_tokens", [1, 5, 67])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_normalised_rotated_and_stored_like_the_reference(
    heads, kv_heads, dim, rotary_dim, num_tokens, dtype
):
    check_norm_rope(heads, kv_heads, dim, rotary_dim, num_tokens, dtype, block_size=4)


def check_norm_rope(heads, kv_heads, dim, rotary_dim, num_tokens, dtype, block_size) -> None:
    qkv = (torch.randn(num_tokens, 2 * (heads + kv_heads) * dim, device=DEVICE) * 3).to(dtype)
    before = qkv.clone()
    factors = torch.randn(heads + kv_heads, dim, device=DEVICE)
    shape = (-(-num_tokens // block_size) + 3, kv_heads, block_size, dim)
    indices = (torch.randperm((shape[0] - 1) * block_size)[:num_tokens] + block_size).to(DEVICE)
    positions = torch.randint(0, 10_000, (num_tokens,), device=DEVICE)
    angles = reference.rotary_cos_sin(positions, 1.0 / 1e7 ** (torch.arange(0, rotary_dim, 2, device=DEVICE) / dim))
    caches = [torch.full(shape, torch.nan, device=DEVICE, dtype=dtype) for _ in range(4)]
    query, gate = attention_inputs.qk_norm_rope_write_kv(qkv, factors, *angles, *caches[:2], indices, EPS)
    expected, expected_gate = reference.qk_norm_rope_write_kv(
        before.clone(), factors, *angles, *caches[2:], indices, EPS
    )
    close = {"atol": 2e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    assert query.is_contiguous()
    torch.testing.assert_close(query, expected.contiguous(), **close)
    assert torch.equal(gate, expected_gate)
    assert torch.equal(qkv, before)
    torch.testing.assert_close(caches[0], caches[2], **close, equal_nan=True)
    torch.testing.assert_close(caches[1], caches[3], atol=0, rtol=0, equal_nan=True)


# decode


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_attention_equals_the_reference_for_every_group_size(group, dtype, monkeypatch):
    monkeypatch.setattr(attention_decode, "SPAN", 32)
    check_decode([1, 15, 33, 64, 100], group=group, kv_heads=2, dim=32, dtype=dtype, block_size=16)


@pytest.mark.parametrize(("block_size", "dim"), [(16, 16), (32, 64), (64, 32), (128, 16)])
def test_decode_attention_equals_the_reference_for_every_block_size(block_size, dim, monkeypatch):
    monkeypatch.setattr(attention_decode, "SPAN", 64)
    check_decode([1, 63, 64, 65, 129], group=3, kv_heads=1, dim=dim, dtype=torch.float32, block_size=block_size)


def test_contexts_longer_than_all_spans_have_longer_spans(monkeypatch):
    monkeypatch.setattr(attention_decode, "SPAN", 32)
    monkeypatch.setattr(attention_decode, "MAX_SPANS", 4)
    contexts = [300, 2, 129, 200]
    assert attention_decode.max_splits(len(contexts), 2, 300, torch.device(DEVICE)) == 4
    check_decode(contexts, group=2, kv_heads=2, dim=16, dtype=torch.float32, block_size=16)


def test_a_row_decodes_to_the_same_bits_alone_and_among_others(monkeypatch):
    monkeypatch.setattr(attention_decode, "SPAN", 32)
    contexts = [100, 1, 40, 77]
    cache = Cache(contexts, heads=2, dim=32)
    query, gate = query_and_gate(4, 6, 32, torch.float32)
    lens = int32(contexts)
    together = attention_decode.paged_decode_attention(query, gate, *cache.args, lens, 128)
    for row in range(4):
        here = slice(row, row + 1)
        alone = attention_decode.paged_decode_attention(
            query[here], gate[here], cache.k, cache.v, cache.tables[here], lens[here], 128
        )
        assert torch.equal(alone, together[here])


def test_many_padding_rows_on_block_zero_leave_the_others_alone(monkeypatch):
    monkeypatch.setattr(attention_decode, "SPAN", 32)
    cache = Cache([70], heads=2, dim=16)
    query, gate = query_and_gate(6, 4, 16, torch.float32)
    tables = torch.zeros(6, cache.tables.shape[1], dtype=torch.int32, device=DEVICE)
    tables[2] = cache.tables[0]
    lens = int32([1, 0, 70, 1, 1, 1])
    out = attention_decode.paged_decode_attention(query, gate, cache.k, cache.v, tables, lens, 1 << 18)
    expected = reference.paged_decode_attention(query[2:3], gate[2:3], *cache.args, lens[2:3], 70)
    assert_close(out[2:3], expected)


def test_a_bound_of_the_context_changes_neither_result_nor_grid_much():
    cache = Cache([50], heads=1, dim=16)
    query, gate = query_and_gate(1, 2, 16, torch.float32)
    tight, loose = (
        attention_decode.paged_decode_attention(query, gate, *cache.args, int32([50]), bound) for bound in (50, 1 << 18)
    )
    assert torch.equal(tight, loose)
    assert attention_decode.max_splits(64, 4, 1 << 18, torch.device(DEVICE)) <= attention_decode.MAX_SPANS // 64
    assert attention_decode.max_splits(1, 4, 1 << 30, torch.device(DEVICE)) <= 512


# prefill


@pytest.mark.parametrize("group", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_attention_equals_the_reference_for_every_group_size(group, dtype):
    check_prefill([1, 70, 3], [0, 0, 33], group=group, kv_heads=2, dim=16, dtype=dtype, block_size=16)


@pytest.mark.parametrize(("block_size", "dim"), [(16, 32), (32, 16), (64, 16), (128, 16)])
def test_ragged_chunks_with_history_equal_the_reference_for_every_block_size(block_size, dim):
    seq_lens, starts = [1, 65, 3, 64, 1, 40], [0, 0, 64, 63, 150, 17]
    for dtype in (torch.float32, torch.bfloat16):
        check_prefill(seq_lens, starts, group=3, kv_heads=1, dim=dim, dtype=dtype, block_size=block_size)


def test_prefill_by_upper_bounds_with_empty_rows_and_a_padding_row_equals_the_reference():
    seq_lens, starts = [5, 0, 70, 0], [40, 0, 0, 0]
    cache = Cache([45, 1, 70, 1], heads=2, dim=16)
    num_padding, bounds = 21, ([96] * 5, [1 << 18] * 5)
    tables = torch.cat((cache.tables, torch.zeros_like(cache.tables[:1])))
    query, gate = query_and_gate(75 + num_padding, 4, 16, torch.float32)
    device_rows = (offsets_of([*seq_lens, num_padding]), int32([*starts, 0]))
    found = attention_prefill.paged_prefill_attention(query, gate, cache.k, cache.v, tables, *device_rows, *bounds)
    rows = (offsets_of([5, 70]), int32([40, 0]), [5, 70], [40, 0])
    expected = reference.paged_prefill_attention(query[:75], gate[:75], cache.k, cache.v, cache.tables[::2], *rows)
    assert_close(found[:75], expected)


def test_prefill_tokens_get_the_same_bits_whatever_is_packed_with_them():
    seq_lens, starts = [40, 65], [64, 0]
    cache = Cache([104, 65], heads=1, dim=16)
    query, gate = query_and_gate(105, 2, 16, torch.float32)
    rows = (offsets_of(seq_lens), int32(starts), seq_lens, starts)
    together = attention_prefill.paged_prefill_attention(query, gate, *cache.args, *rows)
    alone = attention_prefill.paged_prefill_attention(
        query[40:], gate[40:], cache.k, cache.v, cache.tables[1:], offsets_of([65]), int32([0]), [65], [0]
    )
    assert torch.equal(alone, together[40:])


@pytest.mark.parametrize(("dim", "block_size"), [(48, 16), (8, 16), (16, 24)])
def test_sizes_that_the_kernels_cannot_tile_are_refused_with_their_value(dim, block_size):
    cache = Cache([3], heads=1, dim=dim, block_size=block_size)
    query, gate = query_and_gate(1, 1, dim, torch.float32)
    with pytest.raises(ValueError, match=str(dim if dim != 16 else block_size)):
        attention_decode.paged_decode_attention(query, gate, *cache.args, int32([3]), 3)
    with pytest.raises(ValueError, match=str(dim if dim != 16 else block_size)):
        attention_prefill.paged_prefill_attention(query, gate, *cache.args, offsets_of([1]), int32([2]), [1], [2])


# real sizes, compiled

HEADS = [(6, 4), (4, 4), (4, 2), (6, 2), (4, 1), (1, 4), (2, 4), (8, 1)]


@real_sizes
@pytest.mark.parametrize(("group", "kv_heads"), HEADS)
@pytest.mark.parametrize("contexts", [[1], [300], [8192], [1, 63, 64, 65, 127, 128, 129, 1000, 5000], [257] * 64])
def test_decode_at_real_sizes(group, kv_heads, contexts):
    check_decode(contexts, group=group, kv_heads=kv_heads, dim=256, dtype=torch.bfloat16, block_size=64)


@real_sizes
def test_decode_of_256_ragged_rows_at_real_sizes():
    contexts = torch.randint(1, 700, (256,)).tolist()
    check_decode(contexts, group=6, kv_heads=4, dim=256, dtype=torch.bfloat16, block_size=64)


@real_sizes
@pytest.mark.parametrize("contexts", [[20_000, 3], [50, 4000, 700]])
def test_decode_in_float32_at_real_sizes(contexts):
    check_decode(contexts, group=4, kv_heads=2, dim=256, dtype=torch.float32, block_size=64)


@real_sizes
@pytest.mark.parametrize(("group", "kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("seq_lens", "starts"),
    [
        ([1], [0]),
        ([100], [0]),
        ([16, 1, 63, 64, 65], [6144, 700, 0, 64, 128]),
        ([700, 1, 129], [0, 64, 640]),
        ([1100], [1024]),
    ],
)
def test_prefill_at_real_sizes(group, kv_heads, seq_lens, starts):
    shape = {"group": group, "kv_heads": kv_heads, "dim": 256, "dtype": torch.bfloat16, "block_size": 64}
    check_prefill(seq_lens, starts, **shape)


@real_sizes
def test_prefill_of_a_whole_long_prompt_at_real_sizes():
    check_prefill([8192], [0], group=6, kv_heads=4, dim=256, dtype=torch.bfloat16, block_size=64)


@real_sizes
def test_prefill_in_float32_at_real_sizes():
    check_prefill([65, 700], [3, 0], group=4, kv_heads=2, dim=256, dtype=torch.float32, block_size=64)


@real_sizes
@pytest.mark.parametrize("num_tokens", [1, 2, 64, 65, 1000, 16_384])
@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 4), (16, 4), (8, 2)])
def test_norm_and_rotation_at_real_sizes(num_tokens, heads, kv_heads):
    check_norm_rope(heads, kv_heads, 256, 64, num_tokens, torch.bfloat16, block_size=64)


@real_sizes
def test_a_replayed_decode_graph_follows_new_contexts_and_tables():
    contexts = [3000, 1, 257, 90, 1, 1]
    cache = Cache(contexts, heads=4, dim=256, block_size=64, dtype=torch.bfloat16)
    query, gate = query_and_gate(6, 24, 256, torch.bfloat16)
    lens, tables = int32([1] * 6), torch.zeros_like(cache.tables)
    tables[:] = cache.tables[:1]

    def step() -> Tensor:
        return attention_decode.paged_decode_attention(query, gate, cache.k, cache.v, tables, lens, 262_144)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in (contexts, [2999, 1, 64, 33, 1, 1], [5, 1, 1, 1, 1, 1]):
        tables.copy_(cache.tables)
        lens.copy_(int32(lengths))
        out.fill_(torch.nan)
        graph.replay()
        expected = reference.paged_decode_attention(
            query.float(), gate.float(), cache.k.float().nan_to_num(), cache.v.float().nan_to_num(), tables, lens, 3008
        )
        assert_close(out, expected)


@real_sizes
def test_a_replayed_prefill_graph_follows_new_rows():
    num_tokens, num_rows = 128, 9
    cache = Cache([700, 64, 100], heads=4, dim=256, block_size=64, dtype=torch.bfloat16)
    query, gate = query_and_gate(num_tokens, 24, 256, torch.bfloat16)
    tables = torch.zeros(num_rows, cache.tables.shape[1], dtype=torch.int32, device=DEVICE)
    offsets, row_starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=DEVICE), int32([0] * num_rows)
    bounds = [num_tokens] * num_rows, [262_144 - num_tokens] * num_rows

    def step() -> Tensor:
        return attention_prefill.paged_prefill_attention(
            query, gate, cache.k, cache.v, tables, offsets, row_starts, *bounds
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seq_lens, starts in (([60, 64, 1], [640, 0, 99]), ([128], [500]), ([1, 1, 100], [0, 63, 0])):
        used = sum(seq_lens)
        tables[: len(seq_lens)].copy_(cache.tables[: len(seq_lens)])
        padded = seq_lens + [num_tokens - used] + [0] * (num_rows - len(seq_lens) - 1)
        offsets.copy_(offsets_of(padded))
        row_starts.copy_(int32(starts + [0] * (num_rows - len(starts))))
        out.fill_(torch.nan)
        graph.replay()
        rows = (offsets_of(seq_lens), int32(starts), seq_lens, starts)
        expected = reference.paged_prefill_attention(query[:used].float(), gate[:used].float(), *cache.wide(), *rows)
        assert_close(out[:used], expected)
