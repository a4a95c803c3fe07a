"""Shard arithmetic: every full tensor comes back from the ranks' shards, and every element has its owners."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.checkpoint.shard_spec import (
    Parameter,
    Shard,
    checkpoint_shapes,
    owned_units,
    parameter_table,
    rank_shards,
    shard,
)
from bireme.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from bireme.errors import ConfigError

TP_SIZES = (1, 2, 4, 8)


def make_model(**changes: object) -> ModelConfig:
    fields: dict[str, object] = dict(
        model_type="qwen3_5_text",
        vocab_size=50,
        hidden_size=24,
        intermediate_size=16,
        layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=4,
        rotary_dim=2,
        rope_theta=1e7,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=128,
    )
    return ModelConfig(**(fields | changes))  # type: ignore[arg-type]


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Any geometry that eight ranks can share, so that TP 1, 2 and 4 can, too."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8, 16]))
    groups = draw(st.sampled_from([1, 2, 3, 6]))
    heads = kv_heads * groups if kv_heads * groups % 8 == 0 else kv_heads * groups * 8
    key_heads = 8 * draw(st.integers(1, 2))
    return make_model(
        vocab_size=draw(st.integers(1, 70)),
        intermediate_size=8 * draw(st.integers(1, 5)),
        hidden_size=draw(st.integers(1, 9)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.integers(1, 5)),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * draw(st.integers(1, 3)),
        linear_key_head_dim=draw(st.integers(1, 5)),
        linear_value_head_dim=draw(st.integers(1, 5)),
        tie_word_embeddings=draw(st.booleans()),
    )


def place(piece: Shard) -> list[tuple[str, int] | None]:
    """For each row (or column) of a rank's parameter: the source row it comes from, None for padding."""
    dim = piece.parameter.dim
    assert dim is not None
    rows: list[tuple[str, int] | None] = [None] * piece.shape[dim]
    for segment in piece.segments:
        assert segment.dim == dim
        for i in range(segment.stop - segment.start):
            assert rows[segment.offset + i] is None, "two segments write the same row"
            rows[segment.offset + i] = (segment.source.name, segment.start + i)
    return rows


def expected_owners(parameter: Parameter, source: str, model: ModelConfig, tp_size: int) -> int:
    if source.endswith(("k_proj.weight", "v_proj.weight")):
        return max(1, tp_size // model.num_key_value_heads)
    return tp_size if parameter.dim is None else 1


@settings(max_examples=60, deadline=None)
@given(model=models(), tp_size=st.sampled_from(TP_SIZES))
def test_every_full_tensor_comes_back_from_the_shards_of_all_ranks(model: ModelConfig, tp_size: int) -> None:
    for parameter in parameter_table(model):
        owners: Counter[tuple[str, int]] = Counter()
        num_padding = 0
        for rank in range(tp_size):
            piece = shard(parameter, model, rank, tp_size)
            if parameter.dim is None:
                assert [segment.dim for segment in piece.segments] == [None]
                assert piece.shape == parameter.sources[0].shape
                owners.update((parameter.sources[0].name, i) for i in range(piece.shape[0]))
                continue
            rows = place(piece)
            padding = rows.count(None)
            assert padding == piece.num_padding
            assert all(row is not None for row in rows[: len(rows) - padding]), "padding stands behind the rows"
            num_padding += padding
            owners.update(row for row in rows if row is not None)
        for source in parameter.sources:
            for i in range(source.shape[parameter.dim or 0]):
                assert owners.pop((source.name, i)) == expected_owners(parameter, source.name, model, tp_size)
        assert not owners, "a rank claims rows that no source has"
        vocabulary = parameter.name in ("embed_tokens.weight", "lm_head.weight")
        assert num_padding == (-model.vocab_size % tp_size if vocabulary else 0)


@settings(max_examples=30, deadline=None)
@given(model=models(), tp_size=st.sampled_from(TP_SIZES))
def test_every_byte_of_the_checkpoint_is_read_as_often_as_its_rule_says(model: ModelConfig, tp_size: int) -> None:
    read: Counter[str] = Counter()
    for rank in range(tp_size):
        for piece in rank_shards(model, rank, tp_size):
            for segment in piece.segments:
                read[segment.source.name] += segment.num_elements
    shapes = checkpoint_shapes(model)
    assert set(read) == set(shapes)
    for parameter in parameter_table(model):
        for source in parameter.sources:
            size = 1
            for extent in shapes[source.name]:
                size *= extent
            assert read[source.name] == size * expected_owners(parameter, source.name, model, tp_size), source.name


def test_a_query_head_and_its_gate_go_to_the_same_rank() -> None:
    model = make_model(num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    piece = next(s for s in rank_shards(model, 1, 2) if s.parameter.name == "layers.1.self_attn.qkv_proj.weight")
    name = "layers.1.self_attn.q_proj.weight"
    # Heads 2 and 3: each has 4 query rows, then 4 gate rows.
    assert [row[1] for row in place(piece) if row is not None and row[0] == name] == list(range(16, 32))


def test_the_linear_projection_is_cut_within_each_of_its_segments() -> None:
    model = make_model(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=3, linear_value_head_dim=5)
    piece = next(s for s in rank_shards(model, 1, 2) if s.parameter.name == "layers.0.linear_attn.in_proj.weight")
    mixer = "layers.0.linear_attn."
    qkv = f"{mixer}in_proj_qkv.weight"
    expected = [
        *((qkv, i) for i in range(3, 6)),  # key head 1 of q
        *((qkv, i) for i in range(9, 12)),  # key head 1 of k
        *((qkv, i) for i in range(22, 32)),  # value heads 2 and 3 of v
        *((f"{mixer}in_proj_z.weight", i) for i in range(10, 20)),
        *((f"{mixer}in_proj_b.weight", i) for i in range(2, 4)),
        *((f"{mixer}in_proj_a.weight", i) for i in range(2, 4)),
    ]
    assert place(piece) == expected


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_conv_channels_follow_their_qkv_rows(tp_size: int) -> None:
    model = make_model()
    for rank in range(tp_size):
        pieces = {piece.parameter.name: piece for piece in rank_shards(model, rank, tp_size)}
        conv = pieces["layers.0.linear_attn.conv1d.weight"]
        rows = [row for row in place(pieces["layers.0.linear_attn.in_proj.weight"]) if row and "in_proj_qkv" in row[0]]
        assert [row[1] for row in place(conv) if row] == [row[1] for row in rows]
        assert conv.shape == (len(rows), 4)


def test_kv_heads_are_replicated_on_neighbouring_ranks_when_ranks_outnumber_them() -> None:
    model = make_model(num_key_value_heads=2)
    assert [owned_units(model, "num_key_value_heads", rank, 8) for rank in range(8)] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert [owned_units(model, "num_key_value_heads", rank, 2) for rank in range(2)] == [(0, 1), (1, 2)]
    assert [owned_units(model, "num_key_value_heads", rank, 1) for rank in range(1)] == [(0, 2)]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_a_rank_keeps_each_query_head_beside_its_kv_head(tp_size: int) -> None:
    for kv_heads in (1, 2, 4, 8):
        model = make_model(num_attention_heads=8 * 3, num_key_value_heads=kv_heads)
        group = 24 // kv_heads
        for rank in range(tp_size):
            first, last = owned_units(model, "num_attention_heads", rank, tp_size)
            first_kv, last_kv = owned_units(model, "num_key_value_heads", rank, tp_size)
            assert {head // group for head in range(first, last)} == set(range(first_kv, last_kv))


def test_vocabulary_rows_past_the_last_are_padding_even_for_a_rank_that_owns_none() -> None:
    model = make_model(vocab_size=9, tie_word_embeddings=True)
    owned = [owned_units(model, "vocab_size", rank, 8) for rank in range(8)]
    assert owned == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9), (9, 9), (9, 9), (9, 9)]
    pieces = [next(iter(rank_shards(model, rank, 8))) for rank in range(8)]
    assert {piece.shape for piece in pieces} == {(2, 24)}
    assert [piece.num_padding for piece in pieces] == [0, 0, 0, 0, 1, 2, 2, 2]
    assert pieces[6].segments == ()


def test_the_table_has_an_output_matrix_only_when_it_is_untied() -> None:
    untied = [parameter.name for parameter in parameter_table(make_model(tie_word_embeddings=False))]
    tied = [parameter.name for parameter in parameter_table(make_model(tie_word_embeddings=True))]
    assert untied == [*tied, "lm_head.weight"]
    assert len(set(untied)) == len(untied)


def test_only_a_log_stays_in_float32() -> None:
    table = parameter_table(make_model())
    assert [p.name for p in table if p.is_float32] == ["layers.0.linear_attn.A_log"]


def test_a_count_that_does_not_divide_is_refused_with_both_numbers() -> None:
    model = make_model(intermediate_size=18)
    with pytest.raises(ConfigError, match=r"intermediate_size is 18, which 4 does not divide"):
        list(rank_shards(model, 0, 4))
