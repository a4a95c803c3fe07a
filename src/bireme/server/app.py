"""The HTTP surface: routes, bodies, errors."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from bireme import __version__
from bireme.engine_client import EngineClient
from bireme.errors import InvalidRequestError
from bireme.server.answers import ChatAnswer, CompletionAnswer
from bireme.server.chat import ChatTemplate, after_thought
from bireme.server.generation import Generation, Job, TokenQueue, queue_full
from bireme.server.live import Live
from bireme.server.metrics import CONTENT_TYPE, Metrics
from bireme.server.page import add_page
from bireme.server.parameters import body_schema
from bireme.server.params import ChatCall, parse_chat, parse_completion
from bireme.server.protocol import ApiError, encode, error_object
from bireme.server.responses import ResponseGeneration, parse_response
from bireme.server.settings import ServerSettings
from bireme.server.telemetry import Tracing
from bireme.server.tokenizer import Tokenizer
from bireme.server.tokens import parse_detokenize, parse_tokenize
from bireme.server.wording import clipped, shown, without_folders
from bireme.types import Request as EngineRequest
from bireme.types import SamplingParams
from bireme.validation import check_request

logger = logging.getLogger(__name__)

INLINE_BYTES = 2048
"""A shorter body is parsed and tokenized on the spot: that costs less than the way to a thread and back."""

BODY_SECONDS = 60.0
"""What a client gets to send its body."""

_JSON_TYPES = ("application/json", "text/json")

Prepared = TypeVar("Prepared")


class Service:
    """What the routes share.

    Attributes:
        is_leaving: set when the server shuts down; new calls are then refused.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        settings: ServerSettings,
        tracing: Tracing | None = None,
    ) -> None:
        self.client = client
        self.settings = settings
        self.metrics = Metrics(client, settings.served_model_names[0])
        self.queue = TokenQueue(settings)
        self.is_leaving = False
        self.created = int(time.time())
        self._tracing = tracing
        self._tokenizer = tokenizer
        self._template = template
        self._config = client.engine.config
        self._pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="tokenize")
        self._fingerprint = f"bireme-{__version__}-tp{self._config.parallel.tp_size}"
        facts = {
            "model": settings.served_model_names[0],
            "version": __version__,
            "tp_size": self._config.parallel.tp_size,
            "device": self._config.device,
            "dtype": self._config.dtype,
        }
        self.live = Live(client, self.metrics, facts, self.state)

    def state(self) -> str:
        """What a person would say of it: serving, loading, draining or dead."""
        if self.client.error is not None:
            return "dead"
        if self.client.capacity is None:
            return "loading"
        return "serving" if self.client.is_ready and not self.is_leaving else "draining"

    def require_healthy(self) -> None:
        """Raise ApiError 503 while the engine loads, and once it is dead."""
        client = self.client
        if client.error is not None:
            raise ApiError(503, f"the engine is dead: {without_folders(client.error)}", code="engine_dead")
        if client.capacity is None:
            raise ApiError(503, "the model is still loading", code="loading", headers={"retry-after": "1"})

    def require_ready(self) -> None:
        """Raise ApiError 503 unless a call that comes now would be served: as above, and while the server drains."""
        self.require_healthy()
        if self.is_leaving or not self.client.is_ready:
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    def served_name(self, model: str | None) -> str:
        """The name that a response carries; ApiError 404 for a model that is not served."""
        names = self.settings.served_model_names
        if model is None:
            return names[0]
        if model not in names:
            raise ApiError(
                404,
                f"the model {shown(model)} is not served here; served: {', '.join(names)}",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        return model

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, self._completion_job)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, self._chat_job)

    async def respond(self, request: Request) -> Response:
        """POST /v1/responses."""
        return await self._generate(request, self._response_job)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        return _json(await self._prepared(request, self._tokenized))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        return _json(await self._prepared(request, self._detokenized))

    async def _generate(self, request: Request, prepare: Callable[[bytes, float], Job]) -> Response:
        most = self._config.scheduler.max_waiting
        if self.client.stats.num_waiting >= most:
            # The engine decides; this saves the work on a call that it would refuse.
            raise queue_full(f"{most} requests wait already (--max-waiting)", self.settings.retry_after)
        job = await self._prepared(request, prepare)
        self.require_ready()
        if job.call.user is not None:
            logger.info("%s: user %s", job.call_id, shown(job.call.user))
        common = (self.client, self.metrics, self.queue, job, self._fingerprint, self.settings, self._tracing)
        return Generation(*common) if job.repeated is None else ResponseGeneration(*common, job.repeated)

    async def _prepared(self, request: Request, prepare: Callable[[bytes, float], Prepared]) -> Prepared:
        """What ``prepare`` makes of the body and the time it arrived; a long body has a thread of its own for that."""
        arrived = time.monotonic()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await read_body(request, self.settings.max_body_bytes)
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {BODY_SECONDS:g} s", code="timeout") from None
        self.require_ready()
        if len(body) <= INLINE_BYTES:
            return prepare(body, arrived)
        return await asyncio.get_running_loop().run_in_executor(self._pool, prepare, body, arrived)

    def _completion_job(self, body: bytes, arrived: float) -> Job:
        call = parse_completion(body, self._config.generation)
        model = self.served_name(call.model)
        self._check_sequences(len(call.prompts), call.n, "prompt")
        job = Job(call, f"cmpl-{uuid.uuid4().hex}", model, "text_completion", "text_completion", arrived)
        for prompt in call.prompts:
            text: str | None = None
            if isinstance(prompt, str):
                text = prompt
                token_ids = self._tokenizer.encode(prompt, add_special_tokens=call.add_special_tokens)
            else:
                token_ids = prompt
            for params in self._add_requests(job, token_ids):
                index = len(job.answers)
                job.answers.append(CompletionAnswer(index, call, self._tokenizer, params, token_ids, text))
        return job

    def _chat_job(self, body: bytes, arrived: float) -> Job:
        call = parse_chat(body, self._config.generation)
        return self._job_of_chat(call, f"chatcmpl-{uuid.uuid4().hex}", arrived)

    def _response_job(self, body: bytes, arrived: float) -> Job:
        call = parse_response(body, self._config.generation)
        job = self._job_of_chat(call.chat, f"resp_{uuid.uuid4().hex}", arrived)
        job.repeated = call.repeated
        return job

    def _job_of_chat(self, call: ChatCall, call_id: str, arrived: float) -> Job:
        model = self.served_name(call.model)
        self._check_sequences(1, call.n, "n")
        prompt, token_ids = self._render(call)
        call = msgspec.structs.replace(call, params=after_thought(call.params, prompt))
        job = Job(call, call_id, model, "chat.completion", "chat.completion.chunk", arrived)
        for params in self._add_requests(job, token_ids):
            job.answers.append(ChatAnswer(len(job.answers), call, self._tokenizer, params, token_ids, prompt))
        return job

    def _render(self, call: ChatCall) -> tuple[str, list[int]]:
        """The prompt that the template makes of a conversation, as text and as ids."""
        if self._template is None:
            raise InvalidRequestError("the model has no chat template: use /v1/completions", "messages")
        if call.tools and not self._template.takes_tools:
            raise InvalidRequestError("the model's chat template does not know tools", "tools")
        prompt = self._template.render(
            call.messages,
            tools=call.tools,
            add_generation_prompt=call.add_generation_prompt,
            **call.template_variables,
        )
        return prompt, self._tokenizer.encode(prompt, add_special_tokens=False)

    def _tokenized(self, body: bytes, arrived: float) -> dict[str, object]:
        call = parse_tokenize(body)
        self.served_name(call.model)
        if call.chat is not None:
            token_ids = self._render(call.chat)[1]
        else:
            token_ids = self._tokenizer.encode(call.prompt or "", add_special_tokens=call.add_special_tokens)
        capacity = self.client.capacity
        assert capacity is not None, "require_ready has passed"
        texts = [self._tokenizer.token_text(token_id) for token_id in token_ids] if call.wants_texts else None
        return {
            "count": len(token_ids),
            "max_model_len": capacity.max_model_len,
            "tokens": token_ids,
            "token_strs": texts,
        }

    def _detokenized(self, body: bytes, arrived: float) -> dict[str, object]:
        call = parse_detokenize(body, self._config.model.vocab_size)
        self.served_name(call.model)
        return {"prompt": self._tokenizer.decode(call.token_ids, skip_special_tokens=False)}

    def _check_sequences(self, num_prompts: int, n: int, param: str) -> None:
        most = self.settings.max_sequences
        if num_prompts * n > most:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n {n} are {num_prompts * n} answers: at most {most} at once "
                "(--max-sequences)",
                param,
            )

    def _add_requests(self, job: Job, token_ids: list[int]) -> Iterator[SamplingParams]:
        """Add the n requests of one prompt; yields the parameters of each."""
        capacity = self.client.capacity
        assert capacity is not None, "require_ready has passed"
        for index in range(job.call.n):
            params = job.call.params_for(len(token_ids), index, capacity)
            request = EngineRequest(f"{job.call_id}-{len(job.requests)}", token_ids, params, time.time())
            if index == 0:
                check_request(request, self._config.model.vocab_size, capacity)
            job.requests.append(request)
            yield params


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    settings: ServerSettings,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The application. ``app.state.service`` holds what its routes share; without ``template`` it does not chat."""
    service = Service(client, tokenizer, template, settings, tracing)
    app = FastAPI(title="Bireme", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    metrics = service.metrics

    def failure(error: ApiError) -> Response:
        metrics.http_errors[error.status] += 1
        return Response(
            encode(error_object(error.body)), error.status, {**error.headers, "content-type": "application/json"}
        )

    def body_of(path: str) -> dict[str, object]:
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": body_schema(path)}}}}

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return failure(error)

    @app.exception_handler(InvalidRequestError)
    async def on_invalid_request(request: Request, error: InvalidRequestError) -> Response:
        return failure(ApiError(400, str(error), param=error.param))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {clipped(request.url.path)}: {error.detail}"
        kind = "not_found_error" if error.status_code == 404 else None
        return failure(ApiError(error.status_code, message, kind=kind, headers=dict(error.headers or {})))

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        metrics.num_disconnects += 1
        return Response(status_code=400)

    @app.exception_handler(Exception)
    async def on_defect(request: Request, error: Exception) -> Response:
        return failure(ApiError(500, "the server made an error; its log says more"))

    @app.post("/v1/completions", openapi_extra=body_of("/v1/completions"))
    async def completions(request: Request) -> Response:
        return await service.complete(request)

    @app.post("/v1/chat/completions", openapi_extra=body_of("/v1/chat/completions"))
    async def chat_completions(request: Request) -> Response:
        return await service.chat(request)

    @app.post("/v1/responses", openapi_extra=body_of("/v1/responses"))
    async def responses(request: Request) -> Response:
        return await service.respond(request)

    @app.post("/tokenize", openapi_extra=body_of("/tokenize"))
    async def tokenize(request: Request) -> Response:
        return await service.tokenize(request)

    @app.post("/detokenize", openapi_extra=body_of("/detokenize"))
    async def detokenize(request: Request) -> Response:
        return await service.detokenize(request)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(service, name) for name in settings.served_model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(_model(service, service.served_name(name)))

    @app.get("/health")
    async def health() -> Response:
        service.require_healthy()
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        service.require_ready()
        return _json({"status": "ready"})

    @app.get("/live")
    async def live() -> Response:
        return service.live.response()

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    if settings.page:
        add_page(app)
    return app


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request, at most ``limit`` bytes.

    Raises:
        ApiError: 413 for a larger one; 415 for one that says it is no JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind not in _JSON_TYPES:
        raise ApiError(415, f"the body is of type {shown(kind)}: it must be application/json")
    too_large = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _model(service: Service, name: str) -> dict[str, object]:
    names = service.settings.served_model_names
    capacity = service.client.capacity
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "bireme",
        "root": names[0],
        "parent": None,
        "max_model_len": None if capacity is None else capacity.max_model_len,
    }


def _json(value: object) -> Response:
    return Response(encode(value), headers={"content-type": "application/json"})
