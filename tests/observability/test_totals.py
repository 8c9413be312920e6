"""Counters go on where those of the engine before ended, gauges begin anew."""

from __future__ import annotations

import msgspec
import pytest

from firsttoken.observability.totals import _DISK, _KV, _RESTORES, _STATS, Totals
from firsttoken.transport.kv_report import DiskReport, KVReport, PromptTokens, RestoreReport
from firsttoken.transport.messages import ClassStats, EngineStats


def restores() -> RestoreReport:
    return RestoreReport(**dict.fromkeys(RestoreReport.__struct_fields__, 2))


def disk(**fields) -> DiskReport:
    told = dict.fromkeys(DiskReport.__struct_fields__, 2) | {"reads": {"ok": 1}, "writes": {}, "errors": {"EIO": 1}}
    return DiskReport(**told | {"read_only": False} | fields)


def report(device: int = 5, **fields) -> KVReport:
    tokens = [PromptTokens([device], [1], [0], [4])]
    told = dict.fromkeys(KVReport.__struct_fields__, 1) | {"misses": {"new": 2}, "evictions": [[1, 0], [0, 3]]}
    told |= {"edges": [0], "tokens": tokens, "evicted_early": [1, 1], "restores": restores(), "disk": disk()}
    return KVReport(**told | fields)


def stats(**fields) -> EngineStats:
    classes = [ClassStats(1, 2, {"queue": 3}, 0.5, None)]
    return EngineStats(**dict.fromkeys(_STATS, 10) | {"classes": classes, "running": 2, "kv_used": 7} | fields)


def test_what_only_one_engine_counted_is_told_as_it_is() -> None:
    totals = Totals()
    assert totals.stats == EngineStats()
    assert totals.kv is None
    told = stats()
    totals.update(told)
    assert totals.stats is told, "a copy at every step would cost"


@pytest.mark.parametrize("deaths", [1, 2])
def test_counters_go_on_and_gauges_do_not(deaths: int) -> None:
    totals = Totals()
    for _ in range(deaths):
        totals.update(stats())
        totals.update_kv(report())
        totals.gone()
        totals.gone()  # it may be told twice
    gone = totals.stats
    assert all(getattr(gone, name) == 10 * deaths for name in _STATS)
    assert (gone.running, gone.kv_used, gone.classes[0].waiting, gone.classes[0].running) == (0, 0, 0, 0)
    assert gone.classes[0].refused == {"queue": 3 * deaths}
    assert totals.kv.kept_blocks == totals.kv.restores.host_blocks == 0
    assert totals.kv.disk.files == 2, "files outlive an engine"
    totals.update(stats(running=1, classes=[ClassStats(0, 1, {"ttft": 1}, 0.1, None)]))
    totals.update_kv(report(device=1))
    now = totals.stats
    assert all(getattr(now, name) == 10 * (deaths + 1) for name in _STATS)
    assert (now.running, now.kv_used) == (1, 7)
    assert now.classes[0] == ClassStats(0, 1, {"queue": 3 * deaths, "ttft": 1}, 0.1, None)
    kv = totals.kv
    assert kv.tokens == [PromptTokens([5 * deaths + 1], [deaths + 1], [0], [4 * (deaths + 1)])]
    assert kv.evictions == [[deaths + 1, 0], [0, 3 * (deaths + 1)]]
    assert (kv.kept_blocks, kv.edges, kv.misses) == (1, [0], {"new": 2 * (deaths + 1)})
    assert (kv.restores.restores, kv.restores.host_blocks) == (2 * (deaths + 1), 2)
    assert (kv.disk.reads, kv.disk.errors, kv.disk.files) == ({"ok": deaths + 1}, {"EIO": deaths + 1}, 2)


def test_every_field_is_a_total_or_is_known_to_be_none() -> None:
    """A new counter that nobody lists would go backwards."""
    gauges = {
        EngineStats: "unprepared running waiting kv_total kv_used kv_cached heartbeat_ns last_step_ns peak_memory "
        "classes step_time_errors",
        KVReport: "edges kept_blocks restores disk",
        RestoreReport: "host_blocks host_capacity host_kept_blocks",
        DiskReport: "files nbytes cap_bytes kept_bytes read_only read_gb_s write_gb_s",
    }
    listed: dict[type[msgspec.Struct], tuple[str, ...]] = {
        EngineStats: _STATS,
        KVReport: _KV,
        RestoreReport: _RESTORES,
        DiskReport: _DISK,
    }
    for struct, names in gauges.items():
        assert sorted([*names.split(), *listed[struct]]) == sorted(struct.__struct_fields__)
