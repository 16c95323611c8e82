"""A span for each request, to an OpenTelemetry collector. The SDK is imported only where an endpoint is set."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from ... import __version__
from ..generation.timing import Timing
from .request_log import Finished

EXPORT_SECONDS = 5.0  # longest that a collector which does not answer may hold up the end of the process


class Tracer:
    """Spans are made when a request is over, and sent by a thread of the SDK: no request waits for the collector."""

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        name = os.environ.get("OTEL_SERVICE_NAME", "vserve")
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=1000 * EXPORT_SECONDS))
        self._tracer = self._provider.get_tracer("vserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def finished(self, request: Finished) -> None:
        if request.method != "POST":
            return
        from opentelemetry.trace import SpanKind, StatusCode

        # W3C trace context: the span continues the caller's trace
        carrier = {
            name: value.decode("latin-1")
            for name in ("traceparent", "tracestate")
            if (value := request.headers.get(name.encode())) is not None
        }
        start = int(request.started * 1e9)
        span = self._tracer.start_span(
            "llm_request" if request.generation is not None else f"POST {request.route}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            self._attributes(request),
            start_time=start,
        )
        if request.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(start + int(request.seconds * 1e9))

    def _attributes(self, request: Finished) -> dict[str, str | int | float]:
        attributes: dict[str, str | int | float | None] = {
            "http.request.method": request.method,
            "http.route": request.route,
            "http.response.status_code": request.status,
            "client.address": request.client,
            "gen_ai.request.id": request.id,
        }
        if (generation := request.generation) is not None:
            timing, sampling = Timing.of(generation), generation.prompts[0].sampling
            attributes |= {
                "gen_ai.request.n": generation.n,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.response.model": self._model,
                "gen_ai.usage.prompt_tokens": timing.prompt_tokens,
                "gen_ai.usage.completion_tokens": timing.completion_tokens,
                "gen_ai.usage.num_sequences": len(generation.choices),
                "gen_ai.latency.time_in_queue": timing.queue,
                "gen_ai.latency.time_to_first_token": timing.ttft,
                "gen_ai.latency.e2e": request.seconds,
                "gen_ai.latency.time_in_model_prefill": timing.prefill,
                "gen_ai.latency.time_in_model_decode": timing.decode,
                "gen_ai.latency.time_in_model_inference": timing.inference,
                "gen_ai.response.finish_reason": ",".join(timing.finish_reasons),
            }
        return {name: value for name, value in attributes.items() if value is not None}

    def close(self) -> None:
        """Sends what is left. Blocks, at most a few seconds."""
        self._provider.shutdown()
