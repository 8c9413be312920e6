"""The process that exports: ``python -m firsttoken.observability.otlp.process FD LEVEL FORMAT``.

Started by `export`, not by hand. It reads what the serving process sends, at once and whatever the collector does; one
thread makes spans and sends them, one sends metrics. It ends with its socket, after what is left or `FLUSH_S`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import msgspec
from opentelemetry.sdk.environment_variables import OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from firsttoken.observability.logging import setup_logging
from firsttoken.observability.otlp.metric_data import metrics_data
from firsttoken.observability.otlp.settings import OtlpSettings
from firsttoken.observability.otlp.spans import record_request
from firsttoken.observability.otlp.wire import ENCODER, TO_EXPORTER, Metrics, Report, RequestRecord, Requests
from firsttoken.transport.framing import FrameReader, frame
from firsttoken.version import __version__

SCOPE = "firsttoken"
QUEUE_REQUESTS = 8192
# A request is about ten spans.
BATCH_SPANS = 512
FLUSH_S = 2.0
_REPORT_EVERY_S = 0.2
# Serving comes first where processors are short.
_NICENESS = 10


class Collected(SpanProcessor):
    """Keeps the spans that have ended until they are taken."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def take(self) -> list[ReadableSpan]:
        taken, self.spans = self.spans, []
        return taken


class LastError(logging.Handler):
    """The latest of the SDK's complaints to a thread, which say why its export failed. It makes one for each attempt,
    with the cause, and a last one that it gives up, often without."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        if record.levelno < logging.ERROR:
            self._said.cause = _cause(arguments[0]) if arguments else ""
            self._said.last = self._said.cause or record.getMessage()
            return
        self._said.last = record.getMessage()
        cause = next((_cause(one) for one in arguments if isinstance(one, Exception)), self._told("cause"))
        if cause and cause not in self._said.last:
            self._said.last += f" The cause: {cause}"

    def forget(self) -> None:
        self._said.cause = self._said.last = ""

    @property
    def text(self) -> str:
        return self._told("last")[:300]

    def _told(self, name: str) -> str:
        return str(getattr(self._said, name, ""))


def _cause(error: object) -> str:
    """The system's own words at the bottom of what libraries wrapped around them."""
    while isinstance(error, Exception):
        inner = getattr(error, "reason", None) or error.__cause__ or error.__context__ or next(iter(error.args), None)
        if not isinstance(inner, Exception) or inner is error:
            return str(getattr(error, "strerror", None) or error)
        error = inner
    return str(error)


class Exporting:
    """The two threads and what they share with the reader."""

    def __init__(self, settings: OtlpSettings, errors: LastError) -> None:
        self._settings = settings
        self._errors = errors
        self._resource = resource()
        self._collected = Collected()
        self._provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._collected)
        self._tracer = self._provider.get_tracer(SCOPE, __version__)
        self._queue: deque[RequestRecord] = deque()
        self._metrics: Metrics | None = None
        self._wake_spans, self._wake_metrics = threading.Event(), threading.Event()
        self._ending = False
        self._spans = self._spans_failed = self._dropped = self._metrics_sent = self._metrics_failed = 0
        self._last_error: dict[str, str] = {}
        self._threads = [
            threading.Thread(target=run, name=f"firsttoken-otlp-{name}", daemon=True)
            for name, run, wanted in (
                ("spans", self._run_spans, settings.traces),
                ("metrics", self._run_metrics, settings.metrics),
            )
            if wanted
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def take(self, message: Requests | Metrics) -> None:
        if isinstance(message, Metrics):
            self._metrics = message
            self._wake_metrics.set()
            return
        room = max(QUEUE_REQUESTS - len(self._queue), 0)
        self._dropped += max(len(message.records) - room, 0)
        self._queue += message.records[:room]
        if len(self._queue) * 10 >= BATCH_SPANS:
            self._wake_spans.set()

    def end(self, timeout_s: float) -> None:
        """Send what is left, or give up."""
        deadline = time.monotonic() + timeout_s
        self._ending = True
        self._wake_spans.set()
        self._wake_metrics.set()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def report(self) -> Report:
        errors = next((text for text in self._last_error.values() if text), "")
        return Report(
            spans=self._spans,
            spans_failed=self._spans_failed,
            requests_dropped=self._dropped,
            metrics=self._metrics_sent,
            metrics_failed=self._metrics_failed,
            last_error=errors,
        )

    # ------------------------------------------------------------------ threads

    def _run_spans(self) -> None:
        while True:
            ending = self._ending
            if not ending:
                self._wake_spans.wait(self._settings.spans_every_s)
                self._wake_spans.clear()
            while self._queue:
                self._record(self._queue.popleft())
                if len(self._collected.spans) >= BATCH_SPANS:
                    self._export_spans()
            self._export_spans()
            if ending:
                return

    def _record(self, request: RequestRecord) -> None:
        try:
            record_request(self._tracer, request)
        except Exception as error:  # whatever is wrong with one request, the next is exported
            self._spans_failed += 1
            self._last_error["spans"] = f"spans: {type(error).__name__}: {error}"[:300]

    def _export_spans(self) -> None:
        spans = self._collected.take()
        if not spans:
            return
        if self._attempt("spans", lambda: self._span_exporter.export(spans), SpanExportResult.SUCCESS):
            self._spans += len(spans)
        else:
            self._spans_failed += len(spans)

    def _run_metrics(self) -> None:
        scope = InstrumentationScope(SCOPE, __version__)
        while True:
            ending = self._ending
            if not ending:
                self._wake_metrics.wait()
                self._wake_metrics.clear()
            message, self._metrics = self._metrics, None
            if message is not None:
                export = partial(self._export_metrics, message, scope)
                if self._attempt("metrics", export, MetricExportResult.SUCCESS):
                    self._metrics_sent += 1
                else:
                    self._metrics_failed += 1
            if ending:
                return

    def _export_metrics(self, message: Metrics, scope: InstrumentationScope) -> MetricExportResult:
        return self._metric_exporter.export(metrics_data(message, self._resource, scope))

    # Made by the first export: what is wrong with their settings is why that one failed.

    @cached_property
    def _span_exporter(self) -> SpanExporter:
        return span_exporter(self._settings)

    @cached_property
    def _metric_exporter(self) -> MetricExporter:
        return metric_exporter(self._settings)

    def _attempt(self, what: str, export: Callable[[], object], success: object) -> bool:
        """Whether the export went well; if not, `report` says why."""
        self._errors.forget()
        try:
            if export() is success:
                self._last_error[what] = ""
                return True
            text = self._errors.text or "the exporter gave no reason"
        except Exception as error:  # whatever is wrong with one export, the next is tried
            text = f"{type(error).__name__}: {error}"[:300]
        self._last_error[what] = f"{what}: {text}"
        return False


def resource() -> Resource:
    """Who sends: what the environment says goes over our own."""
    own = {"service.name": SCOPE, "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
    said = os.environ.get(OTEL_RESOURCE_ATTRIBUTES, "")
    given = {pair.partition("=")[0].strip() for pair in said.split(",")}
    if os.environ.get(OTEL_SERVICE_NAME):
        given.add("service.name")
    return Resource.create({name: value for name, value in own.items() if name not in given})


def span_exporter(settings: OtlpSettings) -> SpanExporter:
    """What the options leave open the exporter reads from the environment."""
    if settings.traces == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

        return GrpcSpanExporter(**_grpc_address(settings))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(**_http_address(settings, "traces"))


def metric_exporter(settings: OtlpSettings) -> MetricExporter:
    if settings.metrics == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter

        return GrpcMetricExporter(**_grpc_address(settings))
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(**_http_address(settings, "metrics"))


def _grpc_address(settings: OtlpSettings) -> dict[str, Any]:
    if not settings.endpoint:
        return {}
    return {"endpoint": settings.endpoint, "insecure": settings.endpoint.startswith("http://")}


def _http_address(settings: OtlpSettings, signal: str) -> dict[str, Any]:
    return {"endpoint": f"{settings.endpoint.rstrip('/')}/v1/{signal}"} if settings.endpoint else {}


def main(argv: list[str]) -> int:
    fd, level, log_format = argv
    setup_logging(level, json_lines=log_format == "json")
    for number in (signal.SIGUSR1, signal.SIGHUP):  # the server's: they may be sent to all processes of its name
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    errors = LastError()
    sdk = logging.getLogger("opentelemetry")
    sdk.propagate = False  # the serving process says it, once
    sdk.addHandler(errors)
    with socket.socket(fileno=int(fd)) as peer:
        _serve(peer, errors)
    return 0


def _serve(peer: socket.socket, errors: LastError) -> None:
    frames = FrameReader()
    exporting: Exporting | None = None
    told = Report()
    told_at = 0.0
    peer.settimeout(_REPORT_EVERY_S)
    while True:
        try:
            data = peer.recv(1 << 20)
        except TimeoutError:
            data = None
        except OSError:
            break
        if data == b"":
            break
        for payload in frames.feed(data or b""):
            if exporting is None:
                exporting = Exporting(msgspec.msgpack.decode(payload, type=OtlpSettings), errors)
                exporting.start()
            else:
                exporting.take(TO_EXPORTER.decode(payload))
        if exporting is not None and time.monotonic() - told_at >= _REPORT_EVERY_S:
            now = exporting.report()
            if now != told and _tell(peer, now):
                told = now
            told_at = time.monotonic()
    if exporting is not None:
        exporting.end(FLUSH_S)
        _tell(peer, exporting.report())


def _tell(peer: socket.socket, report: Report) -> bool:
    try:
        peer.sendall(frame(ENCODER.encode(report)))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # an export that hangs must not keep the process
