"""One server span for a request, a child for each stage that it passed, at their real times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from firsttoken.observability.account import intervals
from firsttoken.observability.otlp.genai import PROVIDER, error_type, operation
from firsttoken.observability.otlp.wire import RequestRecord

FIRST_TOKEN = "gen_ai.first_token"  # noqa: S105  # an event's name

_PROPAGATOR = TraceContextTextMapPropagator()
# Both ways between the two processes are the stage "transport".
_DIRECTION = {"to_engine": "to the engine", "from_engine": "from the engine"}


def record_request(tracer: Tracer, record: RequestRecord) -> None:
    """Start and end the spans of ``record`` with ``tracer``, under its caller's span where he names a valid one."""
    offset = record.received_unix_ns - record.received_ns
    span = tracer.start_span(
        f"{operation(record.route)} {record.model}",
        context=_parent(record),
        kind=SpanKind.SERVER,
        attributes=dict(_attributes(record)),
        start_time=record.received_unix_ns,
    )
    if span.is_recording():
        _stages(tracer, span, record, offset)
        if record.ttft_ns is not None:
            span.add_event(
                FIRST_TOKEN,
                {"gen_ai.server.time_to_first_token": record.ttft_ns / 1e9},
                timestamp=record.received_unix_ns + record.ttft_ns,
            )
        error = error_type(record.outcome, record.error, record.status)
        if record.outcome in ("failed", "expired") or record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, error))
    span.end(offset + record.ended_ns)


def _parent(record: RequestRecord) -> Context | None:
    """The caller's context. One that is malformed is ignored, as W3C's Trace Context demands."""
    if not record.traceparent:
        return Context()
    carrier = {"traceparent": record.traceparent, "tracestate": record.tracestate}
    return _PROPAGATOR.extract(carrier, context=Context())


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.operation.name", operation(record.route)
    yield "gen_ai.provider.name", PROVIDER
    yield "gen_ai.request.model", record.model
    yield "gen_ai.response.model", record.model
    yield "gen_ai.usage.input_tokens", record.prompt_tokens
    yield "gen_ai.usage.output_tokens", record.output_tokens
    yield "gen_ai.usage.cache_read.input_tokens", record.cached_tokens
    if record.response_id:
        yield "gen_ai.response.id", record.response_id
    if record.finish_reason is not None:
        yield "gen_ai.response.finish_reasons", (record.finish_reason,)
    if record.answers > 1:
        yield "gen_ai.request.choice.count", record.answers
    if record.status:
        yield "http.request.method", "POST"
        yield "http.route", record.route
        yield "http.response.status_code", record.status
    if error := error_type(record.outcome, record.error, record.status):
        yield "error.type", error
    yield "firsttoken.request.id", record.id
    yield "firsttoken.outcome", record.outcome
    if record.service_class:
        yield "firsttoken.service_class", record.service_class
    yield "firsttoken.preemptions", record.account.get("preemptions", 0)
    yield "firsttoken.unaccounted_ms", record.account.get("unaccounted_ms", 0.0)


def _stages(tracer: Tracer, parent: Span, record: RequestRecord, offset: int) -> None:
    """The children. They follow one another without gaps, as the account's stages do."""
    context = set_span_in_context(parent, Context())
    told: set[str] = set()
    for stage, begin, end in intervals(record.timeline, record.ended_ns):
        if end <= begin:
            continue
        name = stage.removesuffix("_ms")
        attributes: dict[str, Any] = {}
        if name in _DIRECTION:
            attributes["firsttoken.direction"] = _DIRECTION[name]
            name = "transport"
        elif name not in told:  # the account's figures are those of all visits: the first bears them
            told.add(name)
            attributes |= dict(_of_stage(name, record.account))
        child = tracer.start_span(name, context=context, attributes=attributes, start_time=offset + begin)
        child.end(offset + end)


def _of_stage(stage: str, account: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if stage == "queue":
        for reason, waited in (account.get("queue_reasons") or {}).items():
            if waited:
                yield f"firsttoken.queue.{reason}_ms", waited
    elif stage == "prefill":
        for tier, tokens in (account.get("cached_tokens") or {}).items():
            yield f"firsttoken.cached_tokens.{tier}", tokens
        if miss := account.get("miss"):
            yield "firsttoken.cache_miss.position", miss["position"]
            yield "firsttoken.cache_miss.reason", miss["reason"]
        yield from _given(account, "prefill_steps")
    elif stage == "decode":
        yield from _given(account, "decode_steps")
        for level, gap in (account.get("itl_ms") or {}).items():
            yield f"firsttoken.itl_ms.{level}", gap
        for name, value in (account.get("worst_gap") or {}).items():
            if isinstance(value, str | int | float):
                yield f"firsttoken.worst_gap.{name}", value


def _given(account: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    if account.get(name) is not None:
        yield f"firsttoken.{name}", account[name]
