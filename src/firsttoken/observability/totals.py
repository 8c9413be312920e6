"""Running totals of an engine over all its lives: one that is started again counts from 0, as no counter may."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec

from firsttoken.transport.kv_report import DiskReport, KVReport, RestoreReport
from firsttoken.transport.messages import ClassStats, EngineStats

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

# Of each struct the fields that only ever grow; all others say how it is now.
_STATS = (
    *("steps", "captured_steps", "prompt_tokens", "cached_prompt_tokens", "output_tokens", "preemptions"),
    *("finished", "aborted", "failed", "host_ns"),
)
_KV = (
    *("misses", "evictions", "evicted_blocks", "evicted_early", "evicted_kept", "hints_kept", "hints_ignored"),
    "tokens",
)
_RESTORES = (
    *("restores", "cancelled", "restore_s", "disk_restores", "disk_restore_s", "host_tokens", "disk_tokens"),
    *("declined_tokens", "failed_tokens", "spilled_blocks", "unspilled_shards", "full_shards", "host_evicted_blocks"),
)
_DISK = ("reads", "writes", "errors", "evicted", "damaged")
# What no engine holds.
_STATS_GONE = {"running": 0, "waiting": 0, "kv_used": 0, "kv_cached": 0, "unprepared": 0}


class Totals:
    """The latest that the engine said, on top of what those before it had counted."""

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._kv: KVReport | None = None
        self._stats_before: EngineStats | None = None
        self._kv_before: KVReport | None = None

    def update(self, stats: EngineStats) -> None:
        self._stats = stats

    def update_kv(self, report: KVReport) -> None:
        self._kv = report

    @property
    def stats(self) -> EngineStats:
        before, now = self._stats_before, self._stats
        return now if before is None else _stats_sum(before, now)

    @property
    def kv(self) -> KVReport | None:
        before, now = self._kv_before, self._kv
        return now if before is None else before if now is None else _kv_sum(before, now)

    def gone(self) -> None:
        """The engine is, and with it all that it held; what it has counted stays."""
        told = self.stats
        classes = [msgspec.structs.replace(one, running=0, waiting=0) for one in told.classes]
        told = msgspec.structs.replace(told, classes=classes, **_STATS_GONE)
        self._stats_before = told
        none = [msgspec.structs.replace(one, refused={}) for one in classes]
        self._stats = msgspec.structs.replace(told, classes=none, **dict.fromkeys(_STATS, 0))
        kept = self.kv
        if kept is not None:
            restores = kept.restores
            if restores is not None:
                restores = msgspec.structs.replace(restores, host_blocks=0, host_kept_blocks=0)
            self._kv_before = msgspec.structs.replace(kept, kept_blocks=0, restores=restores)
            self._kv = None


def _stats_sum(before: EngineStats, now: EngineStats) -> EngineStats:
    classes = [_class_sum(*pair) for pair in zip(before.classes, now.classes, strict=False)]
    return msgspec.structs.replace(_grown(before, now, _STATS), classes=classes or now.classes)


def _class_sum(before: ClassStats, now: ClassStats) -> ClassStats:
    return _grown(before, now, ("refused",))


def _kv_sum(before: KVReport, now: KVReport) -> KVReport:
    restores: RestoreReport | None = now.restores
    if before.restores is not None and restores is not None:
        restores = _grown(before.restores, restores, _RESTORES)
    disk: DiskReport | None = now.disk
    if before.disk is not None and disk is not None:
        disk = _grown(before.disk, disk, _DISK)
    return msgspec.structs.replace(_grown(before, now, _KV), restores=restores, disk=disk)


def _grown(before: _Struct, now: _Struct, names: Sequence[str]) -> _Struct:
    return msgspec.structs.replace(now, **{name: _sum(getattr(before, name), getattr(now, name)) for name in names})


def _sum(before: Any, now: Any) -> Any:
    """Of numbers, and of structs, lists and dicts of such piece by piece; a piece that one lacks is the other's."""
    if isinstance(now, msgspec.Struct):
        return _grown(before, now, now.__struct_fields__)
    if isinstance(now, dict):
        return {key: _sum(before.get(key, 0), now.get(key, 0)) for key in (before | now)}
    if isinstance(now, list):
        return [a if b is None else b if a is None else _sum(a, b) for a, b in zip_longest(before, now)]
    return before + now
