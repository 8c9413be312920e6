"""Prometheus metrics of one server. Each server has its own registry: nothing is global.

What the engine knows comes with its latest `EngineStats` and is read at scrape time, so a scrape never touches the
engine, and gauges follow the heartbeats even when no request arrives any more. What callers feel is observed by the
front end, gaps between tokens a step at a time; `request_metrics` observes requests once they have ended,
`step_metrics` the engine's records of its steps, and `vllm_metrics` gives what vLLM knows too under vLLM's names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.outcome import Outcome
from firsttoken.core.service import CLASS_NAMES
from firsttoken.core.step_record import StepRecord
from firsttoken.observability.histogram import Histograms
from firsttoken.observability.kv_metrics import kv_families
from firsttoken.observability.live import ClassWindow, LiveWindows
from firsttoken.observability.request_metrics import RequestMetrics
from firsttoken.observability.self_check import self_check_families
from firsttoken.observability.step_metrics import StepMetrics
from firsttoken.observability.token_gaps import TokenGaps
from firsttoken.observability.totals import Totals
from firsttoken.observability.vllm_metrics import VLLMCollector
from firsttoken.transport.kv_report import KVReport
from firsttoken.transport.messages import ClassStats, EngineInfo, EngineStats, StepTimeErrors

FINISH_REASONS = ("stop", "length")

_BY_CLASS = ("service_class",)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds. A gap is resolved down to half a millisecond, where fast decoding lives; a request up to ten minutes.
# fmt: off
TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40)
ITL_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
               0.3, 0.5, 1, 2, 5)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 240, 600)
# fmt: on
LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class EngineCollector(Collector):
    """Turns the latest `EngineStats` into metric families at scrape time."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.info: EngineInfo | None = None
        self.model_name = ""  # under which it is served
        self.up = False
        self.deaths = 0
        self.restarts = 0

    @property
    def stats(self) -> EngineStats:
        return self.totals.stats

    @property
    def kv(self) -> KVReport | None:
        return self.totals.kv

    def collect(self) -> Iterator[Metric]:
        # One read of the reference: a scrape in another thread sees one consistent set of numbers.
        stats = self.stats
        yield from _gauges(stats)
        yield from _counters(stats)
        yield from _classes(stats.classes)
        yield _step_time_errors(stats.step_time_errors)
        kv = self.kv
        if kv is not None:
            yield from kv_families(kv)
        yield from _lives(self.up, self.deaths, self.restarts)
        if self.info is not None:
            yield _info(self.info)
            if self.info.self_check is not None:
                yield from self_check_families(self.info.self_check)


class ClassMetrics:
    """The series of one service class; made by `FrontendMetrics`."""

    __slots__ = ("_ended", "_finished", "_window", "first_token", "gaps", "request_done", "started")

    def __init__(
        self,
        name: str,
        ttft: Histogram,
        itl: Histograms,
        e2e: Histogram,
        started: Counter,
        ended: Counter,
        finished: Counter,
        window: ClassWindow,
    ) -> None:
        self.gaps = TokenGaps(itl.of(name), window)
        self.first_token = _both(ttft.labels(name).observe, window.ttft.observe)  # (seconds)
        self.request_done = _both(e2e.labels(name).observe, window.e2e.observe)  # (seconds)
        # Counts answers that are asked of the engine. Each is to be told to `ended` once.
        self.started = started.labels(name).inc
        self._ended = {outcome: ended.labels(outcome, name) for outcome in get_args(Outcome)}
        self._finished = {reason: finished.labels(reason, name) for reason in FINISH_REASONS}
        self._window = window

    def ended(self, outcome: Outcome, answers: int = 1) -> None:
        """Count answers as their callers saw them end, which the engine cannot know: it aborts an answer that a stop
        string finished, and tells nothing any more once it is dead."""
        self.gaps.count()
        self._ended[outcome].inc(answers)
        self._window.ended(outcome, answers)

    def finished(self, reason: str) -> None:
        """Count why an answer that was told as "finished" did."""
        if reason in self._finished:
            self._finished[reason].inc()


def _both(one: Callable[[float], None], other: Callable[[float], None]) -> Callable[[float], None]:
    def observe(value: float) -> None:
        one(value)
        other(value)

    return observe


class FrontendMetrics:
    """Everything a server's ``/metrics`` shows. Observing is thread-safe and does no I/O."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._engine = EngineCollector()
        self._engine_pid: int | None = None
        self.registry.register(self._engine)
        ProcessCollector(registry=self.registry)
        ttft = self._histogram(
            "time_to_first_token", "From the request's arrival to its first token", TTFT_BUCKETS, _BY_CLASS
        )
        itl = Histograms(
            "firsttoken_inter_token_latency_seconds", "Gap between two tokens of a request (s)", _BY_CLASS, ITL_BUCKETS
        )
        self.registry.register(itl)
        e2e = self._histogram(
            "request_duration", "From the request's arrival to its last token", E2E_BUCKETS, _BY_CLASS
        )
        self._lag = self._histogram("event_loop_lag", "How late the API process's event loop wakes up", LAG_BUCKETS)
        self._served = Counter(
            "firsttoken_requests_served", "Callers' requests that were answered in full", registry=self.registry
        )
        self._refused = Counter(
            "firsttoken_requests_refused",
            "Callers' requests that were not, each once, wherever that was decided: by outcome (refused, expired, "
            "failed; aborted: the caller left, or the server stopped) and by the error's code",
            ["outcome", "code"],
            registry=self.registry,
        )
        for outcome in get_args(Outcome)[1:]:  # so that a rate is there before the first
            self._refused.labels(outcome, "")
        started = Counter(
            "firsttoken_requests_started",
            "Answers asked of the engine (n for a request)",
            _BY_CLASS,
            registry=self.registry,
        )
        ended = Counter(
            "firsttoken_requests_ended",
            "Answers asked of the engine that ended, by outcome: finished, aborted (the caller left), refused (no "
            "room), expired (they had not started by their deadline), failed",
            ["outcome", *_BY_CLASS],
            registry=self.registry,
        )
        finished = Counter(
            "firsttoken_answers_finished",
            "Answers that finished, by why: an end token or stop string (stop), or as long as was asked for (length)",
            ["finish_reason", *_BY_CLASS],
            registry=self.registry,
        )
        self._ended, self._finished = ended, finished
        self.live = LiveWindows()  # the last minute, for whoever looks at it live
        self._classes = [
            ClassMetrics(name, ttft, itl, e2e, started, ended, finished, window)
            for name, window in zip(CLASS_NAMES, self.live.classes, strict=True)
        ]
        self.loop_lag = self._lag.observe  # (seconds)
        self.requests = RequestMetrics()
        self.steps = StepMetrics()
        self.registry.register(self.requests)
        self.registry.register(self.steps)
        felt: dict[str, Collector] = {
            "time_to_first_token_seconds": ttft,
            "inter_token_latency_seconds": itl,
            "e2e_request_latency_seconds": e2e,
        }
        self.registry.register(VLLMCollector(self._engine, felt, self._finish_reasons, self.requests, self.steps))

    def _histogram(self, name: str, help_text: str, buckets: Iterable[float], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(
            f"firsttoken_{name}_seconds",
            f"{help_text} (s)",
            labelnames=labels,
            buckets=tuple(buckets),
            registry=self.registry,
        )

    def of(self, service: int) -> ClassMetrics:
        """What the callers of this service class feel."""
        return self._classes[service]

    @property
    def stats(self) -> EngineStats:
        """The latest that the engine said of itself, its totals on top of those of the engines before it."""
        return self._engine.stats

    @property
    def kv(self) -> KVReport | None:
        """The same of its KV cache; None before the first."""
        return self._engine.kv

    def update(self, stats: EngineStats) -> None:
        """Take over the engine's latest numbers (with every step, and with heartbeats when idle)."""
        self._engine.totals.update(stats)
        for one in self._classes:
            one.gaps.count()

    def take_steps(self, records: Sequence[StepRecord]) -> None:
        """Take the engine's records of its steps over, each once."""
        self.steps.add(records)
        self.live.ran(records)

    def engine_gone(self, *, died: bool) -> None:
        """What the engine held is gone with it; its last gauges would say otherwise for ever. ``died``: nobody had
        asked it to leave."""
        self._engine.totals.gone()
        self._engine.deaths += died and self._engine.up
        self._engine.up = False

    def engine_up(self, *, again: bool) -> None:
        """An engine is ready; ``again``: it is not the first."""
        self._engine.up = True
        self._engine.restarts += again

    def update_kv(self, report: KVReport) -> None:
        """Take over the KV cache's latest totals."""
        self._engine.totals.update_kv(report)

    def set_info(self, info: EngineInfo, model_name: str = "") -> None:
        """Publish what the engine runs, as labels of ``firsttoken_engine_info``, and the name under which the model is
        served (the engine's own, where it has no other)."""
        self._engine.model_name = model_name or info.model
        self._engine.info = info

    def _finish_reasons(self) -> dict[str, float]:
        """Answers that ended, by vLLM's reasons. It knows neither those turned away nor deadlines."""
        why = _by_label(self._finished, "finish_reason")
        how = _by_label(self._ended, "outcome")
        return {
            "stop": why.get("stop", 0),
            "length": why.get("length", 0),
            "abort": how.get("aborted", 0),
            "error": how.get("failed", 0),
        }

    def watch_engine_process(self, pid: int) -> None:
        """Show CPU and memory of the engine process, as ``firsttoken_engine_process_*`` (Linux only), until another
        takes its place."""
        if self._engine_pid is None:
            ProcessCollector(namespace="firsttoken_engine", pid=lambda: self._engine_pid or pid, registry=self.registry)
        self._engine_pid = pid

    def request_over(self, outcome: Outcome, code: str = "") -> None:
        """Count a caller's request, once, as he saw it end; ``code`` is the error's, one of few."""
        if outcome == "finished":
            self._served.inc()
        else:
            self._refused.labels(outcome, code).inc()
        self.live.request_over(outcome)

    def render(self) -> bytes:
        """The exposition text, of type `CONTENT_TYPE`. Some milliseconds: call it in a thread, not in the loop."""
        return generate_latest(_InTurns(self.registry))


class _InTurns(Collector):
    """A registry whose families come with a chance for other threads in between. A thread that only computes gives the
    interpreter up every 5 ms, so that tokens of the event loop would wait so long, several times in one scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            time.sleep(0)


def _by_label(counter: Counter, label: str) -> dict[str, float]:
    """The counter's totals by one of its labels."""
    totals: dict[str, float] = {}
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                value = sample.labels[label]
                totals[value] = totals.get(value, 0.0) + sample.value
    return totals


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("firsttoken_requests_running", "Requests that hold a row", value=stats.running)
    yield GaugeMetricFamily("firsttoken_requests_waiting", "Requests in the queue", value=stats.waiting)
    blocks = GaugeMetricFamily(
        "firsttoken_kv_blocks",
        "KV blocks: used by requests, cached (reusable, evictable), free",
        labels=["state"],
    )
    blocks.add_metric(["used"], stats.kv_used)
    blocks.add_metric(["cached"], stats.kv_cached)
    blocks.add_metric(["free"], max(stats.kv_total - stats.kv_used - stats.kv_cached, 0))
    yield blocks
    ratio = stats.kv_used / stats.kv_total if stats.kv_total else 0.0
    yield GaugeMetricFamily("firsttoken_kv_usage_ratio", "Share of KV blocks used by requests (0 to 1)", value=ratio)
    if stats.heartbeat_ns:
        age = max(now_ns() - stats.heartbeat_ns, 0) / NS_PER_S
        yield GaugeMetricFamily("firsttoken_engine_heartbeat_age_seconds", "Age of the last heartbeat (s)", value=age)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, help_text, value in (
        ("steps", "Engine steps", stats.steps),
        ("captured_steps", "Engine steps that were launched as a graph (on a GPU)", stats.captured_steps),
        ("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens),
        ("cached_prompt_tokens", "Prompt tokens found in the prefix cache", stats.cached_prompt_tokens),
        ("output_tokens", "Tokens generated", stats.output_tokens),
        ("preemptions", "Times a request lost its KV blocks to another", stats.preemptions),
    ):
        yield CounterMetricFamily(f"firsttoken_{name}", help_text, value=value)


def _classes(classes: Sequence[ClassStats]) -> Iterator[Metric]:
    waiting = GaugeMetricFamily("firsttoken_class_requests_waiting", "Requests in the queue", labels=_BY_CLASS)
    running = GaugeMetricFamily("firsttoken_class_requests_running", "Requests that hold a row", labels=_BY_CLASS)
    turned_away = CounterMetricFamily(
        "firsttoken_requests_turned_away",
        "Answers for which the engine had no room, among those that ended as refused or expired, by why: the queue was "
        "full (queue), the class's first-token target would have been missed (ttft), or the request's own deadline "
        "(deadline)",
        labels=[*_BY_CLASS, "reason"],
    )
    predicted = GaugeMetricFamily(
        "firsttoken_predicted_time_to_first_token_seconds",
        "Predicted for a request that came now, as long as those that came lately (s)",
        labels=_BY_CLASS,
    )
    missed = GaugeMetricFamily(
        "firsttoken_seconds_until_target_missed",
        "Until the class misses its ttft_p99 by the present trend (s): 0 while it does, +Inf while waits do not grow",
        labels=_BY_CLASS,
    )
    for name, stats in zip(CLASS_NAMES, classes, strict=False):
        waiting.add_metric([name], stats.waiting)
        running.add_metric([name], stats.running)
        for reason, count in stats.refused.items():
            turned_away.add_metric([name, reason], count)
        predicted.add_metric([name], stats.predicted_ttft_s)
        if stats.until_missed_s is not None:
            missed.add_metric([name], stats.until_missed_s)
    yield from (waiting, running, turned_away, predicted, missed)


def _step_time_errors(kinds: Mapping[str, StepTimeErrors]) -> Metric:
    ratio = GaugeMetricFamily(
        "firsttoken_step_time_error_ratio",
        "Of the last predictions of how long a step takes, by which prompts are cut: |predicted - measured| / measured",
        labels=["kind", "quantile"],
    )
    for kind, errors in kinds.items():
        ratio.add_metric([kind, "0.5"], errors.median)
        ratio.add_metric([kind, "0.9"], errors.p90)
    return ratio


def _lives(up: bool, deaths: int, restarts: int) -> Iterator[Metric]:
    yield GaugeMetricFamily("firsttoken_engine_up", "1 while there is an engine that takes requests", value=float(up))
    yield CounterMetricFamily("firsttoken_engine_deaths", "Engines that ended without being asked to", value=deaths)
    yield CounterMetricFamily("firsttoken_engine_restarts", "Engines that took the place of such a one", value=restarts)


def _info(info: EngineInfo) -> Metric:
    labels = {
        "model": info.model,
        "device": info.device,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "kv_dtype": info.kv_dtype,
        "max_model_len": str(info.max_model_len),
        "kv_blocks": str(info.kv_blocks),
        "block_tokens": str(info.block_tokens),
    }
    return InfoMetricFamily("firsttoken_engine", "What the engine runs", value=labels)
