"""What checkpoint tensors are called: the three layouts, and what the text model leaves unread (no torch).

Everywhere else a tensor goes by its bare name: ``embed_tokens.weight``, ``norm.weight``, ``lm_head.weight`` or
``layers.3.mlp.up_proj.weight``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

LM_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


class Layout(enum.Enum):
    """Where a checkpoint puts the text model: (prefix of its tensors, full name of the output matrix)."""

    TEXT = ("model.", "lm_head.weight")
    MULTIMODAL = ("model.language_model.", "lm_head.weight")
    LANGUAGE_MODEL = ("language_model.model.", "language_model.lm_head.weight")

    @property
    def prefix(self) -> str:
        return self.value[0]

    def full_name(self, bare: str) -> str:
        """The tensor's name in a checkpoint of this layout."""
        return self.value[1] if bare == LM_HEAD else self.prefix + bare


class Part(enum.Enum):
    """Which part of a checkpoint a tensor belongs to; only ``TEXT`` is read, ``UNKNOWN`` is of no known layout."""

    TEXT = "text"
    MTP = "mtp"
    VISUAL = "visual"
    UNKNOWN = "unknown"


class TensorName(msgspec.Struct, frozen=True):
    """A checkpoint name, taken apart. ``bare`` lacks the layout's prefix (whole for ``UNKNOWN``)."""

    part: Part
    bare: str


# Longest first: "model." is also the beginning of "model.language_model." and of "model.visual.".
_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.", "")
_UNREAD = {"mtp": Part.MTP, "visual": Part.VISUAL}


def parse_name(name: str) -> TensorName:
    """Take a checkpoint's tensor name apart. TEXT says where it stands, not that the model has such a tensor."""
    if any(name == layout.full_name(LM_HEAD) for layout in Layout):
        return TensorName(Part.TEXT, LM_HEAD)
    prefix = next(prefix for prefix in _PREFIXES if name.startswith(prefix))
    bare = name.removeprefix(prefix)
    part = _UNREAD.get(bare.partition(".")[0])
    if part is not None:
        return TensorName(part, bare)
    if bare == LM_HEAD or all(prefix != layout.prefix for layout in Layout):
        return TensorName(Part.UNKNOWN, name)
    return TensorName(Part.TEXT, bare)


def guess_layout(names: Iterable[str]) -> Layout:
    """The layout of a checkpoint with these (full) text tensor names."""
    names = list(names)
    for layout in (Layout.LANGUAGE_MODEL, Layout.MULTIMODAL):
        if any(name.startswith(layout.prefix) for name in names):
            return layout
    return Layout.TEXT
