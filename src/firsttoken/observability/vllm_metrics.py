"""The series that vLLM's dashboards, autoscalers and routers read, under vLLM's names and labels, where the meaning is
the same. Nothing is observed for them alone: they are made from our own series when they are scraped.

`docs/observability.md` says which of vLLM's names are given, and why the others are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from firsttoken.observability.histogram import Histogram, add_histogram
from firsttoken.observability.kv_metrics import asked_and_found, tiers_of
from firsttoken.observability.request_metrics import RequestMetrics
from firsttoken.observability.step_metrics import StepMetrics
from firsttoken.transport.kv_report import KVReport
from firsttoken.transport.messages import EngineInfo, EngineStats

_LABELS = ("model_name", "engine")
_ENGINE = "0"  # vLLM numbers the engines behind one server; here there is one


class EngineState(Protocol):
    """The latest that is known of the engine; ``info`` is None before its start."""

    info: EngineInfo | None
    model_name: str

    @property
    def stats(self) -> EngineStats: ...

    @property
    def kv(self) -> KVReport | None: ...


class VLLMCollector(Collector):
    """``felt`` our histograms of what callers feel, by vLLM's name;
    ``finished`` how many answers ended, by vLLM's reasons."""

    def __init__(
        self,
        engine: EngineState,
        felt: dict[str, Collector],
        finished: Callable[[], dict[str, float]],
        requests: RequestMetrics,
        steps: StepMetrics,
    ) -> None:
        self._engine = engine
        self._felt = felt
        self._finished = finished
        self._requests = requests
        self._steps = steps

    def collect(self) -> Iterator[Metric]:
        state, info = self._engine, self._engine.info
        if info is None:
            return  # not started: there is no model to name
        labels = [state.model_name, _ENGINE]
        yield from _gauges(state.stats, labels)
        yield from _counters(state.stats, labels)
        if state.kv is not None:
            yield from _cache(state.kv, labels)
        yield self._success(labels)
        for name, ours in self._felt.items():
            yield _all_classes(name, ours, labels)
        yield from self._of_requests(labels)
        yield _config(info)

    def _success(self, labels: list[str]) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Answers that ended, by why", labels=[*_LABELS, "finished_reason"]
        )
        for reason, count in self._finished().items():
            family.add_metric([*labels, reason], count)
        return family

    def _of_requests(self, labels: list[str]) -> Iterator[Metric]:
        ours = self._requests
        told: list[tuple[str, str, Histogram]] = [
            ("request_queue_time_seconds", "From the engine's door to the first step (s)", ours.engine_queue),
            ("request_prefill_time_seconds", "From the first step to the first token (s)", ours.engine_prefill),
            ("request_decode_time_seconds", "From the first token to the last (s)", ours.engine_decode),
            ("request_inference_time_seconds", "From the first step to the last token (s)", ours.engine_running),
            ("request_time_per_output_token_seconds", "Mean gap between a request's tokens (s)", ours.time_per_token),
            ("request_prompt_tokens", "Prompt tokens of a request", ours.prompt_tokens),
            ("request_generation_tokens", "Tokens generated for a request", ours.output_tokens),
            (
                "request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were computed, not found in the cache",
                ours.computed_tokens,
            ),
            ("iteration_tokens_total", "Tokens that a step computed", self._steps.tokens),
        ]
        for name, text, histogram in told:
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            add_histogram(family, labels, histogram)
            yield family


def _gauges(stats: EngineStats, labels: list[str]) -> Iterator[Metric]:
    usage = stats.kv_used / stats.kv_total if stats.kv_total else 0.0
    for name, text, value in (
        ("num_requests_running", "Requests that hold a row", stats.running),
        ("num_requests_waiting", "Requests in the queue", stats.waiting),
        ("kv_cache_usage_perc", "Share of KV blocks used by requests (1 is all of them)", usage),
    ):
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(labels, value)
        yield family


def _counters(stats: EngineStats, labels: list[str]) -> Iterator[Metric]:
    yield _total("num_preemptions", "Times a request lost its KV blocks to another", stats.preemptions, labels)
    yield _total("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens, labels)
    yield _total("prompt_tokens_cached", "Prompt tokens found in the cache", stats.cached_prompt_tokens, labels)
    yield _total("generation_tokens", "Tokens generated", stats.output_tokens, labels)


def _cache(report: KVReport, labels: list[str]) -> Iterator[Metric]:
    """The device's tier is vLLM's prefix cache; those below it are what vLLM calls external."""
    tiers = tiers_of(report)
    asked = dict.fromkeys(tiers, 0)
    found = dict.fromkeys(tiers, 0)
    for tokens in report.tokens:
        for tier, wanted, had in asked_and_found(tokens, tiers):
            asked[tier] += wanted
            found[tier] += had
    device, *lower = tiers
    yield _total("prefix_cache_queries", "Prompt tokens that were looked for", asked[device], labels)
    yield _total("prefix_cache_hits", "Prompt tokens found on the device", found[device], labels)
    if lower:
        yield _total(
            "external_prefix_cache_queries", "Prompt tokens looked for in lower tiers", asked[lower[0]], labels
        )
        hits = sum(found[tier] for tier in lower)
        yield _total("external_prefix_cache_hits", "Prompt tokens found in lower tiers", hits, labels)


def _total(name: str, text: str, value: float, labels: list[str]) -> Metric:
    family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
    family.add_metric(labels, value)
    return family


def _all_classes(name: str, histogram: Collector, labels: list[str]) -> Metric:
    """A histogram by classes as one of all of them. Buckets are cumulative, so they add up."""
    (ours,) = histogram.collect()
    sums: dict[tuple[str, str | None], float] = {}
    for sample in ours.samples:
        key = (sample.name.removeprefix(ours.name), sample.labels.get("le"))
        sums[key] = sums.get(key, 0.0) + sample.value
    family = Metric(f"vllm:{name}", ours.documentation, "histogram")
    named = dict(zip(_LABELS, labels, strict=True))
    for (suffix, edge), value in sums.items():
        if suffix != "_created":
            at = named if edge is None else named | {"le": edge}
            family.add_sample(f"vllm:{name}{suffix}", at, value)
    return family


def _config(info: EngineInfo) -> Metric:
    """What routers read to know a replica's cache."""
    config = {
        "engine": _ENGINE,
        "block_size": str(info.block_tokens),
        "num_gpu_blocks": str(info.kv_blocks),
        "cache_dtype": info.kv_dtype,
        "enable_prefix_caching": "True",
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "What the KV cache is", labels=list(config))
    family.add_metric(list(config.values()), 1)
    return family
