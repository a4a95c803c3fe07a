"""A span for each generating call, sent to an OpenTelemetry collector by a thread of its own (``pip install
'bireme[otel]'``)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bireme import __version__
from bireme.errors import ConfigError
from bireme.server.wording import clipped, shown

if TYPE_CHECKING:
    from bireme.server.generation import Job
    from bireme.server.metrics import Timing

EXPORT_SECONDS = 5.0
"""What a collector gets to take a batch, and shutdown to hand over the last one."""

_CONTEXT_HEADERS = (b"traceparent", b"tracestate")


class Tracing:
    """Makes spans of calls that have ended and sends them in batches; none of it waits for the collector.

    What OpenTelemetry's own environment variables say of sampling, headers and the service's name holds.

    Args:
        endpoint: the collector's address for traces, over HTTP with protobuf.

    Raises:
        ConfigError: the endpoint is no HTTP address, or OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
            raise ConfigError(
                f"--otlp-traces-endpoint is {shown(endpoint)}: it must be an address such as "
                "http://127.0.0.1:4318/v1/traces"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'bireme[otel]'"
            ) from error
        name = os.environ.get("OTEL_SERVICE_NAME", "bireme")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("bireme", __version__)
        self._context_of = TraceContextTextMapPropagator().extract
        self._kind = SpanKind.SERVER
        self._failed = StatusCode.ERROR

    def record(
        self,
        job: Job,
        headers: Iterable[tuple[bytes, bytes]],
        timings: Sequence[Timing],
        error: tuple[int, str] | None,
    ) -> None:
        """A call has ended.

        Args:
            headers: the call's own; the span continues the trace that they name.
            timings: of its requests.
            error: the status and the message that ended it before its time.
        """
        seconds = time.monotonic() - job.arrived
        ended = time.time_ns()
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _CONTEXT_HEADERS}
        attributes = _attributes(job, timings, seconds)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {job.model}",
            self._context_of(carrier),
            self._kind,
            attributes,
            start_time=ended - round(seconds * 1e9),
        )
        if error is not None:
            status, message = error
            span.set_attribute("http.response.status_code", status)
            span.set_attribute("error.type", str(status))
            span.set_status(self._failed, clipped(message))
        span.end(ended)

    def close(self) -> None:
        """Hand over what has not been sent, as far as the collector takes it."""
        self._provider.shutdown()


def _attributes(job: Job, timings: Sequence[Timing], seconds: float) -> dict[str, Any]:
    """OpenTelemetry's names for generative models; and vLLM's, which are older, where they differ."""
    params = job.requests[0].params
    answers = job.answers
    num_prompt = sum(answer.num_prompt_tokens for answer in answers[:: job.call.n])
    num_output = sum(answer.num_tokens for answer in answers)
    firsts = [timing.first_token_seconds for timing in timings if timing.first_token_seconds is not None]
    found: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if job.is_chat else "text_completion",
        "gen_ai.request.id": job.call_id,
        "gen_ai.request.model": job.model,
        "gen_ai.request.n": job.call.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.response.id": job.call_id,
        "gen_ai.response.model": job.model,
        "gen_ai.response.finish_reasons": [
            "none" if answer.finish_reason is None else answer.finish_reason.value for answer in answers
        ],
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.num_sequences": len(answers),
        "gen_ai.latency.e2e": seconds,
    }
    if firsts:
        found["gen_ai.latency.time_to_first_token"] = min(firsts)
        found["gen_ai.latency.time_in_queue"] = max(timing.queue_seconds for timing in timings)
    return {name: value for name, value in found.items() if value is not None}
