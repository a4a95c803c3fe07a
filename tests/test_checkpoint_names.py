"""Tensor names of the three layouts."""

from __future__ import annotations

import pytest

from bireme.checkpoint.names import Layout, Part, TensorName, guess_layout, parse_name

BARE = ["embed_tokens.weight", "norm.weight", "lm_head.weight", "layers.11.self_attn.q_proj.weight"]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("bare", BARE)
def test_a_name_survives_the_way_into_a_layout_and_back(layout: Layout, bare: str) -> None:
    assert parse_name(layout.full_name(bare)) == TensorName(Part.TEXT, bare)


def test_each_layout_spells_names_its_own_way() -> None:
    assert [layout.full_name("norm.weight") for layout in Layout] == [
        "model.norm.weight",
        "model.language_model.norm.weight",
        "language_model.model.norm.weight",
    ]
    assert [layout.full_name("lm_head.weight") for layout in Layout] == [
        "lm_head.weight",
        "lm_head.weight",
        "language_model.lm_head.weight",
    ]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mtp.layers.0.mlp.up_proj.weight", Part.MTP),
        ("mtp.fc.weight", Part.MTP),
        ("model.mtp.norm.weight", Part.MTP),
        ("language_model.mtp.norm.weight", Part.MTP),
        ("model.visual.blocks.0.attn.qkv.weight", Part.VISUAL),
        ("visual.merger.norm.weight", Part.VISUAL),
    ],
)
def test_speculative_and_visual_tensors_are_told_apart(name: str, part: Part) -> None:
    assert parse_name(name).part is part


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.mlp.up_proj.weight",
        "language_model.norm.weight",
        "model.lm_head.weight",
        "transformer.norm.weight",
        "mtpx.norm.weight",
        "norm.weight",
    ],
)
def test_a_name_of_no_layout_is_unknown(name: str) -> None:
    assert parse_name(name) == TensorName(Part.UNKNOWN, name)


def test_the_layout_is_guessed_from_any_of_its_names() -> None:
    for layout in Layout:
        assert guess_layout([layout.full_name("norm.weight"), "lm_head.weight"]) is layout
    assert guess_layout([]) is Layout.TEXT
