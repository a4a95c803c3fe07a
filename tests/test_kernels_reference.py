"""Each operation against a naive formulation, token by token, in float64 where sums matter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bireme import kernels
from bireme.kernels import reference as ops
from bireme.kernels.reference import attention

EPS = 1e-6


@pytest.fixture(autouse=True)
def _no_gradients_and_a_seed():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def offsets_of(seq_lens: list[int]) -> Tensor:
    return torch.tensor([0, *seq_lens]).cumsum(0).to(torch.int32)


def chunks_of(seq_lens: list[int], starts: list[int]) -> Tensor:
    """Entries (row, first packed token, number of tokens, tokens of the row before it) of up to 64 tokens."""
    entries, begin = [], 0
    for row, (length, start) in enumerate(zip(seq_lens, starts, strict=True)):
        entries += [(row, begin + at, min(64, length - at), start + at) for at in range(0, length, 64)]
        begin += length
    return torch.tensor(entries, dtype=torch.int32)


# norms, activation, vocabulary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_computes_in_float32_and_rounds_once(dtype):
    x, weight = (torch.randn(5, 48) * 3).to(dtype), torch.randn(48)
    wide = x.double()
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
    result = ops.rms_norm(x, weight, EPS)
    assert result.dtype is dtype
    torch.testing.assert_close(result, expected.to(dtype), atol=1e-6, rtol=8e-3 if dtype is torch.bfloat16 else 1e-5)


def test_rms_norm_of_a_zero_row_is_zero():
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), EPS), torch.zeros(2, 8))


def test_add_rms_norm_adds_in_place_and_normalises_the_sum():
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    total = x + residual
    normed, stream = ops.add_rms_norm(x, residual, weight, EPS)
    assert stream is residual
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, ops.rms_norm(total, weight, EPS))


def test_silu_and_mul_gates_with_the_first_half():
    gate_up = torch.randn(4, 20)
    torch.testing.assert_close(ops.silu_and_mul(gate_up), F.silu(gate_up[:, :10]) * gate_up[:, 10:])


@pytest.mark.parametrize("rows", [1, 8, 9, 20])
def test_linear_and_vocabulary_products_agree_with_torch_for_any_number_of_rows(rows):
    x, weight = torch.randn(rows, 24), torch.randn(50, 24)
    torch.testing.assert_close(ops.linear(x, ops.pack_linear_weight(weight)), F.linear(x, weight))
    torch.testing.assert_close(ops.vocab_logits(x, weight), F.linear(x, weight))
    assert ops.vocab_logits(x.bfloat16(), weight.bfloat16()).dtype is torch.float32


def test_vocabulary_shards_sum_to_the_whole_table():
    table = torch.randn(12, 6)
    token_ids = torch.tensor([0, 3, 4, 11, 7, 5])
    shards = [ops.embed(token_ids, table[first : first + 4], first) for first in (0, 4, 8)]
    assert torch.equal(sum(shards), table[token_ids])
    assert torch.equal(ops.embed(token_ids, table, None), table[token_ids])


def test_an_unknown_device_type_is_refused_by_name():
    assert kernels.for_device("cpu") is ops
    with pytest.raises(ValueError, match="meta"):
        kernels.for_device("meta")


# full attention


def paged_case(
    contexts: list[int], *, num_kv_heads: int, block_size: int, head_dim: int = 16
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Caches that hold each row's K and V in shuffled blocks and NaN everywhere else; block 0 is nobody's."""
    counts = [-(-context // block_size) for context in contexts]
    num_blocks = sum(counts) + 3
    k_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), torch.nan)
    v_cache = k_cache.clone()
    order = (torch.randperm(num_blocks - 1) + 1).tolist()
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    keys, values = [], []
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks)
        keys.append(torch.randn(context, num_kv_heads, head_dim))
        values.append(torch.randn(context, num_kv_heads, head_dim))
        for position in range(context):
            block, offset = blocks[position // block_size], position % block_size
            k_cache[block, :, offset] = keys[-1][position]
            v_cache[block, :, offset] = values[-1][position]
    return k_cache, v_cache, tables, keys, values


def dense_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax attention of the last len(query) positions: query [L, Hq, D], keys and values [S, Hkv, D]."""
    length, num_heads, head_dim = query.shape
    context, num_kv_heads, _ = keys.shape
    keys = keys.double().repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.double().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("lhd,shd->hls", query.double(), keys) / head_dim**0.5
    hidden = torch.arange(context) > torch.arange(context - length, context)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hls,shd->lhd", weights, values).float()


def gated(attended: Tensor, gate: Tensor) -> Tensor:
    """[L, Hq, D] → [L, Hq·D], as the kernels return it."""
    return (attended * torch.sigmoid(gate)).flatten(1)


@pytest.mark.parametrize(("group", "num_kv_heads"), [(1, 4), (2, 1), (4, 2), (6, 2), (3, 3)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_attention_equals_dense_softmax_for_every_group_size(group, num_kv_heads, block_size):
    contexts = [1, 15, 16, 17, 64, 65, 200]
    k_cache, v_cache, tables, keys, values = paged_case(contexts, num_kv_heads=num_kv_heads, block_size=block_size)
    query = torch.randn(len(contexts), group * num_kv_heads, 16)
    lens = torch.tensor(contexts, dtype=torch.int32)
    gate = torch.randn_like(query)
    out = ops.paged_decode_attention(query, gate, k_cache, v_cache, tables, lens, max(contexts))
    for row in range(len(contexts)):
        expected = gated(dense_attention(query[row : row + 1], keys[row], values[row]), gate[row : row + 1])
        torch.testing.assert_close(out[row : row + 1], expected, atol=1e-5, rtol=1e-5)


def test_decode_attention_over_several_spans_equals_one_span(monkeypatch):
    contexts = [3, 70, 200]
    k_cache, v_cache, tables, _, _ = paged_case(contexts, num_kv_heads=2, block_size=16)
    query, lens = torch.randn(3, 12, 16), torch.tensor(contexts, dtype=torch.int32)
    whole = ops.paged_decode_attention(query, query, k_cache, v_cache, tables, lens, 200)
    monkeypatch.setattr(attention, "SPAN_PAIRS", 3 * 32)
    pieces = ops.paged_decode_attention(query, query, k_cache, v_cache, tables, lens, 200)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)


def test_a_padding_row_of_length_zero_does_not_disturb_its_neighbours():
    k_cache, v_cache, tables, keys, values = paged_case([20], num_kv_heads=2, block_size=16)
    query = torch.randn(3, 4, 16)
    padded_tables = torch.cat((torch.zeros(1, 2, dtype=torch.int32), tables, torch.zeros(1, 2, dtype=torch.int32)))
    lens = torch.tensor([0, 20, 0], dtype=torch.int32)
    out = ops.paged_decode_attention(query, query, k_cache, v_cache, padded_tables, lens, 20)
    expected = gated(dense_attention(query[1:2], keys[0], values[0]), query[1:2])
    torch.testing.assert_close(out[1:2], expected, atol=1e-5, rtol=1e-5)
    k_cache[0], v_cache[0] = 0.0, 0.0
    assert ops.paged_decode_attention(query, query, k_cache, v_cache, padded_tables, lens, 20).isfinite().all()


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("span_pairs", [attention.SPAN_PAIRS, 1])
def test_prefill_attention_of_packed_chunks_with_history_equals_dense_softmax(block_size, span_pairs, monkeypatch):
    monkeypatch.setattr(attention, "SPAN_PAIRS", span_pairs)
    seq_lens, starts = [1, 65, 3, 130, 64, 1, 40], [0, 0, 64, 320, 63, 500, 17]
    contexts = [start + length for start, length in zip(starts, seq_lens, strict=True)]
    k_cache, v_cache, tables, keys, values = paged_case(contexts, num_kv_heads=2, block_size=block_size)
    query = torch.randn(sum(seq_lens), 12, 16)
    gate = torch.randn_like(query)
    out = ops.paged_prefill_attention(
        query, gate, k_cache, v_cache, tables, offsets_of(seq_lens), torch.tensor(starts), seq_lens, starts
    )
    pieces = zip(out.split(seq_lens), query.split(seq_lens), gate.split(seq_lens), keys, values, strict=True)
    for row, (found, asked, row_gate, row_keys, row_values) in enumerate(pieces):
        expected = gated(dense_attention(asked, row_keys, row_values), row_gate)
        torch.testing.assert_close(
            found, expected, atol=1e-5, rtol=1e-5, msg=lambda text, row=row: f"row {row}: {text}"
        )


def test_attention_in_bfloat16_rounds_only_its_result():
    contexts = [100, 7]
    k_cache, v_cache, tables, keys, values = paged_case(contexts, num_kv_heads=2, block_size=64)
    query = torch.randn(2, 4, 16).bfloat16()
    lens = torch.tensor(contexts, dtype=torch.int32)
    gate = torch.randn_like(query)
    out = ops.paged_decode_attention(query, gate, k_cache.bfloat16(), v_cache.bfloat16(), tables, lens, 100)
    assert out.dtype is torch.bfloat16
    for row in range(2):
        expected = dense_attention(query[row : row + 1], keys[row].bfloat16(), values[row].bfloat16())
        expected = gated(expected, gate[row : row + 1].float())
        torch.testing.assert_close(out[row : row + 1].float(), expected, atol=4e-3, rtol=2e-2)


def test_query_and_key_are_normalised_rotated_and_stored_where_told():
    num_heads, num_kv_heads, head_dim, rotary_dim, block_size = 6, 2, 16, 8, 4
    positions = torch.tensor([0, 5, 1000])
    qkv = torch.randn(3, (2 * num_heads + 2 * num_kv_heads) * head_dim)
    factors = torch.randn(num_heads + num_kv_heads, head_dim)
    k_cache = torch.full((5, num_kv_heads, block_size, head_dim), torch.nan)
    v_cache = k_cache.clone()
    kv_indices = torch.tensor([2 * block_size + 3, 4 * block_size, 1 * block_size + 1])
    cos, sin = ops.rotary_cos_sin(positions, 1.0 / 10_000.0 ** (torch.arange(0, rotary_dim, 2) / rotary_dim))
    query, gate = ops.qk_norm_rope_write_kv(qkv.clone(), factors, cos, sin, k_cache, v_cache, kv_indices, EPS)

    def expected(x: Tensor, factor: Tensor, position: int) -> Tensor:
        x = x.double() / torch.sqrt(x.double().square().mean() + EPS) * factor.double()
        out = x.clone()
        half = rotary_dim // 2
        for pair in range(half):
            angle = torch.tensor(position * 10_000.0 ** (-2 * pair / rotary_dim), dtype=torch.float64)
            out[pair] = x[pair] * angle.cos() - x[pair + half] * angle.sin()
            out[pair + half] = x[pair + half] * angle.cos() + x[pair] * angle.sin()
        return out.float()

    for token, position in enumerate(positions.tolist()):
        heads = qkv[token].view(-1, head_dim)
        block, offset = divmod(int(kv_indices[token]), block_size)
        for head in range(num_heads):
            torch.testing.assert_close(
                query[token, head], expected(heads[2 * head], factors[head], position), atol=1e-4, rtol=1e-4
            )
            assert torch.equal(gate[token, head], heads[2 * head + 1])
        for head in range(num_kv_heads):
            key, value = heads[2 * num_heads + head], heads[2 * num_heads + num_kv_heads + head]
            wanted = expected(key, factors[num_heads + head], position)
            torch.testing.assert_close(k_cache[block, head, offset], wanted, atol=1e-4, rtol=1e-4)
            assert torch.equal(v_cache[block, head, offset], value)
    written = torch.zeros(5 * block_size, dtype=torch.bool)
    written[kv_indices] = True
    for cache in (k_cache, v_cache):
        finite = cache.isfinite().all(-1).transpose(1, 2).reshape(5 * block_size, num_kv_heads)
        assert torch.equal(finite, written[:, None].expand(-1, num_kv_heads))


def test_attention_fills_the_buffer_that_it_is_given():
    k_cache, v_cache, tables, _, _ = paged_case([20, 9], num_kv_heads=2, block_size=16)
    query, gate = torch.randn(2, 4, 16), torch.randn(2, 4, 16)
    out, lens = torch.full((5, 64), torch.nan), torch.tensor([20, 9], dtype=torch.int32)
    expected = ops.paged_decode_attention(query, gate, k_cache, v_cache, tables, lens, 20)
    ops.paged_decode_attention(query, gate, k_cache, v_cache, tables, lens, 20, out[:2])
    chunk = (k_cache, v_cache, tables, offsets_of([1, 1]), lens - 1, [1, 1], [19, 8])
    ops.paged_prefill_attention(query, gate, *chunk, out[2:4])
    torch.testing.assert_close(out[:4], torch.cat((expected, expected)))
    assert out[4].isnan().all()


# gated delta rule


class Delta:
    """Random weights and rows of one linear-attention layer, and the rule written token by token in float64."""

    def __init__(self, num_k_heads: int, num_v_heads: int, key_dim: int, value_dim: int, num_slots: int) -> None:
        self.shape = (num_k_heads, num_v_heads, key_dim, value_dim)
        self.keys, self.values = num_k_heads * key_dim, num_v_heads * value_dim
        self.channels = 2 * self.keys + self.values
        self.conv_weight = torch.randn(4, self.channels) * 0.5
        self.dt_bias, self.neg_exp_a = torch.randn(num_v_heads), -torch.randn(num_v_heads).exp()
        self.norm_weight = torch.randn(value_dim) + 1.0
        self.recurrent = torch.randn(num_slots, num_v_heads, key_dim, value_dim)
        self.conv = torch.randn(num_slots, 3, self.channels)

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, self.channels + self.values + 2 * self.shape[1])

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.conv_weight, self.dt_bias, self.neg_exp_a, self.norm_weight

    def naive(self, rows: Tensor, recurrent: Tensor, conv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs [T, Vd], recurrent state, conv state) of one request's rows."""
        num_k_heads, num_v_heads, key_dim, value_dim = self.shape
        group = num_v_heads // num_k_heads
        state, window = recurrent.double().clone(), conv.double().clone()
        outputs = torch.empty(len(rows), num_v_heads, value_dim, dtype=torch.float64)
        for token, row in enumerate(rows.double()):
            window = torch.cat((window, row[None, : self.channels]))
            mixed = F.silu((window * self.conv_weight.double()).sum(0))
            window = window[1:]
            z, b, a = row[self.channels :].split((self.values, num_v_heads, num_v_heads))
            for head in range(num_v_heads):
                key_head = head // group
                q = mixed[key_head * key_dim : (key_head + 1) * key_dim]
                k = mixed[self.keys + key_head * key_dim : self.keys + (key_head + 1) * key_dim]
                v = mixed[2 * self.keys + head * value_dim : 2 * self.keys + (head + 1) * value_dim]
                q = q / torch.sqrt(q.square().sum() + 1e-6) * key_dim**-0.5
                k = k / torch.sqrt(k.square().sum() + 1e-6)
                decay = torch.exp(self.neg_exp_a[head].double() * F.softplus(a[head] + self.dt_bias[head]))
                state[head] *= decay
                delta = torch.sigmoid(b[head]) * (v - k @ state[head])
                state[head] += torch.outer(k, delta)
                o = q @ state[head]
                o = o / torch.sqrt(o.square().mean() + EPS) * self.norm_weight.double()
                outputs[token, head] = o * F.silu(z[head * value_dim : (head + 1) * value_dim])
        return outputs.flatten(1).float(), state.float(), window.float()

    def decode(self, rows: Tensor, slots: list[int], slot_range: tuple[int, int] | None, in_order: bool) -> Tensor:
        return ops.gdn_decode(
            rows, *self.weights, self.recurrent, self.conv, torch.tensor(slots), slot_range, in_order, EPS
        )

    def prefill(self, rows: Tensor, slots: list[int], seq_lens: list[int], starts: list[int]) -> Tensor:
        return ops.gdn_prefill(
            rows,
            *self.weights,
            self.recurrent,
            self.conv,
            torch.tensor(slots),
            offsets_of(seq_lens),
            torch.tensor(starts, dtype=torch.int32),
            chunks_of(seq_lens, starts),
            seq_lens,
            starts,
            EPS,
        )


SHAPES = [(2, 2, 16, 16), (2, 4, 16, 8), (2, 6, 8, 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("slots", "slot_range", "in_order"),
    [
        ([3, 4, 5], (3, 6), True),
        ([3, 5, 6], (3, 7), False),
        ([6, 2, 4], (2, 7), False),
        ([5, 3, 4], (3, 6), False),
        ([6, 2, 4], None, False),
    ],
)
def test_a_decode_step_equals_the_rule_and_touches_no_other_slot(shape, slots, slot_range, in_order):
    layer = Delta(*shape, num_slots=8)
    layer.recurrent[7], layer.conv[7] = torch.nan, torch.nan
    layer.recurrent[1], layer.conv[1] = torch.nan, torch.nan
    before, before_conv = layer.recurrent.clone(), layer.conv.clone()
    rows = layer.rows(3)
    out = layer.decode(rows, slots, slot_range, in_order)
    for row, slot in enumerate(slots):
        expected, state, window = layer.naive(rows[row : row + 1], before[slot], before_conv[slot])
        torch.testing.assert_close(out[row : row + 1], expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(layer.recurrent[slot], state, atol=1e-5, rtol=1e-5)
        assert torch.equal(layer.conv[slot], window)
    others = [slot for slot in range(8) if slot not in slots]
    assert torch.equal(layer.recurrent[others].nan_to_num(99.0), before[others].nan_to_num(99.0))
    assert torch.equal(layer.conv[others].nan_to_num(99.0), before_conv[others].nan_to_num(99.0))


def test_a_nan_slot_between_decode_rows_reaches_none_of_them():
    layer = Delta(2, 4, 16, 16, num_slots=6)
    layer.recurrent[3], layer.conv[3] = torch.nan, torch.nan
    out = layer.decode(layer.rows(2), [2, 4], (2, 5), False)
    assert out.isfinite().all()
    assert layer.recurrent[[2, 4]].isfinite().all()
    assert layer.recurrent[3].isnan().all()


def test_many_padding_rows_on_slot_zero_leave_live_slots_alone():
    layer = Delta(2, 4, 16, 16, num_slots=6)
    layer.recurrent[0], layer.conv[0] = torch.nan, torch.nan
    before, rows = layer.recurrent.clone(), layer.rows(5)
    expected, state, _ = layer.naive(rows[:1], before[4], layer.conv[4])
    out = layer.decode(rows, [4, 0, 0, 0, 0], None, False)
    torch.testing.assert_close(out[:1], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(layer.recurrent[4], state, atol=1e-5, rtol=1e-5)
    assert torch.equal(layer.recurrent[[1, 2, 3, 5]], before[[1, 2, 3, 5]])


@pytest.mark.parametrize("shape", SHAPES)
def test_chunked_prefill_equals_the_rule_for_packed_ragged_rows(shape):
    seq_lens, starts = [1, 64, 2, 130, 3, 65, 63, 4], [0, 64, 0, 0, 192, 64, 0, 5]
    slots = [5, 1, 8, 3, 9, 2, 7, 4]
    layer = Delta(*shape, num_slots=10)
    fresh = [slot for slot, start in zip(slots, starts, strict=True) if start == 0]
    layer.recurrent[fresh], layer.conv[fresh] = torch.nan, torch.nan
    layer.recurrent[6], layer.conv[6] = torch.nan, torch.nan
    before, before_conv = layer.recurrent.clone(), layer.conv.clone()
    before[fresh], before_conv[fresh] = 0.0, 0.0
    rows = layer.rows(sum(seq_lens))
    out = layer.prefill(rows, slots, seq_lens, starts)
    for slot, piece, found in zip(slots, rows.split(seq_lens), out.split(seq_lens), strict=True):
        expected, state, window = layer.naive(piece, before[slot], before_conv[slot])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(layer.recurrent[slot], state, atol=1e-5, rtol=1e-4)
        assert torch.equal(layer.conv[slot], window)
    assert layer.recurrent[6].isnan().all()
    assert torch.equal(layer.recurrent[0], before[0])


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_prefill_equals_stepping_decode_token_by_token(length):
    layer = Delta(2, 6, 16, 24, num_slots=3)
    rows = layer.rows(length)
    layer.recurrent[1:], layer.conv[1:] = layer.recurrent[1].clone(), layer.conv[1].clone()
    whole = layer.prefill(rows, [1], [length], [64])
    steps = torch.cat([layer.decode(rows[token : token + 1], [2], (2, 3), True) for token in range(length)])
    torch.testing.assert_close(whole, steps, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(layer.recurrent[1], layer.recurrent[2], atol=1e-5, rtol=1e-4)
    assert torch.equal(layer.conv[1], layer.conv[2])


def test_prefill_in_pieces_leaves_the_state_that_one_piece_leaves():
    layer = Delta(2, 4, 16, 16, num_slots=4)
    rows = layer.rows(150)
    layer.recurrent[1:3], layer.conv[1:3] = torch.nan, torch.nan
    whole = layer.prefill(rows, [1], [150], [0])
    pieces, start = [], 0
    for length in (64, 1, 2, 63, 20):
        pieces.append(layer.prefill(rows[start : start + length], [2], [length], [start]))
        start += length
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(layer.recurrent[2], layer.recurrent[1], atol=1e-5, rtol=1e-4)
    assert torch.equal(layer.conv[2], layer.conv[1])


def test_strong_decay_over_a_chunk_neither_overflows_nor_gives_nan():
    layer = Delta(2, 2, 16, 16, num_slots=2)
    layer.neg_exp_a.fill_(-50.0)
    layer.dt_bias.fill_(10.0)
    rows = layer.rows(100)
    out = layer.prefill(rows, [1], [100], [0])
    expected, state, _ = layer.naive(rows, torch.zeros(2, 16, 16), torch.zeros(3, layer.channels))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(layer.recurrent[1], state, atol=1e-5, rtol=1e-4)


def test_in_bfloat16_the_state_stays_float32_and_results_stay_close():
    layer = Delta(2, 4, 32, 32, num_slots=3)
    rows = layer.rows(70).bfloat16()
    layer.conv = layer.conv.bfloat16()
    expected, state, _ = layer.naive(rows, torch.zeros(4, 32, 32), torch.zeros(3, layer.channels))
    out = layer.prefill(rows, [1], [70], [0])
    assert out.dtype is torch.bfloat16
    assert layer.recurrent.dtype is torch.float32
    assert (layer.recurrent[1] - state).abs().max() < 0.05
    assert (out.float() - expected).abs().mean() < 0.02
