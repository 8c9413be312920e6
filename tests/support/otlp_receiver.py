"""Collectors for tests: OTLP over HTTP and over gRPC, which keep what they are sent, decoded."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class Received:
    """``spans`` and ``metrics`` as protobuf messages, with the resource's attributes of each export. ``answer_s`` is
    how long an export takes to be answered, ``status`` what HTTP answers."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answer_s: float = 0.0
    status: int = 200
    exports: int = 0

    def take_traces(self, request: Any) -> None:
        for group in request.resource_spans:
            self.resources.append(attributes(group.resource))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def take_metrics(self, request: Any) -> None:
        for group in request.resource_metrics:
            self.resources.append(attributes(group.resource))
            self.metrics += [metric for scope in group.scope_metrics for metric in scope.metrics]

    def wait_for(self, enough: Any, timeout_s: float = 10.0) -> None:
        """Until ``enough()`` is true; fails after ``timeout_s``."""
        end = time.monotonic() + timeout_s
        while not enough():
            assert time.monotonic() < end, (
                f"{len(self.spans)} spans, {len(self.metrics)} metrics, {self.exports} exports"
            )
            time.sleep(0.01)


def attributes(holder: Any) -> dict[str, Any]:
    """Of a span, an event, a data point or a resource, as Python has them."""
    return {one.key: _plain(one.value) for one in holder.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def http_receiver() -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            received.exports += 1
            received.headers.append({name.lower(): value for name, value in self.headers.items()})
            time.sleep(received.answer_s)
            if received.status == 200 and self.path == "/v1/traces":
                received.take_traces(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            elif received.status == 200 and self.path == "/v1/metrics":
                received.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
            self.send_response(received.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    received.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def grpc_receiver() -> Iterator[Received]:
    received = Received()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.exports += 1
            received.headers.append(dict(context.invocation_metadata()))
            received.take_traces(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.exports += 1
            received.take_metrics(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    received.url = f"http://127.0.0.1:{port}"
    try:
        yield received
    finally:
        server.stop(0)
