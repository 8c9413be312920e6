"""The serving process's end: requests that have ended go through a bounded queue and a thread to the process that
exports, which builds the spans. A collector that is down or slow costs spans, which are counted, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from firsttoken.observability.logging import logging_setup
from firsttoken.observability.otlp.genai import GenAIMetrics
from firsttoken.observability.otlp.settings import OtlpSettings
from firsttoken.observability.otlp.wire import ENCODER, FROM_EXPORTER, Family, Metrics, Report, RequestRecord, Requests
from firsttoken.observability.recent import EndedRequest
from firsttoken.transport.framing import FrameError, FrameReader, frame

log = logging.getLogger(__name__)

QUEUE_REQUESTS = 4096
# How often the thread looks, and how many requests one message holds at most.
TURN_S = 0.1
_MESSAGE_REQUESTS = 256
# The exporting process reads at once, whatever its collector does: one that has not for so long is stuck.
_STUCK_S = 5.0
_RESTART_S = 10.0
_VLLM = "vllm:"  # the same figures under other names


class OtlpExport:
    """One exporting process, from `start` to `close`. ``offer`` is for the event loop, the rest for any thread."""

    def __init__(
        self, settings: OtlpSettings, registry: CollectorRegistry, *, queue_requests: int = QUEUE_REQUESTS
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._genai = GenAIMetrics()
        self._queue: deque[EndedRequest] = deque()
        self._capacity = queue_requests
        self._dropped = 0
        self._unsent = 0  # the thread's own: they were taken from the queue for a process that had ended
        self._lost: Report = Report()  # totals of processes that have ended
        self._report: Report = Report()
        self._since_unix_ns = time.time_ns()
        self._metrics_at = time.monotonic() + settings.metrics_every_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="firsttoken-otlp", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._frames = FrameReader()
        self._restart_at = 0.0
        registry.register(_Figures(self))

    def start(self) -> None:
        self._launch()
        self._thread.start()

    def offer(self, ended: EndedRequest) -> None:
        """Take a request that has ended; never waits. Its account is made here: it reads what the event loop writes."""
        if self._settings.metrics:
            self._genai.observe(ended)
        if not self._settings.traces:
            return
        if len(self._queue) >= self._capacity:
            self._dropped += 1
        elif ended.account is not None:
            self._queue.append(ended)

    def close(self, timeout_s: float = 3.0) -> None:
        """Send what is there and end the process; whatever the collector does, within about ``timeout_s``."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("what was left to export by OTLP could not be sent within %.1f s", timeout_s)
            if self._process is not None:
                self._process.kill()
            self._thread.join()

    @property
    def report(self) -> Report:
        """The totals so far, over all exporting processes."""
        return _sum(self._lost, self._report)

    @property
    def dropped(self) -> int:
        """Requests for which there was no room, here or there, and those that could not be handed over."""
        return self._dropped + self._unsent + self.report.requests_dropped

    # --------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._closing.wait(TURN_S):
            self._turn()
        self._turn(last=True)
        self._end()

    def _end(self) -> None:
        """Let the exporting process send what it has, and hear how that went."""
        process, held = self._process, self._socket
        if process is None or held is None:
            return
        with contextlib.suppress(OSError, FrameError, msgspec.MsgspecError):
            held.shutdown(socket.SHUT_WR)
            while self._hear(wait=True):
                pass
        process.wait()
        held.close()

    def _turn(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if self._socket is None and (last or now < self._restart_at):
            return
        try:
            if self._socket is None:
                self._launch()
            self._send_requests()
            if self._settings.metrics and (last or now >= self._metrics_at):
                self._metrics_at = now + self._settings.metrics_every_s
                self._send(self._all_metrics())
            if not self._hear():
                raise ConnectionResetError("its end of the channel is closed")
        except (OSError, FrameError, msgspec.MsgspecError) as error:
            self._lose(error)
        except Exception:  # whatever is wrong with one message, the next is tried
            log.exception("something could not be exported by OTLP")

    def _send_requests(self) -> None:
        while self._queue:
            count = min(len(self._queue), _MESSAGE_REQUESTS)
            ended = [self._queue.popleft() for _ in range(count)]
            try:
                self._send(Requests([_record(one) for one in ended]))
            except Exception:
                self._unsent += count
                raise

    def _send(self, message: Requests | Metrics | OtlpSettings) -> None:
        assert self._socket is not None
        self._socket.sendall(frame(ENCODER.encode(message)))

    def _hear(self, *, wait: bool = False) -> bool:
        """Take what the exporting process has reported, if it has; False when it has ended."""
        assert self._socket is not None
        if not wait:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(0):
                return True
        data = self._socket.recv(65536)
        for payload in self._frames.feed(data):
            self._take(FROM_EXPORTER.decode(payload))
        return bool(data)

    def _take(self, report: Report) -> None:
        before, self._report = self._report.last_error, report
        where = self._settings.endpoint or "the environment's OTLP endpoint"
        if report.last_error and not before:
            log.warning("exporting to %s fails, what cannot be sent is dropped: %s", where, report.last_error)
        elif before and not report.last_error:
            log.info("exporting to %s works again", where)

    def _launch(self) -> None:
        level, as_json = logging_setup()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "firsttoken.observability.otlp.process", str(theirs.fileno())]
            try:
                # A session of its own: a Ctrl-C at the terminal is the server's, which has something left to export.
                self._process = subprocess.Popen(  # noqa: S603
                    [*command, level, "json" if as_json else "text"],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        ours.settimeout(_STUCK_S)
        self._socket, self._frames = ours, FrameReader()
        with contextlib.suppress(OSError):  # it has ended already: the next turn finds out
            self._send(self._settings)

    def _lose(self, error: Exception) -> None:
        """The exporting process has ended or is stuck, or could not be started."""
        process, held = self._process, self._socket
        self._process = self._socket = None
        code = None
        if held is not None:
            held.close()
        if process is not None:
            process.kill()
            code = process.wait()
        self._lost, self._report = self.report, Report()
        self._restart_at = time.monotonic() + _RESTART_S
        log.warning("the process that exports by OTLP ended (%s, code %s): another follows", error, code)

    def _all_metrics(self) -> Metrics:
        families = []
        for family in chain(self._registry.collect(), self._genai.collect()):
            if not family.name.startswith(_VLLM):
                samples = [(one.name, one.labels, float(one.value)) for one in family.samples]
                families.append(Family(family.name, family.type, family.documentation, samples))
                time.sleep(0)  # some milliseconds in all: the event loop need not wait for the last of them
        return Metrics(families, time.time_ns(), self._since_unix_ns)


class _Figures(Collector):
    """How exporting goes, in ``/metrics``."""

    def __init__(self, export: OtlpExport) -> None:
        self._export = export

    def collect(self) -> Iterator[Metric]:
        report = self._export.report
        for name, text, sent, failed in (
            ("spans", "Spans that were to be exported", report.spans, report.spans_failed),
            ("metric_exports", "Exports of all metrics", report.metrics, report.metrics_failed),
        ):
            family = CounterMetricFamily(f"firsttoken_otlp_{name}", text, labels=["outcome"])
            family.add_metric(["sent"], sent)
            family.add_metric(["failed"], failed)
            yield family
        yield CounterMetricFamily(
            "firsttoken_otlp_requests_dropped",
            "Requests of which no spans were made, for want of room in the queue",
            value=self._export.dropped,
        )


def _record(ended: EndedRequest) -> RequestRecord:
    return RequestRecord(
        id=ended.id,
        response_id=ended.response_id,
        route=ended.route,
        model=ended.model,
        outcome=ended.outcome,
        status=ended.status,
        error=ended.error,
        finish_reason=ended.finish_reason,
        service_class=ended.service_class,
        answers=len(ended.engine_ids),
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        output_tokens=ended.output_tokens,
        received_unix_ns=ended.received_unix_ns,
        received_ns=ended.received_ns,
        ended_ns=ended.ended_ns,
        ttft_ns=ended.ttft_ns,
        timeline=ended.timeline,
        account=ended.account,
        traceparent=ended.traceparent,
        tracestate=ended.tracestate,
    )


def _sum(one: Report, other: Report) -> Report:
    return Report(
        spans=one.spans + other.spans,
        spans_failed=one.spans_failed + other.spans_failed,
        requests_dropped=one.requests_dropped + other.requests_dropped,
        metrics=one.metrics + other.metrics,
        metrics_failed=one.metrics_failed + other.metrics_failed,
        last_error=other.last_error,
    )
