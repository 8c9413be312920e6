"""Series made of requests that have ended, each observed once, when its caller has his answer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.timeline import Mark
from firsttoken.core.waits import WAIT_NAMES
from firsttoken.observability.account import PARTS, WAYS, intervals
from firsttoken.observability.histogram import Histogram, Histograms
from firsttoken.observability.recent import EndedRequest

# Seconds, from a parsed body to a long answer's decoding.
# fmt: off
STAGE_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20,
                 60, 300)
# fmt: on
TOKEN_BUCKETS = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))

_CLASS = "service_class"
# Plain numbers: an enum's hash is a call.
_EDGES = tuple(int(mark) for mark in (Mark.ARRIVED, Mark.SCHEDULED, Mark.FIRST_TOKEN, Mark.FINISHED))
# By the names of the account: both ways between the processes are "transport".
_NAMES = {part: "transport" if part in WAYS else part.removesuffix("_ms") for part in PARTS}


class RequestMetrics(Collector):
    """What ended requests tell. One thread observes (the event loop's), any may collect.

    The ``engine_*`` histograms have the meaning of vLLM's of the same purpose (`vllm_metrics`), and know no classes.
    """

    def __init__(self) -> None:
        self._stages = Histograms(
            "firsttoken_request_stage_seconds",
            "Time that a request spent in a stage of its account, of requests that passed it (s)",
            ["stage", _CLASS],
            STAGE_BUCKETS,
        )
        self._prompts = Histograms(
            "firsttoken_request_prompt_tokens", "Prompt tokens of a request", [_CLASS], TOKEN_BUCKETS
        )
        self._outputs = Histograms(
            "firsttoken_request_output_tokens", "Tokens generated for a request", [_CLASS], TOKEN_BUCKETS
        )
        self._waits: dict[str, list[int]] = {}  # of each class, in ns by `core.waits.Wait`
        self.engine_queue = Histogram(STAGE_BUCKETS)
        self.engine_prefill = Histogram(STAGE_BUCKETS)
        self.engine_decode = Histogram(STAGE_BUCKETS)
        self.engine_running = Histogram(STAGE_BUCKETS)
        self.time_per_token = Histogram(STAGE_BUCKETS)
        self.prompt_tokens = Histogram(TOKEN_BUCKETS)
        self.output_tokens = Histogram(TOKEN_BUCKETS)
        self.computed_tokens = Histogram(TOKEN_BUCKETS)

    def observe(self, ended: EndedRequest) -> None:
        """Take one request over. A few microseconds."""
        if not ended.engine_ids:
            return  # it never came as far as the engine: `firsttoken_requests_refused_total` counts those
        name = ended.service_class
        spent: dict[str, int] = {}
        for stage, begin, end in intervals(ended.timeline, ended.ended_ns):
            stage = _NAMES[stage]
            spent[stage] = spent.get(stage, 0) + end - begin
        if ended.stop_ns:
            spent["stop"] = min(ended.stop_ns, spent.get("detokenize", 0))
            spent["detokenize"] = spent.get("detokenize", 0) - spent["stop"]
        for stage, ns in spent.items():
            self._stages.of(stage, name).observe(ns / NS_PER_S)
        if ended.queue_ns:
            waits = self._waits.setdefault(name, [0] * len(WAIT_NAMES))
            for wait, ns in enumerate(ended.queue_ns):
                waits[wait] += ns
        self._prompts.of(name).observe(ended.prompt_tokens)
        self._outputs.of(name).observe(ended.output_tokens)
        if ended.outcome == "finished":
            self._observe_engine(ended)

    def _observe_engine(self, ended: EndedRequest) -> None:
        self.prompt_tokens.observe(ended.prompt_tokens)
        self.output_tokens.observe(ended.output_tokens)
        self.computed_tokens.observe(ended.prompt_tokens - ended.cached_tokens)
        first = dict(reversed(ended.timeline))
        times = [first.get(mark) for mark in _EDGES]
        stages = (self.engine_queue, self.engine_prefill, self.engine_decode)
        for one, (begin, end) in zip(stages, pairwise(times), strict=True):
            if begin is not None and end is not None:
                one.observe((end - begin) / NS_PER_S)
        _, scheduled, first_token, last = times
        if scheduled is None or first_token is None or last is None:
            return
        self.engine_running.observe((last - scheduled) / NS_PER_S)
        tokens = len(ended.token_times)
        if tokens > 1:
            self.time_per_token.observe((ended.token_times[-1] - ended.token_times[0]) / (tokens - 1) / NS_PER_S)

    def collect(self) -> Iterator[Metric]:
        yield from (self._stages.family(), self._prompts.family(), self._outputs.family())
        waits = CounterMetricFamily(
            "firsttoken_queue_wait_seconds",
            "Time that requests spent in the queue, by what they waited for (s)",
            labels=["reason", _CLASS],
        )
        for name, by_reason in list(self._waits.items()):
            for reason, ns in zip(WAIT_NAMES, by_reason, strict=True):
                waits.add_metric([reason, name], ns / NS_PER_S)
        yield waits
