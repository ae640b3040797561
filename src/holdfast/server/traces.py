"""Spans of what a keeper does, through OpenTelemetry's API.

Without an SDK that somebody configured there is nobody to tell, and `span` is the same empty context each time: it costs
one call. With one, each request is a span `holdfast.<op>` with the attributes `holdfast.op`, `holdfast.space`,
`holdfast.correlation_id` and, at its end, `holdfast.outcome`: "ok" or the error's code. Messages of errors are not in it,
since they may quote what was asked. `carrier` are the headers of a request; a `traceparent` among them is continued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from opentelemetry import propagate, trace

from holdfast.errors import Error

NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class Traces:
    """Makes spans, if there is somebody to tell at the time it is made. `provider` is OpenTelemetry's own unless given."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        found = provider or trace.get_tracer_provider()
        silent = isinstance(found, trace.ProxyTracerProvider | trace.NoOpTracerProvider)
        self._tracer = None if silent else found.get_tracer("holdfast.keeper")
        self.enabled = not silent
        """Where every nanosecond counts, ask this before making a span."""

    def span(
        self,
        op: str,
        space: str | None = None,
        correlation_id: str | None = None,
        carrier: Mapping[str, str] | None = None,
    ) -> AbstractContextManager[None]:
        """A span around one request: `with traces.span("commit", "contoso"):`."""
        if self._tracer is None:
            return NOTHING
        return self._recorded(self._tracer, op, space, correlation_id, carrier)

    @contextmanager
    def _recorded(
        self,
        tracer: trace.Tracer,
        op: str,
        space: str | None,
        correlation_id: str | None,
        carrier: Mapping[str, str] | None,
    ) -> Iterator[None]:
        attributes = {"holdfast.op": op, "holdfast.space": space, "holdfast.correlation_id": correlation_id}
        with tracer.start_as_current_span(
            f"holdfast.{op}",
            context=propagate.extract(carrier) if carrier else None,
            kind=trace.SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except BaseException as exc:
                code = exc.code if isinstance(exc, Error) else type(exc).__name__
                span.set_attribute("holdfast.outcome", code)
                span.set_status(trace.Status(trace.StatusCode.ERROR, code))
                raise
            span.set_attribute("holdfast.outcome", "ok")
