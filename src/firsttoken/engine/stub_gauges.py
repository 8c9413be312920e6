"""What the scripted engine tells of its classes and of a KV cache that it does not have."""

from __future__ import annotations

from collections.abc import Iterable

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass
from firsttoken.engine.prompt_tokens import EDGES, TokenHeat
from firsttoken.transport.kv_report import KVReport
from firsttoken.transport.messages import ClassStats

REPORT_NS = 100 * NS_PER_MS


class StubGauges:
    """Counts prompts as an engine does: what the script's settings call cached was found on the device."""

    def __init__(self) -> None:
        self._heat = TokenHeat()
        self._fresh = False
        self._told_ns = 0
        self._missed = 0

    def prompt(self, request: Request) -> None:
        self._heat.add(request.service, request.num_cached, 0, 0, request.num_prompt)
        self._missed += request.num_cached < request.num_prompt - 1
        self._fresh = True

    def kv(self, now_ns: int) -> KVReport | None:
        """As often as an engine tells it, if there is anything new."""
        if not self._fresh or now_ns - self._told_ns < REPORT_NS:
            return None
        self._fresh, self._told_ns = False, now_ns
        return KVReport(
            edges=EDGES,
            tokens=self._heat.read(),
            misses={"never_seen": self._missed, "evicted": 0, "diverged": 0},
            evictions=[[0] * len(ServiceClass) for _ in ServiceClass],
            evicted_blocks=0,
            evicted_early=[0] * len(ServiceClass),
            evicted_kept=0,
            hints_kept=0,
            hints_ignored=0,
            kept_blocks=0,
        )


def class_stats(waiting: Iterable[Request], running: Iterable[Request]) -> list[ClassStats]:
    """How many of each class wait and run; nobody is turned away, and nothing is predicted."""
    counts = [[0, 0] for _ in ServiceClass]
    for at, requests in enumerate((waiting, running)):
        for request in requests:
            counts[request.service][at] += 1
    return [ClassStats(waits, runs, {}, 0.0, None) for waits, runs in counts]
