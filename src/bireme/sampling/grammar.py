"""Answers that must have a form: which tokens may come next, row by row, as bit masks on the logits.

Three parts. ``GrammarCompiler`` turns what requests ask for into llguidance matchers, in threads of its own, so that a
step never compiles. ``SlotGrammars`` keeps the matcher of each state slot: it is shown the tokens that were drawn, and
computes masks in threads while the model runs. ``GrammarMask`` is what the sampler applies: only the rows that have a
form are in it, so the others pay nothing.

A row's mask depends on all its earlier tokens. Where steps are read one step late, whoever runs them shows the tokens
of the step before (``observe``) after it has launched the forward and before it asks for masks.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from bireme.errors import InvalidRequestError
from bireme.sampling.params import to_device
from bireme.structured import dumps, grammar_of, read_schema, subschemas
from bireme.types import NewRequest, StructuredOutputsParams

CACHED_GRAMMARS = 256
"""Compiled forms that are kept beyond the requests that use them, the last used ones."""

MASK_SECONDS = 1.0
"""A row whose mask is not there after so long ends with an error: nobody else's step waits longer for it."""

LIMITS = {"max_lexer_states": 50_000, "step_lexer_fuel": 100_000}
"""Less than llguidance allows by itself: a lexer state takes 1 to 2 kB, and fuel goes at about 14,000 a millisecond."""

_MAX_PROBES = 200
"""Parts of a refused schema that are tried on the way to the one at fault."""

_MAX_REASON = 500

_NOISE = ("<non-verbose/>", "Enable 'coerce_one_of' option to approximate oneOf with anyOf")

_ERROR_LINE = re.compile(r"at (\d+)\(\d+\): ")
_ARGUMENT = re.compile(r'function_(\d+)_\d+: "<parameter=([^>]*)>')


@dataclass(eq=False, frozen=True, weakref_slot=True, slots=True)
class CompiledGrammar:
    """A form, ready to be followed: every row that has it starts from a copy of ``matcher``."""

    matcher: LLMatcher


class GrammarCompiler:
    """Compiles forms for one tokenizer. Thread-safe.

    Args:
        tokenizer_path: the checkpoint's ``tokenizer.json``.
        vocab_size: the logits' width.
        eos_token_ids: what may end an answer whose form is complete.
        limits: llguidance's, by name.

    Raises:
        InvalidRequestError: forms cannot be followed with this checkpoint at all; says why.
    """

    def __init__(
        self,
        tokenizer_path: str | Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: dict[str, int] | None = None,
    ) -> None:
        if not Path(tokenizer_path).is_file():
            raise InvalidRequestError("the checkpoint has no tokenizer.json, which an answer's form needs")
        if not eos_token_ids:
            raise InvalidRequestError("the model has no end token, which an answer's form needs")
        try:
            self.tokenizer = LLTokenizer(str(tokenizer_path), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise InvalidRequestError(f"tokenizer.json cannot be used for an answer's form: {error}") from error
        self.eos_token_ids = frozenset(eos_token_ids)
        options: dict[str, Any] = {"verbose_errors": False} | (LIMITS if limits is None else limits)
        self._limits = LLParserLimits(**options)
        self._recent: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[StructuredOutputsParams, CompiledGrammar] = (
            weakref.WeakValueDictionary()
        )
        self._under_way: dict[StructuredOutputsParams, Future[CompiledGrammar]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar-compile")

    def prepare(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """Compile in another thread, unless it has been done or is under way.

        As long as somebody holds the future, ``get`` finds its grammar. The future's error is an InvalidRequestError
        that names the field, the place in the schema and llguidance's reason.
        """
        with self._lock:
            known = self._find(params)
            if known is not None:
                future: Future[CompiledGrammar] = Future()
                future.set_result(known)
                return future
            if params not in self._under_way:
                self._under_way[params] = self._pool.submit(self._compile_and_keep, params)
            return self._under_way[params]

    def get(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The grammar that ``prepare`` made; compiled here and now if nobody has held on to it."""
        with self._lock:
            known = self._find(params)
        return self._compile_and_keep(params) if known is None else known

    def close(self) -> None:
        """Start nothing any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile, and try that a first token can be drawn within MASK_SECONDS.

        Raises:
            InvalidRequestError: as ``prepare`` says.
        """
        if params.begins_after or params.or_calls:
            # The whole may begin with something else, which would hide that the form itself cannot begin.
            self.compile(msgspec.structs.replace(params, begins_after="", or_calls=""))
        matcher = self._matcher(grammar_of(params))
        reason = matcher.get_error() or self._try_first_mask(matcher)
        if reason:
            place = self._place_of(params, reason)
            if place:
                reason = _ERROR_LINE.sub("", reason.splitlines()[0])
            raise InvalidRequestError(f"{params.field} cannot be followed{place}: {_clean(reason)}", params.field)
        return CompiledGrammar(matcher)

    def _try_first_mask(self, matcher: LLMatcher) -> str:
        """Why an answer cannot begin, or nothing; ``matcher`` keeps what it has found out."""
        words = np.zeros(-(-self.tokenizer.vocab_size // 32), dtype=np.int32)
        started = time.monotonic()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        seconds = time.monotonic() - started
        if matcher.is_error():
            reason = matcher.get_error()
            return "nothing satisfies it" if reason.startswith("NoExtension") else reason
        if not words.any() or (matcher.is_stopped() and not matcher.is_accepting()):
            return "nothing satisfies it"
        if seconds > MASK_SECONDS:
            return f"finding the tokens that it may begin with takes {seconds:.1f} s: at most {MASK_SECONDS:g}"
        return ""

    def _matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=self._limits)

    def _compile_and_keep(self, params: StructuredOutputsParams) -> CompiledGrammar:
        try:
            compiled = self.compile(params)
        except BaseException:
            with self._lock:
                self._under_way.pop(params, None)
            raise
        with self._lock:
            self._under_way.pop(params, None)
            self._keep(params, compiled)
        return compiled

    def _find(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        known = self._alive.get(params)
        if known is not None:
            self._keep(params, known)
        return known

    def _keep(self, params: StructuredOutputsParams, compiled: CompiledGrammar) -> None:
        self._alive[params] = compiled
        self._recent[params] = compiled
        self._recent.move_to_end(params)
        if len(self._recent) > CACHED_GRAMMARS:
            self._recent.popitem(last=False)

    def _place_of(self, params: StructuredOutputsParams, reason: str) -> str:
        """`` at #/properties/a``: the innermost part of a schema that is refused for the same reason by itself."""
        if params.json is None:
            return _argument_at_fault(params, reason)
        schema = read_schema(params.json_text, params.field)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        place, probes, found = "", 0, True
        while found:
            found = False
            for pointer, part in subschemas(schema):
                probes += 1
                if probes > _MAX_PROBES:
                    break
                if self._matcher(dumps({"grammars": [{"json_schema": shared | part}]})).get_error() == reason:
                    place, schema, found = place + pointer, part, True
                    break
        return f" at #{place}" if place else ""


def _argument_at_fault(params: StructuredOutputsParams, reason: str) -> str:
    """Of a grammar of tool calls: the argument in whose line the error is."""
    line = _ERROR_LINE.match(reason)
    for text in (params.grammar, params.or_calls):
        lines = (text or "").splitlines()
        argument = _ARGUMENT.match(lines[int(line[1]) - 1]) if line and int(line[1]) <= len(lines) else None
        if argument:
            function = re.search(rf'^function_{argument[1]}: "<function=([^>]*)>', text or "", re.MULTILINE)
            return f" at the argument {argument[2]!r} of {function[1]!r}" if function else ""
    return ""


def _clean(reason: str) -> str:
    """llguidance's words on one line of bounded length."""
    for noise in _NOISE:
        reason = reason.replace(noise, "")
    line = " ".join(reason.split())
    return line if len(line) <= _MAX_REASON else line[: _MAX_REASON - 1] + "…"


@dataclass(slots=True, frozen=True)
class GrammarMask:
    """Which tokens may be drawn: bit i % 32 of word i // 32 is token i.

    Attributes:
        rows: [n] int64 on the logits' device, the rows of the step that have a mask.
        words: [n, ceil(V / 32)] int32, likewise.
    """

    rows: Tensor
    words: Tensor


class _Row:
    """Where the owner of a slot is in its form."""

    __slots__ = ("awaited", "has_ended", "matcher", "min_tokens", "num_outputs", "suppressed", "tail")

    def __init__(self, matcher: LLMatcher, awaited: bytes, min_tokens: int, suppressed: np.ndarray | None) -> None:
        self.matcher = matcher
        self.awaited = awaited
        self.tail = b""
        self.num_outputs = 0
        self.min_tokens = min_tokens
        self.suppressed = suppressed
        self.has_ended = False

    @property
    def must_go_on(self) -> bool:
        return self.suppressed is not None and self.num_outputs < self.min_tokens

    @property
    def has_mask(self) -> bool:
        return not self.has_ended and (not self.awaited or self.must_go_on)

    def fill(self, words: np.ndarray) -> None:
        """Write the row's mask into ``words`` [W] int32."""
        if self.awaited:
            words.fill(-1)
        else:
            self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self.suppressed is not None and self.must_go_on:
            left = words & ~self.suppressed
            if left.any():  # a form that is complete, and cannot go on, ends whatever min_tokens says
                words[:] = left


class _Filling:
    """The masks of one step in the making. Threads take one row after the other, so that a slow one holds up none."""

    def __init__(self, slots: list[int], rows: list[_Row], words: Tensor, num_threads: int) -> None:
        self.slots = slots
        self.words = words[: len(slots)]
        self._targets = self.words.numpy()
        self.errors: list[str | None] = [None] * len(rows)
        self._rows = rows
        self._done = [False] * len(rows)
        self._todo = deque(range(len(rows)))
        self._all_done = threading.Event()
        self._num_open = len(rows)
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + MASK_SECONDS
        self.num_threads = min(num_threads, len(rows))

    def run(self) -> None:
        """What each thread does."""
        while True:
            try:
                index = self._todo.popleft()
            except IndexError:
                return
            row = self._rows[index]
            try:
                row.fill(self._targets[index])
                if not row.awaited and row.matcher.is_error():
                    self.errors[index] = row.matcher.get_error()
            except Exception as error:
                self.errors[index] = f"{type(error).__name__}: {error}"
            with self._lock:
                self._done[index] = True
                self._num_open -= 1
                if not self._num_open:
                    self._all_done.set()

    def wait(self) -> list[str | None]:
        """Wait until every row has its mask, but not beyond the deadline; what went wrong, row by row."""
        if self._all_done.wait(max(0.0, self._deadline - time.monotonic())):
            return self.errors
        with self._lock:
            late = f"finding the tokens that may come next takes more than {MASK_SECONDS:g} s"
            return [error if done else late for error, done in zip(self.errors, self._done, strict=True)]


class SlotGrammars:
    """The form that the owner of each slot has to follow, if any.

    Used by one thread, in the order of steps: ``install`` or ``release`` slots, ``begin`` a step's masks, ``finish``
    them, and ``observe`` what was drawn. A row that cannot be followed any further (llguidance's limits, or
    MASK_SECONDS) goes on without a mask until it is ended; ``failures`` names it.

    Args:
        vocab_size: the logits' width.
        device: where masks go.
        compiler: None where there is nothing to compile with: requests with a form are then refused before.
    """

    def __init__(self, vocab_size: int, device: torch.device, compiler: GrammarCompiler | None) -> None:
        self.compiler = compiler
        self.device = torch.device(device)
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._rows: dict[int, _Row] = {}
        self._failed: dict[int, str] = {}
        self._filling: _Filling | None = None
        self._buffer = torch.empty(0, self._num_words, dtype=torch.int32)
        self._num_threads = max(2, min(8, (os.cpu_count() or 2) // 2))
        self._pool = ThreadPoolExecutor(max_workers=self._num_threads, thread_name_prefix="grammar-mask")

    @property
    def num_rows(self) -> int:
        """Slots whose owner has a form."""
        return len(self._rows)

    def install(self, new: NewRequest) -> None:
        """Make ``new`` the owner of its slot. Its form has been compiled (``GrammarCompiler.prepare``)."""
        self.release(new.slot)
        wanted = new.params.structured_outputs
        if wanted is None:
            return
        if self.compiler is None:
            raise ValueError(f"installing a request into slot {new.slot}: there is no compiler for its form")
        suppressed = None
        if new.params.min_tokens and new.suppressed_token_ids:
            bits = np.zeros(self._num_words * 32, dtype=bool)
            bits[new.suppressed_token_ids] = True
            suppressed = np.packbits(bits, bitorder="little").view(np.int32)
        self._rows[new.slot] = _Row(
            self.compiler.get(wanted).matcher.deep_copy(),
            wanted.begins_after.encode(),
            new.params.min_tokens,
            suppressed,
        )

    def release(self, slot: int) -> None:
        """The slot's owner is gone: let go of its form."""
        self._rows.pop(slot, None)
        self._failed.pop(slot, None)

    def concerns(self, slots: Sequence[int]) -> bool:
        """Whether one of ``slots`` has a form to follow."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(slots)

    def observe(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Take note of the tokens that a step drew, row for row."""
        if not self._rows:
            return
        for slot, token_id in zip(slots, token_ids, strict=True):
            row = self._rows.get(slot)
            if row is not None and not row.has_ended:
                self._advance(slot, row, token_id)

    def _advance(self, slot: int, row: _Row, token_id: int) -> None:
        assert self.compiler is not None
        row.num_outputs += 1
        if token_id in self.compiler.eos_token_ids:
            row.has_ended = True
            return
        token_ids = [token_id]
        if row.awaited:
            # Bytes and not ids: a thought may also end in pieces, and the next token begin within one.
            row.tail += self.compiler.tokenizer.decode_bytes(token_ids)
            at = row.tail.find(row.awaited)
            if at < 0:
                row.tail = row.tail[1 - len(row.awaited) :] if len(row.awaited) > 1 else b""
                return
            rest = row.tail[at + len(row.awaited) :]
            row.awaited = row.tail = b""
            token_ids = self.compiler.tokenizer.tokenize_bytes(rest) if rest else []
        if token_ids and not row.matcher.consume_tokens(token_ids):
            self._fail(slot, row, row.matcher.get_error() or f"token {token_id} does not fit it")

    def _fail(self, slot: int, row: _Row, reason: str) -> None:
        row.has_ended = True
        self._failed[slot] = f"the answer's form cannot be followed any further: {_clean(reason)}"

    def failures(self, slots: Sequence[int]) -> dict[int, str] | None:
        """Those of ``slots`` that failed, with why; None if none did."""
        if not self._failed:
            return None
        return {slot: self._failed[slot] for slot in slots if slot in self._failed} or None

    def begin(self, slots: Sequence[int]) -> None:
        """Start computing the masks of a step's rows in threads. Every earlier token must have been observed.

        Does nothing if that has been done and ``finish`` not been called.
        """
        if self._filling is not None or not self._rows:
            return
        masked = [slot for slot in slots if slot in self._rows and self._rows[slot].has_mask]
        if not masked:
            return
        if len(masked) > len(self._buffer):
            # The step before has been observed, so no copy out of the old buffer is under way.
            self._buffer = torch.empty(
                max(len(masked), 2 * len(self._buffer)),
                self._num_words,
                dtype=torch.int32,
                pin_memory=self.device.type == "cuda",
            )
        rows = [self._rows[slot] for slot in masked]
        self._filling = _Filling(masked, rows, self._buffer, self._num_threads)
        for _ in range(self._filling.num_threads):
            self._pool.submit(self._filling.run)

    def finish(self, slots: Sequence[int]) -> GrammarMask | None:
        """The masks of a step's rows, started now if ``begin`` has not been; None where no row has one."""
        self.begin(slots)
        filling, self._filling = self._filling, None
        if filling is None:
            return None
        errors = filling.wait()
        kept = list(range(len(filling.slots)))
        if any(errors):
            for slot, error in zip(filling.slots, errors, strict=True):
                if error is not None:
                    self._fail(slot, self._rows[slot], error)
            # A late thread may still write here.
            self._buffer = torch.empty(0, self._num_words, dtype=torch.int32)
            kept = [index for index in kept if errors[index] is None]
            if not kept:
                return None
        row_of = {slot: row for row, slot in enumerate(slots)}
        rows = np.array([row_of[filling.slots[index]] for index in kept], dtype=np.int64)
        words = filling.words if len(kept) == len(errors) else filling.words[kept]
        return GrammarMask(to_device(rows, torch.int64, self.device), words.to(self.device, non_blocking=True))

    def close(self) -> None:
        """Start nothing any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.compiler is not None:
            self.compiler.close()
