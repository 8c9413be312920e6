"""A model server's metrics by OpenTelemetry's conventions for generative AI, observed only where they are exported.

Their names here are Prometheus's; `metric_data` gives them OpenTelemetry's."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from firsttoken.core.clock import NS_PER_S
from firsttoken.observability.histogram import Histograms
from firsttoken.observability.recent import EndedRequest

PROVIDER = "firsttoken"

# The conventions' advice.
# fmt: off
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# fmt: on
# A gap of a GPU's decode step is well below the advice's first edge.
_FINE = (0.001, 0.002, 0.003, 0.005, 0.0075)

_LABELS = ("operation", "model", "service_class")


def operation(route: str) -> str:
    """The conventions' name for what a route does."""
    return "chat" if route.endswith("/chat/completions") else "text_completion"


def error_type(outcome: str, error: str, status: int) -> str:
    """A word for the error that a request ended with; "" for none."""
    if outcome == "finished":
        return ""
    if outcome == "aborted":
        return error or "client_disconnected"
    return error or (str(status) if status >= 400 else outcome)


class GenAIMetrics(Collector):
    """``gen_ai.server.*``. One thread observes, any may collect."""

    def __init__(self) -> None:
        self._duration = Histograms(
            "gen_ai_server_request_duration_seconds",
            "From a request's first byte to its last token or byte (s)",
            [*_LABELS, "error_type"],
            _DURATION,
        )
        self._per_token = Histograms(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean gap between a request's tokens (s)",
            _LABELS,
            _FINE + _PER_TOKEN,
        )
        self._first_token = Histograms(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's first byte to its first token (s)",
            _LABELS,
            _FIRST_TOKEN,
        )

    def observe(self, ended: EndedRequest) -> None:
        labels = (operation(ended.route), ended.model, ended.service_class)
        error = error_type(ended.outcome, ended.error, ended.status)
        self._duration.of(*labels, error).observe((ended.ended_ns - ended.received_ns) / NS_PER_S)
        if ended.outcome != "finished":
            return
        if ended.ttft_ns is not None:
            self._first_token.of(*labels).observe(ended.ttft_ns / NS_PER_S)
        times = ended.token_times
        if len(times) > 1:
            self._per_token.of(*labels).observe((times[-1] - times[0]) / (len(times) - 1) / NS_PER_S)

    def collect(self) -> Iterator[Metric]:
        yield from (self._duration.family(), self._per_token.family(), self._first_token.family())
