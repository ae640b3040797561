"""Spans: one a request, with what was asked and how it ended, and nothing at all when nobody listens."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode

from holdfast.errors import QuotaExceeded
from holdfast.server.traces import NOTHING, Traces


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> Traces:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Traces(provider)


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    [span] = exporter.get_finished_spans()
    return span


def test_a_request_is_a_span_with_what_was_asked(traces: Traces, exporter: InMemorySpanExporter) -> None:
    with traces.span("commit", "contoso", "c-1"):
        assert exporter.get_finished_spans() == ()
    span = only(exporter)
    assert (span.name, span.kind) == ("holdfast.commit", SpanKind.SERVER)
    assert dict(span.attributes or {}) == {
        "holdfast.op": "commit",
        "holdfast.space": "contoso",
        "holdfast.correlation_id": "c-1",
        "holdfast.outcome": "ok",
    }
    assert span.status.status_code is StatusCode.UNSET


def test_what_is_not_known_is_left_out(traces: Traces, exporter: InMemorySpanExporter) -> None:
    with traces.span("ping"):
        pass
    assert dict(only(exporter).attributes or {}) == {"holdfast.op": "ping", "holdfast.outcome": "ok"}


@pytest.mark.parametrize(
    ("failure", "outcome"), [(QuotaExceeded("s3cret"), "quota_exceeded"), (KeyError("s3cret"), "KeyError")]
)
def test_a_failure_is_told_by_its_code_alone(
    traces: Traces, exporter: InMemorySpanExporter, failure: Exception, outcome: str
) -> None:
    with pytest.raises(type(failure)), traces.span("commit"):
        raise failure
    span = only(exporter)
    assert (span.attributes or {})["holdfast.outcome"] == outcome
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, outcome)
    assert "s3cret" not in span.to_json()


def test_a_trace_that_a_client_began_goes_on(traces: Traces, exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with traces.span("get", carrier=headers):
        pass
    span = only(exporter)
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-0", "\0" * 100])
def test_a_bad_header_begins_a_trace_of_its_own(
    traces: Traces, exporter: InMemorySpanExporter, traceparent: str
) -> None:
    with traces.span("get", carrier={"traceparent": traceparent}):
        pass
    assert only(exporter).parent is None


@pytest.mark.parametrize("traces", [Traces(), Traces(NoOpTracerProvider())], ids=["no SDK", "no-op"])
def test_without_somebody_to_tell_nothing_is_made(traces: Traces) -> None:
    assert not traces.enabled
    span = traces.span("commit", "contoso", "c-1", {"traceparent": "x"})
    assert span is NOTHING
    with span, traces.span("get"):
        pass
    with pytest.raises(ZeroDivisionError), span:
        raise ZeroDivisionError
