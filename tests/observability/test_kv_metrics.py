"""The KV cache's metrics and its dashboard, from one report."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from firsttoken.observability.kv_dashboard import kv_dashboard
from firsttoken.observability.metrics import FrontendMetrics
from firsttoken.transport.kv_report import DiskReport, KVReport, PromptTokens, RestoreReport
from firsttoken.transport.messages import EngineInfo, EngineStats

NOTHING = PromptTokens([0, 0], [0, 0], [0, 0], [0, 0])
DEVICE_ONLY = KVReport(
    edges=[0, 512],
    tokens=[PromptTokens([500, 100], [0, 0], [0, 0], [12, 388]), NOTHING, NOTHING],
    misses={"never_seen": 3, "evicted": 2, "diverged": 1},
    evictions=[[1, 2, 3], [0, 0, 0], [4, 0, 9]],
    evicted_blocks=77,
    evicted_early=[5, 6, 0],
    evicted_kept=8,
    hints_kept=10,
    hints_ignored=11,
    kept_blocks=12,
)
RESTORES = RestoreReport(
    restores=1, cancelled=2, restore_s=0.5, disk_restores=1, disk_restore_s=0.25, host_tokens=3, disk_tokens=4,
    declined_tokens=5, failed_tokens=6,
    spilled_blocks=7, unspilled_shards=8, full_shards=9, host_evicted_blocks=10, host_blocks=11, host_capacity=12,
    host_kept_blocks=13,
)  # fmt: skip
DISK = DiskReport(
    files=1, nbytes=2, cap_bytes=3, kept_bytes=12, read_only=False, reads={"done": 4, "corrupt": 5},
    writes={"done": 6, "already_stored": 7, "no_space": 8}, errors={"ENOSPC": 9}, evicted=10, damaged=11,
    read_gb_s=1.5, write_gb_s=None,
)  # fmt: skip
ALL = msgspec.structs.replace(
    DEVICE_ONLY,
    tokens=[NOTHING, PromptTokens([500, 0], [12, 88], [0, 300], [0, 100]), NOTHING],
    restores=RESTORES,
    disk=DISK,
)


def scraped(report: KVReport) -> dict[tuple[Any, ...], float]:
    metrics = FrontendMetrics()
    metrics.update_kv(report)
    families = text_string_to_metric_families(metrics.render().decode())
    return {(sample.name, *sorted(sample.labels.values())): sample.value for one in families for sample in one.samples}


def test_each_tier_is_asked_for_what_those_above_it_lack() -> None:
    found = scraped(ALL)
    asked = {tier: found["firsttoken_prefix_cache_queries_total", *sorted((tier, "p1"))] for tier in TIERS}
    hits = {tier: found["firsttoken_prefix_cache_hits_total", *sorted((tier, "p1"))] for tier in TIERS}
    assert asked == {"device": 1000, "host": 500, "disk": 400}
    assert hits == {"device": 500, "host": 100, "disk": 300}
    assert found["firsttoken_prefix_cache_queries_total", "device", "p0"] == 0


TIERS = ("device", "host", "disk")


def test_what_is_told_of_the_device() -> None:
    found = scraped(DEVICE_ONLY)
    expected = {
        ("firsttoken_prefix_cache_queries_total", "device", "p0"): 1000,
        ("firsttoken_prefix_cache_hits_total", "device", "p0"): 600,
        ("firsttoken_kv_prompt_tokens_total", "0", "device", "p0"): 500,
        ("firsttoken_kv_prompt_tokens_total", "512", "missed", "p0"): 388,
        ("firsttoken_prefix_cache_misses_total", "never_seen"): 3,
        ("firsttoken_prefix_cache_misses_total", "evicted"): 2,
        ("firsttoken_prefix_cache_misses_total", "diverged"): 1,
        ("firsttoken_kv_evicted_blocks_total",): 77,
        ("firsttoken_kv_evicted_early_total", "p0"): 5,
        ("firsttoken_kv_evicted_kept_total",): 8,
        ("firsttoken_kv_cache_hints_total", "kept"): 10,
        ("firsttoken_kv_cache_hints_total", "ignored"): 11,
        ("firsttoken_kv_kept_blocks",): 12,
    }
    assert {key: found[key] for key in expected} == expected
    assert not [key for key in found if "host" in str(key) or "disk" in str(key)], "there are no such tiers"


def test_evictions_have_the_victims_class_and_that_of_whom_they_made_room_for() -> None:
    metrics = FrontendMetrics()
    metrics.update_kv(DEVICE_ONLY)
    families = text_string_to_metric_families(metrics.render().decode())
    [shards] = [one for one in families if one.name == "firsttoken_kv_evicted_shards"]
    counts = {(one.labels["service_class"], one.labels["by_class"]): one.value for one in shards.samples}
    assert counts["p0", "p2"] == 3
    assert counts["p2", "p0"] == 4
    assert sum(counts.values()) == 19


def test_what_is_told_of_lower_tiers() -> None:
    found = scraped(ALL)
    expected = {
        ("firsttoken_kv_restores_total",): 1,
        ("firsttoken_kv_restores_cancelled_total",): 2,
        ("firsttoken_kv_restore_seconds_total",): 0.5,
        ("firsttoken_kv_restored_tokens_total", "host"): 3,
        ("firsttoken_kv_restored_tokens_total", "disk"): 4,
        ("firsttoken_kv_restore_declined_tokens_total",): 5,
        ("firsttoken_kv_restore_failed_tokens_total",): 6,
        ("firsttoken_kv_host_blocks",): 11,
        ("firsttoken_kv_host_capacity_blocks",): 12,
        ("firsttoken_kv_disk_reads_total", "corrupt"): 5,
        ("firsttoken_kv_disk_writes_total", "no_space"): 8,
        ("firsttoken_kv_disk_errors_total", "ENOSPC"): 9,
        ("firsttoken_kv_disk_bytes",): 2,
    }
    assert {key: found[key] for key in expected} == expected


def test_few_series_whatever_is_sent() -> None:
    edges = [0, *(512 << power for power in range(9))]
    wide = PromptTokens(*[[1] * len(edges)] * 4)
    found = scraped(msgspec.structs.replace(ALL, edges=edges, tokens=[wide] * 3))
    assert len([key for key in found if "_kv_" in key[0] or "prefix_cache" in key[0]]) < 200


# ------------------------------------------------------------------ the dashboard

INFO = EngineInfo(
    model="m", max_model_len=1, vocab_size=1, max_num_seqs=1, kv_blocks=10, block_tokens=16, bytes_per_block=99,
    device="cpu", dtype="float32", quantization="none", kv_dtype="float32",
)  # fmt: skip
STATS = EngineStats(kv_total=10, kv_used=3, kv_cached=5)


def test_the_dashboard_has_ratios_and_the_heat_map() -> None:
    told = json.loads(msgspec.json.encode(kv_dashboard(INFO, STATS, ALL)))
    assert told["blocks"] == {"total": 10, "used": 3, "cached": 5, "free": 2}
    assert told["hits"]["p1"]["host"] == {"asked": 500, "found": 100, "ratio": 0.2}
    assert told["hits"]["p0"]["device"]["ratio"] is None
    assert told["heat"]["positions"] == [0, 512]
    assert told["heat"]["tokens"]["p1"] == {"device": [500, 0], "host": [12, 88], "disk": [0, 300], "missed": [0, 100]}
    assert told["evictions"]["shards"]["p2"] == {"p0": 4, "p1": 0, "p2": 9}
    assert told["restores"]["declined_tokens"] == 5
    assert told["disk"]["reads"] == {"done": 4, "corrupt": 5}


@pytest.mark.parametrize("report", [None, DEVICE_ONLY, ALL])
def test_the_dashboard_has_the_same_fields_whatever_is_there(report: KVReport | None) -> None:
    assert kv_dashboard(INFO, STATS, report).keys() == kv_dashboard(INFO, STATS, ALL).keys()
