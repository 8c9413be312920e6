"""Prometheus's families as OpenTelemetry's metrics."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import inf

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from firsttoken.observability.otlp.genai import PROVIDER
from firsttoken.observability.otlp.wire import Family, Metrics

_NAMES = {
    "gen_ai_server_request_duration_seconds": "gen_ai.server.request.duration",
    "gen_ai_server_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
    "gen_ai_server_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
}
_ATTRIBUTES = {"operation": "gen_ai.operation.name", "model": "gen_ai.request.model", "error_type": "error.type"}
_UNITS = {"_seconds": "s", "_bytes": "By"}
_CUMULATIVE = AggregationTemporality.CUMULATIVE


def metrics_data(message: Metrics, resource: Resource, scope: InstrumentationScope) -> MetricsData:
    """All of ``message`` as one export."""
    metrics = [made for family in message.families if (made := _metric(family, message)) is not None]
    scoped = ScopeMetrics(scope=scope, metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource=resource, scope_metrics=[scoped], schema_url=resource.schema_url)])


def _metric(family: Family, message: Metrics) -> Metric | None:
    name = _NAMES.get(family.name, family.name)
    unit = next((unit for ending, unit in _UNITS.items() if family.name.endswith(ending)), "1")
    data: Sum | Gauge | Histogram
    if family.kind == "histogram":
        points = list(_histograms(family, message, genai=name != family.name))
        data = Histogram(points, _CUMULATIVE)
    elif family.kind == "counter":
        data = Sum(_numbers(family, message, "_total"), _CUMULATIVE, is_monotonic=True)
    elif family.kind in ("gauge", "info"):
        data = Gauge(_numbers(family, message, "_info" if family.kind == "info" else ""))
    else:
        return None
    if not data.data_points:
        return None
    return Metric(name=name, description=family.text, unit=unit, data=data)


def _numbers(family: Family, message: Metrics, suffix: str) -> list[NumberDataPoint]:
    return [
        NumberDataPoint(labels, message.since_unix_ns, message.unix_ns, value)
        for name, labels, value in family.samples
        if name == family.name + suffix
    ]


def _histograms(family: Family, message: Metrics, *, genai: bool) -> Iterable[HistogramDataPoint]:
    """Prometheus's buckets count all below an edge, OpenTelemetry's those between two."""
    edges: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for name, labels, value in family.samples:
        key = tuple((label, one) for label, one in labels.items() if label != "le")
        if name.endswith("_bucket"):
            edges.setdefault(key, []).append((float(labels["le"]), value))
        elif name.endswith("_sum"):
            sums[key] = value
    for key, found in edges.items():
        ascending = sorted(found)
        below = [0.0, *(count for _, count in ascending)]
        yield HistogramDataPoint(
            attributes=_attributes(key) if genai else dict(key),
            start_time_unix_nano=message.since_unix_ns,
            time_unix_nano=message.unix_ns,
            count=int(below[-1]),
            sum=sums.get(key, 0.0),
            bucket_counts=[int(after - before) for before, after in pairwise(below)],
            explicit_bounds=[edge for edge, _ in ascending if edge != inf],
            min=None,  # type: ignore[arg-type]  # not known; the encoder leaves it out
            max=None,  # type: ignore[arg-type]
        )


def _attributes(labels: Iterable[tuple[str, str]]) -> dict[str, str]:
    named = {_ATTRIBUTES.get(label, f"firsttoken.{label}"): value for label, value in labels if value}
    return {"gen_ai.provider.name": PROVIDER} | named
