"""Stop strings, and a request's whole way from ids to text (no HTTP framework here; the offline API uses it too)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bireme.server.detokenizer import Detokenizer
from bireme.server.tokenizer import Tokenizer
from bireme.types import FinishReason, RequestOutput, SamplingParams


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, and lets through what surely precedes one.

    The first is the one that is complete earliest; of several that end at the same character, the longest. That makes
    the result independent of how the text is cut into pieces. Text that may be the start of a stop string is held back
    until that is decided.

    Attributes:
        matched: the stop string that was found, or None.
    """

    __slots__ = ("_first_characters", "_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece; return what may be shown now. Nothing may be pushed after a match."""
        if not self._stops:
            return text
        buffer = self._held + text
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
                self.matched = stop
        if best is not None:
            self._held = ""
            return buffer[: best[0] if self._include else best[1]]
        hold = self._hold_from(buffer)
        self._held = buffer[hold:]
        return buffer[:hold]

    def flush(self) -> str:
        """What is held back, now that no stop string will be completed."""
        held, self._held = self._held, ""
        return held

    def _hold_from(self, buffer: str) -> int:
        """Where the longest end of ``buffer`` that begins a stop string starts."""
        for start in range(max(0, len(buffer) - max(map(len, self._stops)) + 1), len(buffer)):
            if buffer[start] in self._first_characters:
                end = buffer[start:]
                if any(stop.startswith(end) for stop in self._stops):
                    return start
        return len(buffer)


class RequestText:
    """One request's output as text: detokenized, cut at stop strings, counted.

    The id that ends a request (eos or a stop id) is counted and, unless ``include_stop_str_in_output`` is on, shows no
    text. Stop strings are not looked for in the text of the first ``min_tokens`` tokens.

    Args:
        prompt_token_ids: the prompt when it was given as ids (it may end inside a character); else empty.
        kept_ids: see Detokenizer.

    Attributes:
        num_tokens: output tokens so far, up to the one that completed a stop string.
        finish_reason: set with the last piece; STOP when a stop string was found, whatever the engine says.
        stop_reason: the stop string or stop id that ended the request; None for eos and for a length limit.
        num_characters: characters detokenized so far, before stop strings cut them.
        token_offsets: for each token that the last ``push`` took, ``num_characters`` before it.
    """

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_min_tokens",
        "_stops",
        "finish_reason",
        "num_characters",
        "num_tokens",
        "stop_reason",
        "token_offsets",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        kept_ids: Iterable[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            prompt_token_ids=prompt_token_ids,
            kept_ids=kept_ids,
        )
        self._stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self.num_characters = 0
        self.token_offsets: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def push(self, output: RequestOutput) -> str:
        """Take one step's output and return the text to show now.

        After a stop string is found ``finish_reason`` is STOP: the caller aborts the request and pushes nothing more.
        Tokens behind the stop string are not counted.
        """
        shown = []
        self.token_offsets = []
        last = len(output.token_ids) - 1
        for i, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            self.token_offsets.append(self.num_characters)
            if i == last and output.finish_reason is FinishReason.STOP and not self._include_stop:
                break
            text = self._detokenizer.push(token_id)
            if not text:
                continue
            self.num_characters += len(text)
            if self.num_tokens <= self._min_tokens:
                shown.append(text)
                continue
            shown.append(self._stops.push(text))
            if self._stops.matched is not None:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = self._stops.matched
                return "".join(shown)
        if output.finish_reason is not None:
            shown.append(self._stops.flush())
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
        return "".join(shown)
