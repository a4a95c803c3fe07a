"""One answer in the making: what steps bring for it, and its form in a chunk or a whole response (no HTTP here)."""

from __future__ import annotations

import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from bireme.server.chat import ReasoningSplitter
from bireme.server.detokenizer import Detokenizer
from bireme.server.protocol import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Choice,
    CompletionChoice,
    CompletionLogprobs,
    TokenLogprob,
    ToolCallDelta,
    ToolCallPart,
    TopLogprob,
)
from bireme.server.text_state import RequestText
from bireme.server.tokenizer import Tokenizer
from bireme.server.tool_parser import ToolCall, ToolCallParser
from bireme.types import FinishReason, RequestOutput, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from bireme.server.params import Call, ChatCall

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for; OpenAI's figure."""


class Answer(ABC):
    """What both kinds of answer share. ``push`` collects, ``chunks`` gives what is new since, ``whole`` all.

    Attributes:
        index: the answer's place in the response.
        num_prompt_tokens: of its prompt.
        num_cached_tokens: of these, taken over from an earlier request.
        finish_reason: once it has ended.
    """

    def __init__(
        self,
        index: int,
        call: Call,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: list[int],
        *,
        prompt_is_ids: bool,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_cached_tokens = 0
        self._tokenizer = tokenizer
        self._text = RequestText(
            tokenizer, params, prompt_token_ids=prompt_token_ids if prompt_is_ids else (), kept_ids=kept_ids
        )
        self._num_top = params.logprobs
        self._tokens_as_ids = call.tokens_as_ids
        self._wants_ids = call.return_token_ids
        self._token_ids: list[int] = []

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._text.finish_reason

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._text.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """Of these, thought."""
        return 0

    @property
    def num_tool_calls(self) -> int:
        """Tool calls so far."""
        return 0

    @abstractmethod
    def push(self, output: RequestOutput) -> None:
        """Take what one step brought."""

    @abstractmethod
    def chunks(self) -> list[Choice]:
        """What is new since the last ones; nothing when there is nothing to show yet."""

    @abstractmethod
    def whole(self) -> Choice:
        """Everything, once it has ended."""

    @property
    def _reason(self) -> str | None:
        return None if self.finish_reason is None else self.finish_reason.value

    def _taken_ids(self) -> list[int] | UnsetType:
        if not self._wants_ids:
            return UNSET
        taken, self._token_ids = self._token_ids, []
        return taken

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokens_as_ids else self._tokenizer.token_text(token_id)


class CompletionAnswer(Answer):
    """An answer of /v1/completions.

    Args:
        prompt: the prompt's text if it was text, else None.
    """

    def __init__(
        self,
        index: int,
        call: Call,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: list[int],
        prompt: str | None,
    ) -> None:
        super().__init__(index, call, tokenizer, params, prompt_token_ids, prompt_is_ids=prompt is None)
        self._shown: list[str] = []
        self._logprobs: CompletionLogprobs | None = None
        self._offset = 0
        self._shows_prompt_ids = self._wants_ids
        self._only_prompt = call.max_tokens == 0
        self._prompt_offsets: list[int] = []
        if call.echo:
            text = _prompt_text(tokenizer, prompt_token_ids) if prompt is None else prompt
            self._shown.append(text)
            self._offset = len(text)
            if self._num_top is not None:
                self._prompt_offsets = _prompt_offsets(call, tokenizer, prompt_token_ids, prompt)

    @property
    def num_tokens(self) -> int:
        return 0 if self._only_prompt else self._text.num_tokens

    def push(self, output: RequestOutput) -> None:
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        text = self._text.push(output)
        if output.prompt_logprobs is not None:
            self._add_prompt_logprobs(output.prompt_logprobs)
        if self._only_prompt:
            return
        if text:
            self._shown.append(text)
        offsets = self._text.token_offsets
        if self._num_top is not None and output.logprobs is not None:
            for entry, offset in zip(output.logprobs, offsets, strict=False):
                self._add_logprobs(entry.token_id, entry, self._offset + offset)
        if self._wants_ids:
            self._token_ids += output.token_ids[: len(offsets)]

    def chunks(self) -> list[Choice]:
        text = "".join(self._shown)
        if not text and self._reason is None and self._logprobs is None and not self._token_ids:
            return []
        return [self._choice(text)]

    def whole(self) -> CompletionChoice:
        return self._choice("".join(self._shown))

    def _choice(self, text: str) -> CompletionChoice:
        self._shown.clear()
        logprobs, self._logprobs = self._logprobs, None
        reason = self._reason
        choice = CompletionChoice(self.index, text, logprobs, reason, self._text.stop_reason, self._taken_ids())
        if self._only_prompt and reason is not None:
            choice.finish_reason, choice.stop_reason = FinishReason.LENGTH.value, None
        if self._shows_prompt_ids:
            choice.prompt_token_ids = self.prompt_token_ids
            self._shows_prompt_ids = False
        return choice

    def _add_prompt_logprobs(self, entries: Sequence[TokenLogprobs | None]) -> None:
        for token_id, entry, offset in zip(self.prompt_token_ids, entries, self._prompt_offsets, strict=True):
            self._add_logprobs(token_id, entry, offset)

    def _add_logprobs(self, token_id: int, entry: TokenLogprobs | None, offset: int) -> None:
        if self._logprobs is None:
            self._logprobs = CompletionLogprobs([], [], [], [])
        lists = self._logprobs
        name = self._name(token_id)
        lists.text_offset.append(offset)
        lists.tokens.append(name)
        if entry is None:
            lists.token_logprobs.append(None)
            lists.top_logprobs.append(None)
            return
        top = {
            self._name(top_id): _finite(value)
            for top_id, value in zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False)
        }
        lists.token_logprobs.append(_finite(entry.logprob))
        lists.top_logprobs.append({**top, name: _finite(entry.logprob)})


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions: its thought, its content and its tool calls apart.

    Args:
        prompt: what the template rendered; its end says how the answer begins.
    """

    def __init__(
        self,
        index: int,
        call: ChatCall,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: list[int],
        prompt: str,
    ) -> None:
        super().__init__(
            index,
            call,
            tokenizer,
            params,
            prompt_token_ids,
            prompt_is_ids=False,
            kept_ids=tokenizer.markup_ids,
        )
        self._splitter = ReasoningSplitter(prompt)
        self._parser = ToolCallParser(call.tools, only_first=call.only_first_call) if call.tools else None
        self._ends_with_call = self._parser is not None and call.only_first_call
        self._min_tokens = params.min_tokens
        self._thought: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_reasoning_tokens = 0
        self._is_first = True

    @property
    def num_reasoning_tokens(self) -> int:
        return self._num_reasoning_tokens

    @property
    def num_tool_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_calls

    @property
    def finish_reason(self) -> FinishReason | None:
        is_over = self._ends_with_call and self.num_tool_calls and self.num_tokens >= self._min_tokens
        return FinishReason.STOP if is_over else self._text.finish_reason

    @property
    def _reason(self) -> str | None:
        reason = super()._reason
        return "tool_calls" if reason == FinishReason.STOP.value and self.num_tool_calls else reason

    def push(self, output: RequestOutput) -> None:
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        # An answer that a call ends must not count tokens behind it, however many come at once.
        for part in _by_token(output) if self._ends_with_call else (output,):
            if self.finish_reason is None:
                self._push(part)

    def _push(self, output: RequestOutput) -> None:
        was_thinking = self._splitter.in_thought
        text = self._text.push(output)
        taken = len(self._text.token_offsets)
        if was_thinking:
            self._num_reasoning_tokens += taken
        if text:
            self._add(*self._splitter.push(text))
        if self._text.finish_reason is not None:
            self._add(*self._splitter.flush())
            if self._parser is not None:
                self._add_parsed(*self._parser.flush())
        if self._num_top is not None and output.logprobs is not None:
            self._logprobs += [self._token_logprob(entry) for entry in output.logprobs[:taken]]
        if self._wants_ids:
            self._token_ids += output.token_ids[:taken]

    def chunks(self) -> list[Choice]:
        reason = self._reason
        thought, content = "".join(self._thought), "".join(self._content)
        if not (thought or content or self._calls or reason is not None or self._logprobs or self._token_ids):
            return []
        self._thought.clear()
        self._content.clear()
        calls, self._calls = self._calls, []
        delta = ChatDelta(None, content or None, thought or None, calls or None, thought or None)
        if self._is_first:
            self._is_first = False
            delta.role = "assistant"
            if self._parser is None:
                delta.content = content
        if not calls or reason is None:
            return [self._chunk(delta, reason)]
        # The official client's stream helper takes a call for complete only with a later chunk.
        return [self._chunk(delta, None), self._chunk(ChatDelta(), reason)]

    def whole(self) -> ChatChoice:
        thought = "".join(self._thought) or None
        message = ChatMessage("assistant", "".join(self._content), thought, reasoning=thought)
        if self._calls:
            message.tool_calls = [ToolCallPart(call.id, call.function) for call in self._calls]
            message.content = message.content or None
        return ChatChoice(
            self.index, message, self._taken_logprobs(), self._reason, self._text.stop_reason, self._taken_ids()
        )

    def _add(self, thought: str, content: str) -> None:
        if thought:
            self._thought.append(thought)
        if not content:
            return
        if self._parser is None:
            self._content.append(content)
        else:
            self._add_parsed(*self._parser.push(content))

    def _add_parsed(self, content: str, calls: list[ToolCall]) -> None:
        if content:
            self._content.append(content)
        first = self.num_tool_calls - len(calls)
        for index, call in enumerate(calls, first):
            function = CalledFunction(call.name, call.arguments)
            self._calls.append(ToolCallDelta(f"call_{uuid.uuid4().hex}", function, index=index))

    def _chunk(self, delta: ChatDelta, reason: str | None) -> ChatChunkChoice:
        stop_reason = None if reason is None else self._text.stop_reason
        return ChatChunkChoice(self.index, delta, self._taken_logprobs(), reason, stop_reason, self._taken_ids())

    def _taken_logprobs(self) -> ChatLogprobs | None:
        if self._num_top is None:
            return None
        taken, self._logprobs = self._logprobs, []
        return ChatLogprobs(taken)

    def _token_logprob(self, entry: TokenLogprobs) -> TokenLogprob:
        raw = self._tokenizer.bytes_of
        top = [
            TopLogprob(self._name(top_id), _finite(value), list(raw(top_id)))
            for top_id, value in zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False)
        ]
        return TokenLogprob(self._name(entry.token_id), _finite(entry.logprob), list(raw(entry.token_id)), top)


def _by_token(output: RequestOutput) -> Iterator[RequestOutput]:
    """One output after another, each with one token of ``output``; the last also says how it ended."""
    last = len(output.token_ids) - 1
    for i, token_id in enumerate(output.token_ids):
        yield msgspec.structs.replace(
            output,
            token_ids=[token_id],
            logprobs=None if output.logprobs is None else output.logprobs[i : i + 1],
            finish_reason=output.finish_reason if i == last else None,
            stop_reason=output.stop_reason if i == last else None,
        )
    if last < 0:
        yield output


def _finite(value: float) -> float:
    return max(LOWEST_LOGPROB, value)


def _prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of a prompt given as ids, without a character that only the answer completes."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    return "".join(map(detokenizer.push, token_ids))


def _prompt_offsets(call: Call, tokenizer: Tokenizer, token_ids: Sequence[int], prompt: str | None) -> list[int]:
    """Where each token of an echoed prompt begins in the text that is shown of it."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    if prompt is not None and "".join(pieces) != prompt:
        offsets = tokenizer.offsets(prompt, add_special_tokens=getattr(call, "add_special_tokens", True))
        if len(offsets) == len(token_ids):
            return offsets
    return list(itertools.accumulate(map(len, pieces), initial=0))[:-1]
