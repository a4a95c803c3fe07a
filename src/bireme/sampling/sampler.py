"""One batched pass from logits to tokens for all rows of a step.

Order: mask of undecodable ids, logit_bias, repetition / frequency / presence penalty, min_tokens, mask of the answer's
form, temperature, top-k, top-p, min-p, draw. A row's token depends on its own logits, parameters, counts and output
position, bit for bit: every operation is elementwise, an exact (integer or maximum) reduction, or a selection among
unique keys. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.sampling.draw import draw_among, draw_full
from bireme.sampling.grammar import SlotGrammars
from bireme.sampling.logprobs import score, unpack
from bireme.sampling.order import argmax_rows
from bireme.sampling.params import DrawRows, Group, LogprobRows, PenaltyRows, SlotSampling, StepRows
from bireme.sampling.processors import apply_mask, apply_penalties, min_p_filter, suppress, top_k_top_p, weights_of
from bireme.types import NewRequest, TokenLogprobs

FILTER_TILE = 1 << 23
"""Candidates (rows × largest k) that top-k and top-p hold at once: bounds the temporaries to about 0.5 GB."""


@dataclass(slots=True)
class SampledRows:
    """What a step drew.

    Attributes:
        token_ids: [R] int64 on the logits' device, row for row.
        logprob_table: the packed log-probabilities of the rows that asked (see ``logprobs.score``) on the same device,
            or None. A caller that reads a step late copies it to the host next to ``token_ids``.
    """

    token_ids: Tensor
    logprob_table: Tensor | None = None
    _asked: LogprobRows | None = None

    def logprobs(self, host_table: Tensor | None = None) -> list[TokenLogprobs | None] | None:
        """One entry a row, None for rows that asked for none; None when no row asked.

        Args:
            host_table: a finished host copy of ``logprob_table``; without it, one transfer is made now and waited for.
        """
        if self.logprob_table is None or self._asked is None:
            return None
        table = self.logprob_table.cpu() if host_table is None else host_table
        entries: list[TokenLogprobs | None] = [None] * len(self.token_ids)
        for row, entry in zip(self._asked.rows, unpack(table, self._asked.counts), strict=True):
            entries[row] = entry
        return entries


class Sampler:
    """Samples from the slots' parameters in ``tables``, and keeps the penalty counts there up to date.

    Args:
        tables: of the slots.
        grammars: the forms of answers that have one; None where none can have one.
    """

    def __init__(self, tables: SlotSampling, grammars: SlotGrammars | None = None) -> None:
        self.tables = tables
        self.grammars = grammars

    def install(self, new: NewRequest) -> None:
        """Make ``new`` the owner of its slot."""
        self.tables.install(new)
        if self.grammars is not None:
            self.grammars.install(new)

    def release(self, slot: int) -> None:
        """The slot's owner is gone, and no row of it is under way: keep nothing for it on the host."""
        if self.grammars is not None:
            self.grammars.release(slot)

    def begin(self, slots: list[int]) -> None:
        """Start what the draw of a step's rows needs and the logits do not bring: masks, computed in threads.

        Optional, and early is good. The tokens of every earlier step must have been observed, where they are needed.
        """
        if self.grammars is not None:
            self.grammars.begin(slots)

    def __call__(self, logits: Tensor, slots: list[int], output_positions: Tensor) -> SampledRows:
        """Draw one token a row.

        Args:
            logits: [R, V] float32, contiguous; overwritten by the processors that are on.
            slots: each row's state slot.
            output_positions: [R] int64 on the logits' device, tokens that the row's request has put out so far.
        """
        rows = self.tables.select(slots)
        mask = None if self.grammars is None else self.grammars.finish(slots)
        raw: Tensor | None = None
        if rows.logprobs is not None:
            raw = rows.logprobs.of(logits)
            if raw is logits and (mask is not None or self._edits_logits(rows)):
                raw = logits.clone()
        self._process(logits, rows, output_positions)
        if mask is not None:
            apply_mask(logits, mask.rows, mask.words)
        token_ids = self._choose(logits, rows, output_positions)
        if rows.penalties is not None:
            self._count(token_ids, rows.penalties)
        if rows.logprobs is None or raw is None:
            return SampledRows(token_ids)
        table = score(raw, rows.logprobs.of(token_ids), max(rows.logprobs.counts))
        return SampledRows(token_ids, table, rows.logprobs)

    def needs_tokens(self, slots: list[int]) -> bool:
        """Whether a row among ``slots`` is drawn by what its earlier tokens were, so that ``observe`` must see them."""
        return self.grammars is not None and self.grammars.concerns(slots)

    def observe(self, slots: list[int], token_ids: list[int]) -> None:
        """Take note of what a step drew, in the order of steps; called for the steps that ``needs_tokens`` names."""
        if self.grammars is not None:
            self.grammars.observe(slots, token_ids)

    def failures(self, slots: list[int]) -> dict[int, str] | None:
        """Rows that cannot be drawn any more as they must be, by slot, with why; None if there is none."""
        return None if self.grammars is None else self.grammars.failures(slots)

    def _edits_logits(self, rows: StepRows) -> bool:
        edits = (self.tables.masked_ids, rows.bias, rows.penalties, rows.suppression)
        return any(edit is not None for edit in edits)

    def _process(self, logits: Tensor, rows: StepRows, output_positions: Tensor) -> None:
        tables = self.tables
        if tables.masked_ids is not None:
            logits.index_fill_(1, tables.masked_ids, -torch.inf)
        if (bias := rows.bias) is not None:
            _edit(logits, bias, lambda part: part + tables.bias.rows[bias.pool_rows])
        if (penalties := rows.penalties) is not None:
            counts = tables.counts.rows[penalties.pool_rows]
            _edit(
                logits,
                penalties,
                lambda part: apply_penalties(
                    part, counts, penalties.repetition, penalties.frequency, penalties.presence
                ),
            )
        if (late := rows.suppression) is not None and late.min_tokens is not None:
            mask, min_tokens = tables.suppressed.rows[late.pool_rows], late.min_tokens
            positions = late.of(output_positions).unsqueeze(1)
            _edit(logits, late, lambda part: suppress(part, mask, positions, min_tokens))

    def _choose(self, logits: Tensor, rows: StepRows, output_positions: Tensor) -> Tensor:
        if self.tables.vocab_end < logits.shape[1]:
            logits = logits[:, : self.tables.vocab_end]
        chosen: list[tuple[Group, Tensor]] = []
        if rows.greedy is not None:
            chosen.append((rows.greedy, argmax_rows(rows.greedy.of(logits))))
        if rows.plain is not None:
            chosen.append((rows.plain, _draw_plain(rows.plain, logits, output_positions)))
        if rows.filtered is not None:
            chosen.append((rows.filtered, _draw_filtered(rows.filtered, logits, output_positions)))
        if len(chosen) == 1:
            return chosen[0][1]
        token_ids = torch.empty(rows.num_rows, dtype=torch.int64, device=logits.device)
        for group, ids in chosen:
            assert group.index is not None
            token_ids[group.index] = ids
        return token_ids

    def _count(self, token_ids: Tensor, penalties: PenaltyRows) -> None:
        counts = self.tables.counts.rows
        cells = penalties.pool_rows * counts.shape[1] + penalties.of(token_ids)
        ones = torch.ones(len(cells), dtype=counts.dtype, device=counts.device)
        counts.view(-1).index_add_(0, cells, ones)


def _edit(logits: Tensor, group: Group, change: Callable[[Tensor], Tensor]) -> None:
    if group.index is None:
        logits.copy_(change(logits))
    else:
        logits[group.index] = change(logits[group.index])


def _draw_by_kernels(rows: DrawRows, logits: Tensor, output_positions: Tensor, *, filtered: bool) -> Tensor:
    from bireme.kernels.triton.sampling import draw_tokens

    seed_low, seed_high = rows.keys[0]
    return draw_tokens(
        rows.of(logits),
        rows.temperature,
        seed_low,
        seed_high,
        rows.of(output_positions),
        min_p=rows.min_p,
        top_k=rows.top_k if filtered else None,
        top_p=rows.top_p if filtered else None,
        smallest_k=rows.smallest_k,
        largest_k=rows.largest_k,
    )


def _draw_plain(rows: DrawRows, logits: Tensor, output_positions: Tensor) -> Tensor:
    if logits.is_cuda:
        return _draw_by_kernels(rows, logits, output_positions, filtered=False)
    weights = weights_of(rows.of(logits), rows.temperature)
    if rows.min_p is not None:
        min_p_filter(weights, rows.min_p)
    return draw_full(weights, rows.keys, rows.of(output_positions))


def _draw_filtered(rows: DrawRows, logits: Tensor, output_positions: Tensor) -> Tensor:
    if logits.is_cuda:
        return _draw_by_kernels(rows, logits, output_positions, filtered=True)
    logits, positions = rows.of(logits), rows.of(output_positions)
    tile = max(1, FILTER_TILE // rows.largest_k)
    token_ids = []
    for first in range(0, len(logits), tile):
        part = slice(first, first + tile)
        ids, weights = top_k_top_p(
            logits[part], rows.temperature[part], rows.top_k[part], rows.top_p[part], rows.largest_k
        )
        if rows.min_p is not None:
            min_p_filter(weights, rows.min_p[part])
        keys = [(low[part], high[part]) for low, high in rows.keys]
        if ids.shape[1] * 4 < logits.shape[1]:
            token_ids.append(draw_among(ids, weights, keys, positions[part]))
        else:  # four words a counter: from a quarter of the vocabulary on, noise for all of it is cheaper
            full = torch.zeros_like(logits[part]).scatter_(1, ids, weights)
            token_ids.append(draw_full(full, keys, positions[part]))
    return token_ids[0] if len(token_ids) == 1 else torch.cat(token_ids)
