"""Bireme serves Qwen3.5-family models: one batched forward per rank per step, behind an OpenAI-compatible API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bireme.llm import LLM
    from bireme.types import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    # LLM needs torch; `import bireme` must not. Nor shall it take time, for it comes before everything.
    if name == "LLM":
        from bireme.openmp import limit_spinning

        limit_spinning()
        from bireme.llm import LLM

        return LLM
    if name in ("SamplingParams", "StructuredOutputsParams"):
        from bireme import types

        return getattr(types, name)
    raise AttributeError(f"module 'bireme' has no attribute {name!r}")
