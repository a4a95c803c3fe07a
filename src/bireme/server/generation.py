"""From an answered-to-be call to bytes on the wire: streaming or whole, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bireme.engine_client import EngineClient, Submission
from bireme.errors import EngineDeadError
from bireme.server.answers import Answer
from bireme.server.metrics import Metrics, Timing
from bireme.server.params import Call
from bireme.server.protocol import (
    DONE,
    ApiError,
    CompletionTokensDetails,
    Envelope,
    PromptTokensDetails,
    Usage,
    encode,
    error_object,
    event,
)
from bireme.types import FinishReason, Request, RequestOutput

logger = logging.getLogger(__name__)

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

    @property
    def is_chat(self) -> bool:
        return self.kind != self.chunk_kind


class Generation(Response):
    """Runs a job while its client listens. A client that leaves, in whatever way, ends the job's requests.

    The status line waits for the first token, so that a request that the engine refuses still gets its own status.
    """

    def __init__(self, client: EngineClient, metrics: Metrics, job: Job, fingerprint: str, retry_after: int) -> None:
        super().__init__()
        self._client = client
        self._metrics = metrics
        self._job = job
        self._retry_after = str(retry_after)
        self._answers = {
            request.request_id: (answer, Timing(metrics, job.arrived))
            for request, answer in zip(job.requests, job.answers, strict=True)
        }
        self._envelope = Envelope(job.call_id, job.kind, job.created, job.model, [], fingerprint)
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._client.submit(self._job.requests) as submission:
                watch = asyncio.create_task(_leave_on_disconnect(receive, submission))
                try:
                    is_done = await (self._stream(submission, send) if self._job.call.stream else self._run(submission))
                finally:
                    watch.cancel()
            if not is_done:
                self._client_left()
            elif not self._job.call.stream:
                await _respond(send, 200, encode(self._whole()))
        except EngineDeadError as error:
            await self._fail(send, ApiError(503, str(error), code="engine_dead"))
        except ApiError as error:
            await self._fail(send, error)

    async def _run(self, submission: Submission) -> bool:
        """Collect everything; False if the client left first."""
        while outputs := await submission.take():
            self._push(submission, outputs)
        return self._is_complete()

    async def _stream(self, submission: Submission, send: Send) -> bool:
        """Send what each step brings, in one write; False if the client left before the end."""
        envelope = self._envelope
        envelope.object = self._job.chunk_kind
        options = self._job.call.stream_options
        if options.include_usage:
            envelope.usage = None
        while outputs := await submission.take():
            events = []
            for answer in self._push(submission, outputs):
                for choice in answer.chunks():
                    envelope.choices = [choice]
                    if options.continuous_usage_stats:
                        envelope.usage = self._usage()
                    events.append(event(envelope))
            if events:
                await self._write(send, b"".join(events))
        if not self._is_complete():
            return False
        tail = DONE
        if options.include_usage:
            envelope.choices = []
            envelope.usage = self._usage()
            tail = event(envelope) + DONE
        await self._write(send, tail, is_last=True)
        return True

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
                timing.started(answer.num_prompt_tokens, output.num_cached_tokens)
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
            return ApiError(
                429, message, kind="rate_limit_error", code="queue_full", headers={"retry-after": self._retry_after}
            )
        return ApiError(503, message, code="engine_error")

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

    def _whole(self) -> Envelope:
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

    async def _fail(self, send: Send, error: ApiError) -> None:
        """The call cannot be completed: as a response of its own, or as the last event of a stream that has begun."""
        self._metrics.http_errors[error.status] += 1
        self._count_unfinished(FinishReason.ERROR)
        if self._has_begun:
            await self._write(send, event(error_object(error.body)), is_last=True)
        else:
            headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
            await _respond(send, error.status, encode(error_object(error.body)), headers)

    def _client_left(self) -> None:
        self._metrics.num_disconnects += 1
        self._count_unfinished(FinishReason.ABORT)
        logger.info("%s: the client left", self._job.call_id)

    def _count_unfinished(self, reason: FinishReason) -> None:
        now = time.monotonic()
        for answer, timing in self._answers.values():
            if answer.finish_reason is None:
                timing.finished(reason.value, answer.num_tokens, now)


async def _leave_on_disconnect(receive: Receive, submission: Submission) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    submission.leave()


async def _respond(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
