"""Sampling parameters by state slot: device tables, and what of them a step's rows use.

The host keeps a few words a slot (which features are on, k), so that a step knows without asking the device what it may
leave out. The device keeps the numbers, so that a row of a plan is just a slot number.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bireme.errors import ConfigError
from bireme.sampling.philox import MASK, RoundKeys, key_schedule
from bireme.sampling.processors import PROMPT_FLAG
from bireme.types import NewRequest


class Feature(enum.IntFlag):
    """What a slot's owner uses. One of GREEDY, PLAIN (draws from all tokens) and FILTERED (top-k, top-p) is on."""

    GREEDY = 1
    PLAIN = 2
    FILTERED = 4
    MIN_P = 8
    BIAS = 16
    REPETITION = 32
    FREQUENCY = 64
    PRESENCE = 128
    MIN_TOKENS = 256
    LOGPROBS = 512


PENALTIES = Feature.REPETITION | Feature.FREQUENCY | Feature.PRESENCE

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")
_INTEGERS = ("seed_low", "seed_high", "top_k", "min_tokens")


def to_device(values: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A host sequence as a device tensor, without waiting for the work that the device is at."""
    if device.type != "cuda":
        return torch.as_tensor(values, dtype=dtype, device=device)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


class RowPool:
    """Rows of ``width`` values for the slots that need one, allocated when the first slot does.

    A slot keeps its row until its next owner needs none. Memory doubles with demand up to num_slots × width values, and
    is not given back.
    """

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.empty(0, width, dtype=dtype, device=device)
        self.row_of_slot = np.full(num_slots + 1, -1, dtype=np.int64)
        self._free: list[int] = []

    def take(self, slot: int) -> Tensor:
        """The row of ``slot``, set to zero: [width], a view."""
        if self.row_of_slot[slot] < 0:
            if not self._free:
                self._grow()
            self.row_of_slot[slot] = self._free.pop()
        return self.rows[self.row_of_slot[slot]].zero_()

    def give_back(self, slot: int) -> None:
        """Let other slots have the row of ``slot``, if it has one."""
        if self.row_of_slot[slot] >= 0:
            self._free.append(int(self.row_of_slot[slot]))
            self.row_of_slot[slot] = -1

    def _grow(self) -> None:
        old = self.rows
        count = min(max(4, 2 * len(old)), len(self.row_of_slot) - 1)
        with torch.inference_mode(False):  # so that it can be written to from inside that mode and from outside
            self.rows = torch.empty(count, old.shape[1], dtype=old.dtype, device=old.device)
            self.rows[: len(old)] = old
        self._free = list(range(count - 1, len(old) - 1, -1))


@dataclass(slots=True, frozen=True)
class Group:
    """The rows of a step that share a feature: ``index`` [n] int64 (None: all rows, in order)."""

    index: Tensor | None

    def of(self, values: Tensor) -> Tensor:
        """The group's part of a tensor with one entry a row."""
        return values if self.index is None else values[self.index]


@dataclass(slots=True, frozen=True)
class PooledRows(Group):
    """``pool_rows``: [n] int64, where each row's bias or mask lies in its pool; ``min_tokens``: [n, 1] int64."""

    pool_rows: Tensor
    min_tokens: Tensor | None = None


@dataclass(slots=True, frozen=True)
class PenaltyRows(Group):
    """``pool_rows``: [n] int64 rows of the counts; the penalties are [n, 1] float32, None where no row uses one."""

    pool_rows: Tensor
    repetition: Tensor | None
    frequency: Tensor | None
    presence: Tensor | None


@dataclass(slots=True, frozen=True)
class DrawRows(Group):
    """Rows that draw. [n, 1] each: temperature float32; min_p float32 (None: off for all); top_k int64, top_p float64.

    ``smallest_k`` and ``largest_k`` bound top_k on the host.
    """

    keys: RoundKeys
    temperature: Tensor
    min_p: Tensor | None
    top_k: Tensor
    top_p: Tensor
    smallest_k: int
    largest_k: int


@dataclass(slots=True, frozen=True)
class LogprobRows(Group):
    """``rows``: the same rows on the host; ``counts``: how many of the largest each lists."""

    rows: list[int]
    counts: list[int]


@dataclass(slots=True, frozen=True)
class StepRows:
    """What a step's rows use: None for a feature that no row uses."""

    num_rows: int
    bias: PooledRows | None = None
    penalties: PenaltyRows | None = None
    suppression: PooledRows | None = None
    greedy: Group | None = None
    plain: DrawRows | None = None
    filtered: DrawRows | None = None
    logprobs: LogprobRows | None = None


class SlotSampling:
    """The sampling state of every slot. Slot 0 belongs to padding rows: greedy, nothing on.

    Memory: 80 bytes a slot, and where owners ask for them, a slot's row of vocab_size values in a ``RowPool``: 4 bytes
    each for penalties, 4 for logit_bias, 1 for min_tokens (for 248,320 ids: 1 MB, 1 MB and 0.25 MB).

    Attributes:
        vocab_end: ids from here on cannot be decoded; the draw does not look at them.
        masked_ids: [m] int64, the ids below ``vocab_end`` that cannot be decoded, or None.
        counts: penalty counts, see ``processors.PROMPT_FLAG``.
        bias: logit_bias values, 0 elsewhere.
        suppressed: True at ids that may not be drawn before min_tokens tokens are out.

    Args:
        num_slots: slots that requests may take: 1 … num_slots.
        vocab_size: the logits' width.
        device: where the tables live.
        masked_token_ranges: half-open id ranges that are never drawn.

    Raises:
        ConfigError: the ranges leave no id.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        masked_token_ranges: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        decodable = np.ones(vocab_size, dtype=bool)
        for start, end in masked_token_ranges:
            decodable[start:end] = False
        if not decodable.any():
            raise ConfigError(f"masked_token_ranges cover all {vocab_size} token ids: no token could ever be sampled")
        self._decodable = decodable
        self.vocab_end = int(np.flatnonzero(decodable)[-1]) + 1
        masked = np.flatnonzero(~decodable[: self.vocab_end])
        self.masked_ids = to_device(masked, torch.int64, self.device) if len(masked) else None

        self._features = np.full(num_slots + 1, int(Feature.GREEDY), dtype=np.int64)
        self._top_k = np.full(num_slots + 1, self.vocab_end, dtype=np.int64)
        self._num_logprobs = np.zeros(num_slots + 1, dtype=np.int64)
        self._floats = torch.zeros(len(_FLOATS), num_slots + 1, dtype=torch.float64, device=self.device)
        self._integers = torch.zeros(len(_INTEGERS), num_slots + 1, dtype=torch.int64, device=self.device)
        self.counts = RowPool(num_slots, vocab_size, torch.int32, self.device)
        self.bias = RowPool(num_slots, vocab_size, torch.float32, self.device)
        self.suppressed = RowPool(num_slots, vocab_size, torch.bool, self.device)
        self._selected: tuple[list[int], StepRows] | None = None

    def install(self, new: NewRequest) -> None:
        """Make ``new`` the owner of its slot; everything that a former owner left is overwritten.

        Token ids in the request must be below vocab_size (``check_request`` sees to it). Where ``suppressed_token_ids``
        name every decodable id, none is suppressed: there would be nothing to draw.

        Raises:
            ValueError: a request that draws at random came without a resolved seed.
        """
        params, slot = new.params, new.slot
        features = self._features_of(new)
        seed = params.seed
        if seed is None:
            if not features & Feature.GREEDY:
                raise ValueError(f"installing a request into slot {slot}: its seed is not resolved")
            seed = 0
        top_k = min(params.top_k, self.vocab_end) if params.top_k > 0 else self.vocab_end
        floats = (
            params.temperature,
            params.top_p if params.top_p < 1.0 else float("inf"),
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        integers = (seed & MASK, (seed >> 32) & MASK, top_k, params.min_tokens)
        self._floats[:, slot] = to_device(floats, torch.float64, self.device)
        self._integers[:, slot] = to_device(integers, torch.int64, self.device)
        self._features[slot] = int(features)
        self._top_k[slot] = top_k
        self._num_logprobs[slot] = params.logprobs or 0
        self._install_rows(new, features)
        self._selected = None

    def _features_of(self, new: NewRequest) -> Feature:
        params = new.params
        if params.is_greedy:
            features = Feature.GREEDY
        elif 0 < params.top_k < self.vocab_end or params.top_p < 1.0:
            features = Feature.FILTERED
        else:
            features = Feature.PLAIN
        optional = (
            (Feature.MIN_P, params.min_p > 0.0),
            (Feature.BIAS, bool(params.logit_bias)),
            (Feature.REPETITION, params.repetition_penalty != 1.0),
            (Feature.FREQUENCY, params.frequency_penalty != 0.0),
            (Feature.PRESENCE, params.presence_penalty != 0.0),
            (Feature.MIN_TOKENS, self._suppresses(new)),
            (Feature.LOGPROBS, params.logprobs is not None),
        )
        for feature, is_on in optional:
            if is_on:
                features |= feature
        return features

    def _suppresses(self, new: NewRequest) -> bool:
        # Where an answer has a form, its mask sees to min_tokens: only there is it known whether another token is left.
        is_free = new.params.structured_outputs is None
        return is_free and new.params.min_tokens > 0 and self._can_suppress(new.suppressed_token_ids)

    def _can_suppress(self, token_ids: list[int]) -> bool:
        if not token_ids:
            return False
        left = self._decodable.copy()
        left[token_ids] = False
        return bool(left.any())

    def _install_rows(self, new: NewRequest, features: Feature) -> None:
        slot, params = new.slot, new.params
        if features & PENALTIES:
            row = self.counts.take(slot)
            if features & Feature.REPETITION:
                row.index_fill_(0, to_device(new.prompt_token_ids, torch.int64, self.device), PROMPT_FLAG)
        else:
            self.counts.give_back(slot)
        if features & Feature.BIAS:
            assert params.logit_bias is not None
            ids = to_device(list(params.logit_bias), torch.int64, self.device)
            self.bias.take(slot)[ids] = to_device(list(params.logit_bias.values()), torch.float32, self.device)
        else:
            self.bias.give_back(slot)
        if features & Feature.MIN_TOKENS:
            ids = to_device(new.suppressed_token_ids, torch.int64, self.device)
            self.suppressed.take(slot).index_fill_(0, ids, True)
        else:
            self.suppressed.give_back(slot)

    def select(self, slots: list[int]) -> StepRows:
        """Sort a step's rows by what they use. The last answer is kept for as long as rows and owners stay the same."""
        if self._selected is not None and self._selected[0] == slots:
            return self._selected[1]
        rows = self._select(np.asarray(slots, dtype=np.int64))
        self._selected = (list(slots), rows)
        return rows

    def _select(self, slots: np.ndarray) -> StepRows:
        features = self._features[slots]
        used = int(np.bitwise_or.reduce(features, initial=0))
        if used == Feature.GREEDY:
            return StepRows(num_rows=len(slots), greedy=Group(None))

        def rows_with(feature: Feature) -> np.ndarray | None:
            return np.flatnonzero(features & int(feature)) if used & feature else None

        greedy = rows_with(Feature.GREEDY)
        logprobs = rows_with(Feature.LOGPROBS)
        return StepRows(
            num_rows=len(slots),
            bias=self._pooled(slots, rows_with(Feature.BIAS), self.bias),
            penalties=self._penalties(slots, rows_with(PENALTIES), used),
            suppression=self._pooled(slots, rows_with(Feature.MIN_TOKENS), self.suppressed, with_min_tokens=True),
            greedy=None if greedy is None else Group(self._index(greedy, len(slots))),
            plain=self._draws(slots, rows_with(Feature.PLAIN), used),
            filtered=self._draws(slots, rows_with(Feature.FILTERED), used),
            logprobs=None
            if logprobs is None
            else LogprobRows(
                self._index(logprobs, len(slots)), logprobs.tolist(), self._num_logprobs[slots[logprobs]].tolist()
            ),
        )

    def _index(self, rows: np.ndarray, num_rows: int) -> Tensor | None:
        return None if len(rows) == num_rows else to_device(rows, torch.int64, self.device)

    def _pooled(
        self, slots: np.ndarray, rows: np.ndarray | None, pool: RowPool, *, with_min_tokens: bool = False
    ) -> PooledRows | None:
        if rows is None:
            return None
        pool_rows = to_device(pool.row_of_slot[slots[rows]], torch.int64, self.device)
        min_tokens = self._columns(slots[rows])["min_tokens"] if with_min_tokens else None
        return PooledRows(self._index(rows, len(slots)), pool_rows, min_tokens)

    def _penalties(self, slots: np.ndarray, rows: np.ndarray | None, used: int) -> PenaltyRows | None:
        if rows is None:
            return None
        columns = self._columns(slots[rows])
        return PenaltyRows(
            self._index(rows, len(slots)),
            to_device(self.counts.row_of_slot[slots[rows]], torch.int64, self.device),
            columns["repetition"].to(torch.float32) if used & Feature.REPETITION else None,
            columns["frequency"].to(torch.float32) if used & Feature.FREQUENCY else None,
            columns["presence"].to(torch.float32) if used & Feature.PRESENCE else None,
        )

    def _draws(self, slots: np.ndarray, rows: np.ndarray | None, used: int) -> DrawRows | None:
        if rows is None:
            return None
        columns = self._columns(slots[rows])
        return DrawRows(
            self._index(rows, len(slots)),
            key_schedule(columns["seed_low"].squeeze(1), columns["seed_high"].squeeze(1)),
            columns["temperature"].to(torch.float32),
            columns["min_p"].to(torch.float32) if used & Feature.MIN_P else None,
            columns["top_k"],
            columns["top_p"],
            int(self._top_k[slots[rows]].min()),
            int(self._top_k[slots[rows]].max()),
        )

    def _columns(self, slots: np.ndarray) -> dict[str, Tensor]:
        """Every parameter of the slots by name, [n, 1] each and contiguous: kernels read them by row number."""
        index = to_device(slots, torch.int64, self.device)
        columns = (table.index_select(1, index).unsqueeze(2).unbind() for table in (self._floats, self._integers))
        return dict(zip(_FLOATS + _INTEGERS, itertools.chain.from_iterable(columns), strict=True))
