"""Text from ids, token by token, in constant time each (no HTTP framework here; the offline API uses it too)."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from bireme.server.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4
_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns one request's output ids into text as they come.

    A character whose bytes are spread over tokens appears once, whole, with its last token. A prompt that ends inside a
    character lends its bytes, so that the first output token can complete it. Bytes that can never become a character
    give U+FFFD, as in the decoding of the whole; a character still incomplete at the end is left out.

    Args:
        prompt_token_ids: only its end matters; empty when the prompt was text.
        kept_ids: special ids whose text is kept even with ``skip_special_tokens``.
    """

    __slots__ = ("_decode", "_decoder", "_skipped", "_table")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
        kept_ids: Iterable[int] = (),
    ) -> None:
        self._table = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids.difference(kept_ids) if skip_special_tokens else frozenset()
        self._decoder = _new_decoder(errors="replace")
        self._decode = self._decoder.decode
        if prompt_token_ids:
            self._decode(self._incomplete_end(prompt_token_ids))

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty for a skipped special token or part of a character."""
        if token_id in self._skipped:
            return ""
        if 0 <= token_id < len(self._table):
            raw = self._table[token_id]
            return self._decode(raw) if raw else ""
        return ""

    @property
    def pending(self) -> bytes:
        """The bytes of a character that is not complete yet (at most three)."""
        return self._decoder.getstate()[0]

    def _incomplete_end(self, token_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(token_ids):
            if token_id in self._skipped or not 0 <= token_id < len(self._table):
                break
            tail = (self._table[token_id] or b"") + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        probe = _new_decoder(errors="replace")
        probe.decode(tail)
        return probe.getstate()[0]
