"""What is told of the KV cache."""

from __future__ import annotations

import logging

import msgspec

from firsttoken.core.cache_miss import MissReason
from firsttoken.core.clock import NS_PER_MS, NS_PER_S
from firsttoken.core.request import Request
from firsttoken.engine.prompt_tokens import EDGES, TokenHeat
from firsttoken.kvcache import KVCache
from firsttoken.kvcache.disk import DiskStore
from firsttoken.transport.kv_report import DiskReport, KVReport, RestoreReport

log = logging.getLogger(__name__)

# To gather it takes as long as many steps may take on the host, and whoever reads it does so every few seconds.
REPORT_NS = 100 * NS_PER_MS
# What only the log may say is said so often at most.
LOG_NS = 60 * NS_PER_S


class KVGauges:
    """Reads a `KVCache` and its tiers. A prompt costs a list entry, and is counted when a report is due."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._heat = TokenHeat()
        self._prompts: list[tuple[int, int, int, int, int]] = []
        self._looked_ns = self._logged_ns = 0
        self._told: KVReport | None = None
        self._other_salt = 0

    def prompt(self, request: Request) -> None:
        """It is known what was found of a request's prompt, and it is told once."""
        host, disk = request.num_cached_host, request.num_cached_disk
        self._prompts.append((request.service, request.num_cached - host - disk, host, disk, request.num_prompt))

    def read(self, now_ns: int) -> KVReport | None:
        """A report; None when the last one is too young, or nothing has changed since."""
        if now_ns - self._looked_ns < REPORT_NS:
            return None
        self._looked_ns = now_ns
        prompts, self._prompts = self._prompts, []
        for prompt in prompts:
            self._heat.add(*prompt)
        report = self._report(now_ns)
        if report == self._told:
            return None
        self._told = report
        return report

    def _report(self, now_ns: int) -> KVReport:
        stats, evictions, tiers = self._kv.stats(), self._kv.evictions(), self._kv.tiers
        self._log_other_salt(stats.other_salt, now_ns)
        return KVReport(
            edges=EDGES,
            tokens=self._heat.read(),
            misses={reason.value: getattr(stats, reason.value) for reason in MissReason},
            evictions=evictions.shards,
            evicted_blocks=stats.evictions,
            evicted_early=evictions.early,
            evicted_kept=evictions.kept + (tiers.stats().lost_kept_shards if tiers is not None else 0),
            hints_kept=stats.held_wishes,
            hints_ignored=stats.ignored_wishes,
            kept_blocks=stats.kept,
            restores=None if tiers is None else msgspec.convert(tiers.stats(), RestoreReport, from_attributes=True),
            disk=None if tiers is None or tiers.disk is None else _disk(tiers.disk),
        )

    def _log_other_salt(self, count: int, now_ns: int) -> None:
        """For the operator alone: to a caller it would tell what others send."""
        if count > self._other_salt and now_ns - self._logged_ns >= LOG_NS:
            self._logged_ns = now_ns
            log.info(
                "prompts that begin as another tenant's do and were computed anew: %d so far; keys with the same "
                "cache_group would share them",
                count,
            )
            self._other_salt = count


def _disk(store: DiskStore) -> DiskReport:
    stats = store.stats()
    return DiskReport(
        files=stats.files,
        nbytes=stats.nbytes,
        cap_bytes=stats.cap_bytes,
        kept_bytes=stats.kept_bytes,
        read_only=stats.read_only,
        reads={"done": stats.hits, **stats.misses},
        writes={"done": stats.stored, "already_stored": stats.already_stored, **stats.refused},
        errors=dict(stats.errors),
        evicted=stats.evicted,
        damaged=stats.damaged,
        read_gb_s=stats.read_gb_s,
        write_gb_s=stats.write_gb_s,
    )
