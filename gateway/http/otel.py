"""Spans to an OpenTelemetry collector over OTLP/HTTP, by the official SDK, an optional package (``[otel]``)."""

from __future__ import annotations

import structlog

from gateway.http.request_trace import RequestSpan, SpanExporter

__all__ = ["OtlpExporter", "open_exporter"]

log = structlog.get_logger("gateway")

_TIMEOUT_S = 5


def open_exporter(endpoint: str, *, version: str) -> SpanExporter | None:
    """The exporter for this address; None without one, or if the SDK is not installed (the log says so).

    Serving goes on without traces: they are for those who watch, not for those who are served.
    """
    if not endpoint:
        return None
    try:
        return OtlpExporter(endpoint, version=version)
    except ImportError as error:
        log.error(
            "gateway.otlp_endpoint is set but no traces are sent: a package is missing",
            missing=error.name,
            remedy="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
        )
        return None


class OtlpExporter:
    """Batches spans in a thread of the SDK's own.

    Args:
        endpoint: the collector's address for traces, e.g. ``http://127.0.0.1:4318/v1/traces``.

    Raises:
        ImportError: the SDK or its exporter is not installed.
    """

    def __init__(self, endpoint: str, *, version: str) -> None:
        # Lazy: an optional package.
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._api = trace
        resource = Resource.create({"service.name": "breakeven", "service.version": version})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("breakeven", version)

    def export(self, span: RequestSpan) -> None:
        """See SpanExporter.export."""
        api, context = self._api, None
        if span.parent is not None:
            parent = api.SpanContext(
                trace_id=span.parent.trace_id,
                span_id=span.parent.span_id,
                is_remote=True,
                trace_flags=api.TraceFlags(int(span.parent.is_sampled)),
                trace_state=api.TraceState.from_header([span.parent.state]),
            )
            context = api.set_span_in_context(api.NonRecordingSpan(parent))
        started = self._tracer.start_span(
            span.name,
            context=context,
            kind=api.SpanKind.SERVER,
            attributes=dict(span.attributes),
            start_time=span.begin_ns,
        )
        if span.is_error:
            started.set_status(api.StatusCode.ERROR)
        started.end(span.end_ns)

    def close(self) -> None:
        """See SpanExporter.close."""
        self._provider.shutdown()
