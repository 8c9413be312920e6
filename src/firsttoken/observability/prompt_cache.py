"""The prompt cache (tier L1, in the API process) as Prometheus metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class PromptCacheFigures(Protocol):
    """What `text.prompt_cache.PromptCacheStats` says."""

    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def hit_characters(self) -> int: ...
    @property
    def missed_characters(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def expired(self) -> int: ...
    @property
    def entries(self) -> int: ...
    @property
    def bytes(self) -> int: ...


class PromptCacheCollector(Collector):
    """Turns what ``read`` returns into metric families."""

    def __init__(self, read: Callable[[], PromptCacheFigures]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        yield _by("pieces", "Pieces of prompts looked up", "result", hit=now.hits, miss=now.misses)
        yield _by(
            "characters",
            "Characters of those pieces; only missed ones are tokenised",
            "result",
            hit=now.hit_characters,
            miss=now.missed_characters,
        )
        yield _by(
            "evictions", "Pieces let go: for room, or unused for a minute", "why", room=now.evicted, ttl=now.expired
        )
        yield GaugeMetricFamily("firsttoken_prompt_cache_entries", "Pieces of prompts held", value=now.entries)
        yield GaugeMetricFamily("firsttoken_prompt_cache_bytes", "Bytes of their texts and tokens", value=now.bytes)


def _by(name: str, help_text: str, label: str, **values: int) -> Metric:
    family = CounterMetricFamily(f"firsttoken_prompt_cache_{name}", help_text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
