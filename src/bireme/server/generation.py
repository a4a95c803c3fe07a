"""From an answered-to-be call to bytes on the wire: streaming or whole, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bireme.engine_client import EngineClient, Submission
from bireme.errors import EngineDeadError
from bireme.server.answers import Answer
from bireme.server.metrics import Metrics, Timing
from bireme.server.params import Call
from bireme.server.protocol import (
    DONE,
    KEEP_ALIVE,
    ApiError,
    CompletionTokensDetails,
    Envelope,
    PromptTokensDetails,
    Usage,
    encode,
    error_object,
    event,
)
from bireme.server.settings import ServerSettings
from bireme.server.telemetry import Tracing
from bireme.server.wording import without_folders
from bireme.types import FinishReason, Request, RequestOutput

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 2.0
"""What an answer that ran out of time gets to say so; a client that does not read may be why it did."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(slots=True)
class Job:
    """One call, ready to run: a request and its answer for each prompt and each of n.

    Attributes:
        call_id: the response's id.
        kind: OpenAI's ``object`` of a whole response; a chunk's is ``chunk_kind``.
        requests: in the order of ``answers``.
        arrived: when the call came, on the monotonic clock.
        repeated: of a call of /v1/responses: what the response repeats of it; None for all others.
    """

    call: Call
    call_id: str
    model: str
    kind: str
    chunk_kind: str
    arrived: float
    requests: list[Request] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    repeated: dict[str, Any] | None = None

    @property
    def is_chat(self) -> bool:
        return self.kind != self.chunk_kind


class TokenQueue:
    """Prompt tokens of calls that wait for their first output token, which ``max_queue_tokens`` bounds.

    Attributes:
        num_tokens: so many wait.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._most = settings.max_queue_tokens
        self._retry_after = settings.retry_after
        self.num_tokens = 0

    def enter(self, num_tokens: int) -> None:
        """So many more wait.

        Raises:
            ApiError: 429, they do not fit beside those that do.
        """
        if self._most and self.num_tokens and self.num_tokens + num_tokens > self._most:
            message = (
                f"{self.num_tokens} prompt tokens wait and the call has {num_tokens}: at most {self._most} may "
                "(--max-queue-tokens)"
            )
            raise queue_full(message, self._retry_after)
        self.num_tokens += num_tokens

    def leave(self, num_tokens: int) -> None:
        """So many wait no longer."""
        self.num_tokens -= num_tokens


def queue_full(message: str, retry_after: int) -> ApiError:
    """What a client that came at a bad time is told."""
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"retry-after": str(retry_after)})


class Generation(Response):
    """Runs a job while its client listens. A client that leaves, in whatever way, ends the job's requests.

    The status line waits for the first token, so that a request that the engine refuses still gets its own status.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        queue: TokenQueue,
        job: Job,
        fingerprint: str,
        settings: ServerSettings,
        tracing: Tracing | None,
    ) -> None:
        super().__init__()
        self._tracing = tracing
        self._error: tuple[int, str] | None = None
        self._client = client
        self._metrics = metrics
        self._queue = queue
        self._num_queued = 0
        self._job = job
        self._settings = settings
        self._answers = {
            request.request_id: (answer, Timing(metrics, job.arrived, job.call.n, job.call.max_tokens))
            for request, answer in zip(job.requests, job.answers, strict=True)
        }
        self._envelope = Envelope(job.call_id, job.kind, job.created, job.model, [], fingerprint)
        self._has_begun = False
        self._is_answered = False
        self._last_write = job.arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._settings.request_timeout
        try:
            async with asyncio.timeout(limit - (time.monotonic() - self._job.arrived) if limit else None):
                await self._answer(receive, send)
        except TimeoutError:
            if self._is_answered:
                # Its client does not read it; the connection ends with half of it.
                return
            error = ApiError(504, f"the answer took longer than {limit:g} s (--request-timeout)", code="timeout")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_SECONDS):
                    await self._fail(send, error)
        finally:
            if self._tracing is not None:
                timings = [timing for _, timing in self._answers.values()]
                self._tracing.record(self._job, scope["headers"], timings, self._error)

    async def _answer(self, receive: Receive, send: Send) -> None:
        try:
            num_tokens = sum(answer.num_prompt_tokens for answer in self._job.answers)
            self._queue.enter(num_tokens)
            self._num_queued = num_tokens
            async with self._client.submit(self._job.requests) as submission:
                watch = asyncio.create_task(_leave_on_disconnect(receive, submission))
                try:
                    is_done = await (self._stream(submission, send) if self._job.call.stream else self._run(submission))
                finally:
                    watch.cancel()
            if not is_done:
                self._client_left()
            elif not self._job.call.stream:
                body = encode(self._whole())
                self._is_answered = True
                await _respond(send, 200, body)
        except EngineDeadError as error:
            await self._fail(send, ApiError(503, without_folders(str(error)), code="engine_dead"))
        except ApiError as error:
            await self._fail(send, error)
        finally:
            self._unqueue(self._num_queued)

    def _unqueue(self, num_tokens: int) -> None:
        self._num_queued -= num_tokens
        self._queue.leave(num_tokens)

    async def _run(self, submission: Submission) -> bool:
        """Collect everything; False if the client left first."""
        while outputs := await submission.take():
            self._push(submission, outputs)
        return self._is_complete()

    async def _stream(self, submission: Submission, send: Send) -> bool:
        """Send what each step brings, in one write; False if the client left before the end."""
        silence = self._settings.sse_keep_alive
        timer = self._watch_silence(submission, silence) if silence else None
        try:
            while True:
                outputs = await submission.take()
                if outputs:
                    events = self._events(self._push(submission, outputs))
                    if events:
                        await self._write(send, b"".join(events))
                elif submission.is_over:
                    break
                else:
                    await self._write(send, KEEP_ALIVE)
        finally:
            if timer is not None:
                timer.cancel()
        if not self._is_complete():
            return False
        await self._write(send, b"".join(self._last_events()), is_last=True)
        return True

    def _events(self, answers: Iterable[Answer]) -> list[bytes]:
        """What a stream says of the answers that have got something."""
        envelope = self._envelope
        envelope.object = self._job.chunk_kind
        options = self._job.call.stream_options
        if options.include_usage:
            envelope.usage = None
        if self._job.is_chat and self._job.call.return_token_ids and not self._has_begun:
            envelope.prompt_token_ids = self._job.answers[0].prompt_token_ids
        events = []
        for answer in answers:
            for choice in answer.chunks():
                envelope.choices = [choice]
                if options.continuous_usage_stats:
                    envelope.usage = self._usage()
                events.append(event(envelope))
                envelope.prompt_token_ids = UNSET
        return events

    def _last_events(self) -> list[bytes]:
        """What a stream says when all its answers have ended."""
        if not self._job.call.stream_options.include_usage:
            return [DONE]
        self._envelope.choices = []
        self._envelope.usage = self._usage()
        return [event(self._envelope), DONE]

    def _error_events(self, error: ApiError) -> list[bytes]:
        """What a stream says last when it cannot go on."""
        return [event(error_object(error.body))]

    def _watch_silence(self, submission: Submission, seconds: float) -> _Silence:
        """From now on, nudge the submission when nothing has been written for so long."""
        silence = _Silence(lambda: self._last_write, submission, seconds)
        silence.check()
        return silence

    def _push(self, submission: Submission, outputs: list[RequestOutput]) -> Sequence[Answer]:
        """Hand outputs to their answers; the answers that got something, each once."""
        now = time.monotonic()
        touched: dict[int, Answer] = {}
        for output in outputs:
            answer, timing = self._answers[output.request_id]
            if answer.finish_reason is not None:
                continue
            if output.finish_reason is FinishReason.ERROR or output.finish_reason is FinishReason.ABORT:
                raise self._error_of(output)
            if not timing.has_started and output.token_ids:
                timing.started(answer.num_prompt_tokens, output.num_cached_tokens, output.phase_seconds)
                self._unqueue(answer.num_prompt_tokens)
            before = answer.num_tokens
            answer.push(output)
            timing.tokens(answer.num_tokens - before, now)
            touched[answer.index] = answer
            if answer.finish_reason is not None:
                timing.finished(answer.finish_reason.value, answer.num_tokens, now)
                self._metrics.num_tool_calls += answer.num_tool_calls
                if output.finish_reason is None:
                    submission.abort(output.request_id)
        return list(touched.values())

    def _error_of(self, output: RequestOutput) -> ApiError:
        message = output.error or "the server shut down before the answer was complete"
        if output.is_invalid:
            return ApiError(400, message, param=output.error_param)
        if output.is_overloaded:
            return queue_full(message, self._settings.retry_after)
        return ApiError(503, without_folders(message), code="engine_error")

    def _is_complete(self) -> bool:
        return all(answer.finish_reason is not None for answer in self._job.answers)

    def _usage(self) -> Usage:
        answers = self._job.answers
        firsts = answers[:: self._job.call.n]
        num_prompt = sum(answer.num_prompt_tokens for answer in firsts)
        num_output = sum(answer.num_tokens for answer in answers)
        usage = Usage(
            num_prompt,
            num_output,
            num_prompt + num_output,
            PromptTokensDetails(sum(answer.num_cached_tokens for answer in firsts)),
        )
        if self._job.is_chat:
            usage.completion_tokens_details = CompletionTokensDetails(
                sum(answer.num_reasoning_tokens for answer in answers)
            )
        return usage

    def _whole(self) -> Any:
        """The body of an answer that is not streamed."""
        envelope = self._envelope
        envelope.choices = [answer.whole() for answer in self._job.answers]
        envelope.usage = self._usage()
        if self._job.is_chat and self._job.call.return_token_ids:
            envelope.prompt_token_ids = self._job.answers[0].prompt_token_ids
        return envelope

    async def _write(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._last_write = time.monotonic()

    async def _fail(self, send: Send, error: ApiError) -> None:
        """The call cannot be completed: as a response of its own, or as the last event of a stream that has begun."""
        self._error = (error.status, str(error))
        self._metrics.http_errors[error.status] += 1
        self._count_unfinished(FinishReason.ERROR)
        if self._has_begun:
            await self._write(send, b"".join(self._error_events(error)), is_last=True)
        else:
            headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
            await _respond(send, error.status, encode(error_object(error.body)), headers)

    def _client_left(self) -> None:
        self._error = (499, "the client left")
        self._metrics.num_disconnects += 1
        self._count_unfinished(FinishReason.ABORT)
        logger.info("%s: the client left", self._job.call_id)

    def _count_unfinished(self, reason: FinishReason) -> None:
        now = time.monotonic()
        for answer, timing in self._answers.values():
            if answer.finish_reason is None:
                timing.finished(reason.value, answer.num_tokens, now)


class _Silence:
    """Nudges a submission whose stream has had nothing to say for ``seconds``."""

    def __init__(self, last_write: Callable[[], float], submission: Submission, seconds: float) -> None:
        self._last_write = last_write
        self._submission = submission
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Nudge if it is time to, and come back when it will be."""
        left = self._last_write() + self._seconds - time.monotonic()
        if left <= 0:
            self._submission.nudge()
            left = self._seconds
        self._timer = asyncio.get_running_loop().call_later(left, self.check)

    def cancel(self) -> None:
        """No more."""
        if self._timer is not None:
            self._timer.cancel()


async def _leave_on_disconnect(receive: Receive, submission: Submission) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    submission.leave()


async def _respond(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
