"""The offline API: prompts in, completions out, in this process. Shapes and names are vLLM's."""

from __future__ import annotations

import contextlib
import itertools
import numbers
import reprlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from bireme.checkpoint.headers import verify_checkpoint
from bireme.engine import EngineCore
from bireme.engine_args import build_engine_config
from bireme.errors import BiremeError, ConfigError, EngineDeadError, InvalidRequestError
from bireme.executor.launcher import create_executor
from bireme.pocket import resolve
from bireme.server.chat import ChatTemplate, after_thought, check_template_variables
from bireme.server.messages import read_messages
from bireme.server.text_state import RequestText
from bireme.server.tokenizer import Tokenizer
from bireme.server.tools import read_tools
from bireme.types import FinishReason, Request, SamplingParams, TokenLogprobs, as_token_id
from bireme.types import RequestOutput as StepResult
from bireme.validation import check_request

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""

_PROMPT_FORMS = "a prompt is a string, a list of token ids, or a dict with prompt or prompt_token_ids"

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's raw log-probability; ``rank`` is 1 for the most likely token of the vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a prompt's completions.

    Attributes:
        index: 0 … n-1.
        text: what was generated, without the stop string and without special tokens.
        token_ids: every generated id, the one that ended it included.
        cumulative_logprob: sum over ``token_ids``; None unless log-probabilities were asked for.
        logprobs: per token, id → Logprob of the drawn token and of the k best; None unless asked for.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop string or stop token id that ended it; None for an end token or a limit.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """What became of one prompt.

    Attributes:
        prompt: its text, None when it was given as token ids.
        prompt_logprobs: per prompt token (None for the first), as in CompletionOutput; None unless asked for.
        num_cached_tokens: prompt tokens whose computation was taken over from an earlier request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one step added to a streamed completion; the last piece has a ``finish_reason``."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class _Sequence:
    """One completion in the making."""

    request: Request
    prompt: str | None
    text: RequestText | None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


_Inbox = deque["tuple[_Sequence, TextPiece] | BiremeError"]
"""What has come for the sequences of one call and was not read yet."""


class LLM:
    """A model loaded in this process, for batches of prompts.

    Calls may overlap: streams that are open at once, or a ``generate`` while one is, run in the same steps. Threads
    may share it; they take turns, step by step.

    With ``tensor_parallel_size`` above 1 the other ranks are processes of their own. Close it, or use it as a context
    manager, to end them and free the memory.

    Args:
        model: checkpoint folder, or ``pocket``: the small model that is shipped here.
        dtype: "float32", "bfloat16" or "auto" (the checkpoint's on cuda, float32 on cpu).
        device: "cpu", "cuda" or "auto".
        max_model_len: prompt plus output tokens of one request; None for the model's own limit.
        max_num_seqs: completions that run at once.
        kv_cache_memory_bytes: bytes of state and KV per rank; None to work it out.
        seed: seed of requests that bring none.
        load_format: "dummy" fills the weights at random.

    Raises:
        ConfigError: a configuration that cannot be run.
        CheckpointError: a checkpoint that cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int = 64,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        seed: int = 0,
        load_format: str = "auto",
        enforce_eager: bool = False,
        distributed_backend: str = "auto",
    ) -> None:
        model = resolve(model)
        self.config = build_engine_config(
            model,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
            load_format=load_format,
            enforce_eager=enforce_eager,
            distributed_backend=distributed_backend,
            max_waiting=2**31 - 1,  # a batch of any length may queue here
            show_progress=sys.stderr.isatty(),
        )
        if load_format != "dummy":
            verify_checkpoint(model, self.config.model)
        self._tokenizer = Tokenizer.from_folder(model) if has_tokenizer(model) else None
        self._template: ChatTemplate | None = None
        executor = create_executor(self.config)
        # For callers that forget to close: at exit, or when nobody holds this object any more.
        weakref.finalize(self, executor.shutdown)
        self.capacity = executor.capacity
        self._engine = EngineCore(self.config, executor)
        self._request_ids = itertools.count()
        self._is_closed = False
        # Whoever needs a token steps the engine and hands all outputs out, by request id.
        self._open: dict[str, tuple[_Sequence, _Inbox]] = {}
        self._left: deque[str] = deque()
        self._lock = threading.RLock()
        self._is_in_engine = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks and free their memory. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._open.clear()
                self._engine.shutdown()

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            ConfigError: the folder holds none.
        """
        if self._tokenizer is None:
            raise ConfigError(f"{self.config.model_path} has no tokenizer.json: give prompts as token ids")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults of the checkpoint's generation_config.json."""
        generation = self.config.generation
        named: dict[str, Any] = {
            "temperature": generation.temperature,
            "top_k": generation.top_k,
            "top_p": generation.top_p,
            "min_p": generation.min_p,
            "repetition_penalty": generation.repetition_penalty,
            "max_tokens": generation.max_new_tokens,
        }
        return SamplingParams(**{name: value for name, value in named.items() if value is not None})

    def check_form(self, params: SamplingParams) -> None:
        """Find out, without generating anything, whether answers can follow ``params.structured_outputs``.

        Raises:
            InvalidRequestError: they cannot; says where and why.
        """
        if params.structured_outputs is not None:
            with self._inside() as engine:
                prepared = engine.executor.prepare(params)
            prepared.result()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        Args:
            prompts: one prompt or a list of them (a flat list of ints is one prompt).
            sampling_params: one for all, or one per prompt; None for the checkpoint's defaults.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidRequestError: a prompt or parameter that can never be served; nothing has run then.
            ExecutorError: a rank failed; the LLM is of no use any more.
        """
        listed = as_list(prompts)
        params = self._params_of(sampling_params, len(listed))
        groups = []
        for index, (prompt, each) in enumerate(zip(listed, params, strict=True)):
            where = f"prompt {index}: " if len(listed) > 1 else ""
            groups.append(self._sequences(prompt, each, where))
        sequences = [sequence for group in groups for sequence in group]
        with _progress(use_tqdm, len(sequences)) as advance, contextlib.closing(self._run(sequences)) as pieces:
            for _, piece in pieces:
                advance(piece.finish_reason is not None, len(piece.token_ids))
        return [self._result(group) for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the checkpoint's chat template.

        Args:
            tools: what the model may call, as in a request to the server. A call is part of the text, in the model's
                own markup.
            chat_template_kwargs: the template's own switches, e.g. ``enable_thinking``.

        Raises:
            ConfigError: the checkpoint has no tokenizer or no chat template.
            InvalidRequestError: the messages or tools are malformed, or the template refuses them; or as in
                ``generate``.
        """
        variables = chat_template_kwargs or {}
        check_template_variables(variables)
        conversations: Any = messages
        if not isinstance(messages, (list, tuple)) or (messages and isinstance(messages[0], Mapping)):
            conversations = [messages]
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(
                    self.render_chat(
                        conversation, add_generation_prompt=add_generation_prompt, tools=tools, **variables
                    )
                )
            except InvalidRequestError as error:
                where = f"conversation {index}: " if len(conversations) > 1 else ""
                raise InvalidRequestError(f"{where}{error}", error.param) from error
        params = self._params_of(sampling_params, len(prompts))
        params = [after_thought(each, prompt) for each, prompt in zip(params, prompts, strict=True)]
        return self.generate(prompts, params, use_tqdm)

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt text that the chat template makes of a conversation.

        Raises:
            ConfigError: the checkpoint has no tokenizer or no chat template.
            InvalidRequestError: the messages or tools are malformed (as in a request to the server), or the template
                refuses them.
        """
        if self._template is None:
            self._template = ChatTemplate.of(self.get_tokenizer())
        if options.get("tools") is not None:
            options["tools"] = _checked_tools(options["tools"], self._template)
        return self._template.render(_checked_messages(messages), **options)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[TextPiece]:
        """Complete one prompt (or answer one conversation) and yield its text as it comes.

        The request starts with the first piece that is asked for. Leaving the iterator early aborts it.

        Raises:
            InvalidRequestError, ConfigError, ExecutorError: as in ``generate`` and ``chat``.
        """
        is_chat = isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)
        text: Any = self.render_chat(prompt) if is_chat else prompt  # type: ignore[arg-type]
        params = self._params_of(sampling_params, 1)[0]
        if is_chat:
            params = after_thought(params, text)
        if params.n != 1:
            raise InvalidRequestError(f"n is {params.n}: a stream has one completion", "n")
        with contextlib.closing(self._run(self._sequences(text, params, ""))) as pieces:
            for _, piece in pieces:
                yield piece

    def _params_of(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * num_prompts
        if not isinstance(given, (list, tuple)):
            raise InvalidRequestError(
                f"sampling_params is {reprlib.repr(given)}: give one SamplingParams for all prompts, or a list with "
                "one per prompt",
                "sampling_params",
            )
        for index, each in enumerate(given):
            if not isinstance(each, SamplingParams):
                raise InvalidRequestError(
                    f"sampling_params[{index}] is {reprlib.repr(each)}: it must be a SamplingParams", "sampling_params"
                )
        if len(given) != num_prompts:
            raise InvalidRequestError(
                f"{num_prompts} prompts came with {len(given)} sampling params: give one for all or one per prompt",
                "sampling_params",
            )
        return list(given)

    def _sequences(self, prompt: Prompt, params: SamplingParams, where: str) -> list[_Sequence]:
        """The n sequences of one prompt, checked but not started."""
        try:
            text, token_ids = self._read_prompt(prompt)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}{error}", error.param) from None
        request_id = str(next(self._request_ids))
        sequences = []
        try:
            self.check_form(params)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}{error}", error.param) from None
        for index in range(params.n):
            request = Request(
                request_id if params.n == 1 else f"{index}_{request_id}", token_ids, child_params(params, index)
            )
            try:
                check_request(request, self.config.model.vocab_size, self.capacity)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{where}{error}", error.param) from None
            state = None
            if self._tokenizer is not None:
                state = RequestText(self._tokenizer, request.params, prompt_token_ids=token_ids if text is None else ())
            elif params.stop:
                raise InvalidRequestError(f"{where}stop strings need a tokenizer.json, and the model has none", "stop")
            sequences.append(_Sequence(request, text, state))
        return sequences

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        given: Any = prompt
        if isinstance(given, Mapping):
            text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
            if text is None and token_ids is None:
                raise InvalidRequestError("a prompt given as a dict needs prompt or prompt_token_ids", "prompt")
            if text is not None and not isinstance(text, str):
                raise InvalidRequestError(f"prompt is {reprlib.repr(text)}: it must be a string", "prompt")
            if token_ids is not None:
                return text, _read_token_ids(token_ids, "prompt_token_ids is {}: it must be a list of token ids")
            given = text
        if isinstance(given, str):
            return given, self.get_tokenizer().encode(given)
        return None, _read_token_ids(given, f"the prompt is {{}}: {_PROMPT_FORMS}")

    def _run(self, sequences: list[_Sequence]) -> Generator[tuple[_Sequence, TextPiece], None, None]:
        """Run the sequences to their ends; yields each with what a step brought it.

        Whatever leaves the loop early (an error, Ctrl-C, a consumer that stops) aborts what is still open.
        """
        inbox: _Inbox = deque()
        try:
            with self._inside() as engine:
                for sequence in sequences:
                    request = msgspec.structs.replace(sequence.request, arrival_time=time.time())
                    self._open[request.request_id] = (sequence, inbox)
                    engine.add_request(request)
            num_open = len(sequences)
            while num_open:
                if not inbox:
                    self._advance(inbox)
                    continue
                item = inbox.popleft()
                if isinstance(item, BiremeError):
                    raise item
                num_open -= item[1].finish_reason is not None
                yield item
        finally:
            self._let_go(sequences)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[EngineCore]:
        """The engine, for this thread alone."""
        with self._lock:
            if self._is_in_engine:
                raise RuntimeError("a signal handler or finalizer cannot use an LLM that it interrupted in a step")
            if self._is_closed:
                raise EngineDeadError("this LLM is closed")
            self._is_in_engine = True
            try:
                yield self._engine
            finally:
                self._is_in_engine = False

    def _advance(self, inbox: _Inbox) -> None:
        """Make one step and hand out what it brought, unless another thread has filled ``inbox`` meanwhile."""
        with self._inside() as engine:
            if inbox:
                return
            self._abort_left(engine)
            if not engine.is_dead and not engine.has_unfinished:
                raise EngineDeadError("the engine has nothing left to do, and a request has not ended")
            for output in engine.step():
                self._deliver(engine, output)

    def _deliver(self, engine: EngineCore, output: StepResult) -> None:
        request_id = output.request_id
        found = self._open.get(request_id)
        if found is None:
            return  # the end of one that was aborted here
        sequence, inbox = found
        if output.finish_reason is FinishReason.ERROR:
            message = output.error or "the engine gave no reason"
            inbox.append(InvalidRequestError(message) if output.is_invalid else EngineDeadError(message))
            del self._open[request_id]
            return
        piece = self._take(sequence, output)
        inbox.append((sequence, piece))
        if piece.finish_reason is not None:
            del self._open[request_id]
            if output.finish_reason is None:
                engine.abort(request_id)

    def _let_go(self, sequences: list[_Sequence]) -> None:
        """Abort what is still open of a call that ends; if no other call is open, bring the engine to rest.

        The garbage collector may come here at any moment, from any thread. If the engine is in use just then, whoever
        makes the next step does the rest.
        """
        self._left.extend(each.request.request_id for each in sequences if each.request.request_id in self._open)
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._is_in_engine or self._is_closed:
                return
            with self._inside() as engine:
                self._abort_left(engine)
                while not self._open and engine.has_unfinished:
                    engine.step()
        finally:
            self._lock.release()

    def _abort_left(self, engine: EngineCore) -> None:
        while self._left:
            request_id = self._left.popleft()
            if self._open.pop(request_id, None) is not None:
                engine.abort(request_id)

    def _take(self, sequence: _Sequence, output: StepResult) -> TextPiece:
        text = ""
        new_ids = output.token_ids
        if sequence.text is not None:
            before = sequence.text.num_tokens
            text = sequence.text.push(output)
            new_ids = new_ids[: sequence.text.num_tokens - before]
            sequence.finish_reason, sequence.stop_reason = sequence.text.finish_reason, sequence.text.stop_reason
        else:
            sequence.finish_reason, sequence.stop_reason = output.finish_reason, output.stop_reason
        sequence.pieces.append(text)
        sequence.token_ids += new_ids
        sequence.logprobs += (output.logprobs or [])[: len(new_ids)]
        if output.prompt_logprobs is not None:
            sequence.prompt_logprobs = output.prompt_logprobs
        sequence.num_cached_tokens = max(sequence.num_cached_tokens, output.num_cached_tokens)
        reason = sequence.finish_reason
        return TextPiece(text, new_ids, None if reason is None else reason.value, sequence.stop_reason)

    def _result(self, group: list[_Sequence]) -> RequestOutput:
        first = group[0]
        prompt_logprobs = None
        if first.prompt_logprobs is not None:
            prompt_logprobs = [None if entry is None else self._logprobs(entry) for entry in first.prompt_logprobs]
        outputs = []
        for index, sequence in enumerate(group):
            wanted = sequence.request.params.logprobs is not None
            outputs.append(
                CompletionOutput(
                    index=index,
                    text="".join(sequence.pieces),
                    token_ids=sequence.token_ids,
                    cumulative_logprob=sum(entry.logprob for entry in sequence.logprobs) if wanted else None,
                    logprobs=[self._logprobs(entry) for entry in sequence.logprobs] if wanted else None,
                    finish_reason=None if sequence.finish_reason is None else sequence.finish_reason.value,
                    stop_reason=sequence.stop_reason,
                )
            )
        return RequestOutput(
            request_id=first.request.request_id.rpartition("_")[2],
            prompt=first.prompt,
            prompt_token_ids=first.request.prompt_token_ids,
            outputs=outputs,
            finished=True,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
        )

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._decoded(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            found.setdefault(token_id, Logprob(logprob, rank, self._decoded(token_id)))
        return found

    def _decoded(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, in any of its forms, as a list of one; a list of prompts as it is."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    given: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray)):
        raise InvalidRequestError(f"the prompts are {reprlib.repr(given)}: {_PROMPT_FORMS}; or give a list", "prompt")
    listed = [item.tolist() if hasattr(item, "tolist") else item for item in given]
    return [listed] if listed and all(isinstance(item, numbers.Number) for item in listed) else listed


def _read_token_ids(given: Any, refusal: str) -> list[int]:
    """Token ids as a list of ints; ``refusal`` says what is wrong with something that is no list at all."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, bytearray, Mapping)):
        raise InvalidRequestError(refusal.format(reprlib.repr(given)), "prompt")
    token_ids = []
    for position, item in enumerate(given):
        token_id = as_token_id(item)
        if token_id is None:
            raise InvalidRequestError(
                f"the prompt holds {reprlib.repr(item)} at position {position}: token ids must be integers", "prompt"
            )
        token_ids.append(token_id)
    return token_ids


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError(
            f"messages is {reprlib.repr(messages)}: it must be a list of dicts with role and content", "messages"
        )
    try:
        return read_messages([dict(each) if isinstance(each, Mapping) else each for each in messages])
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        # What is refused is shown as JSON, and there are values that JSON does not know.
        raise InvalidRequestError(f"messages holds a value that has no JSON form: {error}", "messages") from error


def _checked_tools(tools: Any, template: ChatTemplate) -> list[dict[str, Any]]:
    if not isinstance(tools, (list, tuple)):
        raise InvalidRequestError(f"tools is {reprlib.repr(tools)}: it must be a list of tools", "tools")
    if tools and not template.takes_tools:
        raise InvalidRequestError("the model's chat template does not know tools", "tools")
    try:
        return read_tools(tools)
    except TypeError as error:
        raise InvalidRequestError(f"tools holds a value that has no JSON form: {error}", "tools") from error


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of completion ``index`` of n: a seeded one gets ``seed + index``, within 64 signed bits."""
    if params.n == 1:
        return params
    seed = params.seed
    if seed is not None:
        seed = (seed + index + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, n=1, seed=seed)


def has_tokenizer(folder: str) -> bool:
    return (Path(folder) / "tokenizer.json").is_file()


@contextlib.contextmanager
def _progress(is_shown: bool, total: int) -> Iterator[Callable[[bool, int], None]]:
    """A bar over completions; yields what to call for each piece: whether its completion ended, its tokens."""
    if not is_shown:
        yield lambda ended, num_new: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("completions"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, rate=0.0)
        started = time.perf_counter()
        num_tokens = 0

        def advance(ended: bool, num_new: int) -> None:
            nonlocal num_tokens
            num_tokens += num_new
            rate = num_tokens / (time.perf_counter() - started)
            bar.update(task, advance=ended, rate=rate)

        yield advance
