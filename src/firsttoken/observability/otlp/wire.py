"""The messages between the serving process and the one that exports (msgpack, in the frames of `transport.framing`)."""

from __future__ import annotations

from typing import Any

import msgspec

# ---------------------------------------------------------------- to the exporter


class RequestRecord(msgspec.Struct, frozen=True, array_like=True):
    """What spans are made of: an `observability.recent.EndedRequest` without the times of its tokens."""

    id: str
    response_id: str
    route: str
    model: str
    outcome: str
    status: int
    error: str
    finish_reason: str | None
    service_class: str
    answers: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    received_unix_ns: int
    received_ns: int
    ended_ns: int
    ttft_ns: int | None
    timeline: tuple[tuple[int, int], ...]
    account: dict[str, Any]
    traceparent: str
    tracestate: str


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric as Prometheus knows it: ``kind`` is its type, a sample its name, labels and value."""

    name: str
    kind: str
    text: str
    samples: list[tuple[str, dict[str, str], float]]


class Requests(msgspec.Struct, frozen=True, tag="requests"):
    records: list[RequestRecord]


class Metrics(msgspec.Struct, frozen=True, tag="metrics"):
    """All series as of ``unix_ns``; totals count from ``since_unix_ns``."""

    families: list[Family]
    unix_ns: int
    since_unix_ns: int


ToExporter = Requests | Metrics

# -------------------------------------------------------------- from the exporter


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Running totals. ``last_error`` is why the last export that failed did, "" once one went well after it."""

    spans: int = 0
    spans_failed: int = 0
    requests_dropped: int = 0
    metrics: int = 0
    metrics_failed: int = 0
    last_error: str = ""


ENCODER = msgspec.msgpack.Encoder()
TO_EXPORTER = msgspec.msgpack.Decoder(ToExporter)
FROM_EXPORTER = msgspec.msgpack.Decoder(Report)
