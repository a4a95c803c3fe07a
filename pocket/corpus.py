"""Training text of the pocket model: cases of its skills, rendered with its chat template and packed into batches.

A batch is one row of ``size`` tokens that holds many documents one after another. Every document starts at a multiple
of ``CHUNK`` tokens, so that the chunks of the linear layers' kernels never span two documents.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "src") not in sys.path:
    sys.path.insert(0, str(ROOT / "src"))

from bireme.pocket import MODEL_DIR  # noqa: E402
from bireme.pocket.skills import TRAINED, Case, training_case  # noqa: E402

CHUNK = 64
"""Documents are aligned to this many tokens: the chunk length of the gated delta rule."""

CONTEXT_WEIGHT = 0.05
"""Share of prompt tokens that are trained too: enough to learn the language of prompts, cheap in loss computations."""

BASE_WEIGHTS = {
    "arithmetic": 2.2, "ordering": 1.6, "letters": 1.0, "words": 1.2, "copy": 1.2, "recall": 1.6, "facts": 1.2,
    "stories": 1.6, "tool_call": 0.9, "tool_answer": 0.6, "json": 1.0, "dialogue": 1.0, "small_talk": 0.1,
}  # fmt: skip
"""How often each skill is drawn at the start of a run; training moves the weights towards what is not yet learned."""


class Renderer:
    """Renders conversations with the shipped chat template, as the engine does at run time."""

    def __init__(self, template: Path = MODEL_DIR / "chat_template.jinja") -> None:
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        env.globals["raise_exception"] = _raise
        self._template = env.from_string(template.read_text(encoding="utf-8"))

    def prompt(self, case: Case) -> str:
        """The text that the model is to continue."""
        return self._template.render(
            messages=case.messages,
            tools=case.tools,
            enable_thinking=case.enable_thinking,
            add_generation_prompt=True,
        )


def _raise(message: str) -> None:
    raise ValueError(message)


Document = tuple[list[int], list[int]]
"""Token ids of a prompt and of its completion."""


@dataclass(slots=True)
class Batch:
    """One packed row; T is its length in tokens, N its number of documents (padding at the end is one of them)."""

    tokens: np.ndarray
    """int32 [T]"""
    positions: np.ndarray
    """int32 [T]: the position of each token in its document."""
    cu_seqlens: np.ndarray
    """int32 [N + 1]: where documents start; the last entry is T."""
    chunks: np.ndarray
    """int32 [T / CHUNK, 2]: (document, chunk of the document) of every chunk."""
    loss_at: np.ndarray
    """int32 [L]: positions whose next token is trained; zero where ``loss_weight`` is zero."""
    loss_weight: np.ndarray
    """float32 [L]"""
    spans: list[tuple[int, int]]
    """For every document: the positions [first, last) whose next tokens are its answer."""
    longest: int
    """Length of the longest document."""
    used: int
    """Tokens that are not padding."""


def encode(tokenizer: Tokenizer, renderer: Renderer, cases: Sequence[Case]) -> list[Document]:
    """Prompts and completions are encoded apart, because at run time the border between them is fixed too."""
    rendered = [text for case in cases for text in (renderer.prompt(case), case.completion() + "\n")]
    ids = [e.ids for e in tokenizer.encode_batch_fast(rendered, add_special_tokens=False)]
    return list(zip(ids[0::2], ids[1::2], strict=True))


def lay_out(waiting: list[Document], size: int, loss_slots: int, pad: int, noise: np.random.Generator) -> Batch:
    """One batch of documents taken off the end of ``waiting``: as many as fit."""
    tokens = np.full(size, pad, np.int32)
    weight = np.zeros(size, np.float32)
    starts: list[int] = []
    spans: list[tuple[int, int]] = []
    used = at = 0
    while waiting and at < size:
        prompt, answer = waiting[-1]
        length = len(prompt) + len(answer)
        if at + length > size:
            break
        waiting.pop()
        starts.append(at)
        tokens[at : at + length] = prompt + answer
        first = at + len(prompt) - 1
        answered = len(answer) - 1  # the final newline is not part of the answer
        spans.append((first, first + answered))
        # Short answers weigh more per token: few tokens, one verdict.
        weight[first : first + answered] = min(8.0, max(1.0, 24 / answered))
        weight[at + np.flatnonzero(noise.random(len(prompt) - 1) < CONTEXT_WEIGHT)] = 1.0
        used += length
        at += -(-length // CHUNK) * CHUNK
    if at < size:
        starts.append(at)
    cu = np.array([*starts, size], np.int32)
    lengths = np.diff(cu)
    positions = np.arange(size, dtype=np.int32) - np.repeat(cu[:-1], lengths)
    per_document = lengths // CHUNK
    chunks = np.stack([np.repeat(np.arange(len(per_document)), per_document), positions[::CHUNK] // CHUNK], axis=1)
    where = np.flatnonzero(weight)
    if len(where) > loss_slots:
        where = np.sort(noise.choice(where, loss_slots, replace=False))
    loss_at, loss_weight = np.zeros(loss_slots, np.int32), np.zeros(loss_slots, np.float32)
    loss_at[: len(where)], loss_weight[: len(where)] = where, weight[where]
    return Batch(
        tokens, positions, cu, chunks.astype(np.int32), loss_at, loss_weight, spans, int(lengths.max()), used
    )  # fmt: skip


class Packer:
    """Draws training cases and packs them. Deterministic by seed for given skill weights."""

    def __init__(self, tokenizer: Tokenizer, size: int, loss_slots: int, seed: int) -> None:
        self.tokenizer, self.size, self.loss_slots = tokenizer, size, loss_slots
        self.rng, self.noise = Random(seed), np.random.default_rng(seed)
        self.renderer = Renderer()
        self.pad = tokenizer.token_to_id("<|endoftext|>")
        self._waiting: list[Document] = []

    def pack(self, weights: Sequence[float]) -> Batch:
        """The next batch, with skills drawn by ``weights`` (in the order of ``TRAINED``)."""
        while sum(len(p) + len(a) for p, a in self._waiting) < self.size:
            cases = [training_case(self.rng, skill) for skill in self.rng.choices(TRAINED, weights, k=64)]
            fresh = encode(self.tokenizer, self.renderer, cases)
            self._waiting[:0] = [d for d in fresh if len(d[0]) + len(d[1]) <= self.size]
        return lay_out(self._waiting, self.size, self.loss_slots, self.pad, self.noise)


def worker(tokenizer_path: str, size: int, loss_slots: int, seed: int, weights: Any, queue: Any) -> None:
    """Body of a generator process: puts batches into ``queue`` for ever; ``weights`` is shared with the trainer."""
    packer = Packer(Tokenizer.from_file(tokenizer_path), size, loss_slots, seed)
    while True:
        queue.put(packer.pack(list(weights)))


def texts(per_skill: int, seed: int) -> Iterator[str]:
    """Rendered training conversations, for training the tokenizer; long recall lists are left out."""
    rng, renderer = Random(seed), Renderer()
    for skill in TRAINED:
        kept = 0
        while kept < per_skill:
            case = training_case(rng, skill)
            text = renderer.prompt(case) + case.completion()
            if len(text) < 4000:
                kept += 1
                yield text
