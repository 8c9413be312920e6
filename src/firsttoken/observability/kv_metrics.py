"""The KV cache's metric families, made from the engine's latest `KVReport` when they are scraped.

Queries and hits have vLLM's meaning and, after the prefix, its names: tokens that were looked for and found. A lower
tier is asked for what those above it did not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from firsttoken.core.service import CLASS_NAMES
from firsttoken.transport.kv_report import TIERS, DiskReport, KVReport, PromptTokens, RestoreReport

_CLASS = "service_class"


def kv_families(report: KVReport) -> Iterator[Metric]:
    tiers = tiers_of(report)
    yield from _hits(report, tiers)
    yield _heat(report, tiers)
    yield _labelled(
        "prefix_cache_misses",
        "Prompts that were not found to the end, by why the rest was not",
        "reason",
        report.misses,
    )
    yield from _evictions(report)
    yield _labelled(
        "kv_cache_hints",
        "Requests that asked to be kept in the KV cache: kept, or ignored for want of room in the quota",
        "outcome",
        {"kept": report.hints_kept, "ignored": report.hints_ignored},
    )
    yield GaugeMetricFamily(
        "firsttoken_kv_kept_blocks",
        "KV blocks of the device that are kept because callers asked for it",
        value=report.kept_blocks,
    )
    if report.restores is not None:
        yield from _restores(report.restores, tiers)
    if report.disk is not None:
        yield from _disk(report.disk)


def tiers_of(report: KVReport) -> tuple[str, ...]:
    """The tiers that there are, the fastest first."""
    return TIERS[: 1 + (report.restores is not None) + (report.disk is not None)]


def asked_and_found(tokens: PromptTokens, tiers: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Of each tier the prompt tokens that it was asked for, and those that it had."""
    found = {tier: sum(getattr(tokens, tier)) for tier in tiers}
    asked = sum(found.values()) + sum(tokens.missed)
    for tier in tiers:
        yield tier, asked, found[tier]
        asked -= found[tier]


def _hits(report: KVReport, tiers: Sequence[str]) -> Iterator[Metric]:
    labels = ["tier", _CLASS]
    queries = CounterMetricFamily(
        "firsttoken_prefix_cache_queries", "Prompt tokens that a tier was asked for", labels=labels
    )
    hits = CounterMetricFamily("firsttoken_prefix_cache_hits", "Prompt tokens that were found there", labels=labels)
    for name, tokens in zip(CLASS_NAMES, report.tokens, strict=True):
        for tier, asked, found in asked_and_found(tokens, tiers):
            queries.add_metric([tier, name], asked)
            hits.add_metric([tier, name], found)
    yield from (queries, hits)


def _heat(report: KVReport, tiers: Sequence[str]) -> Metric:
    heat = CounterMetricFamily(
        "firsttoken_kv_prompt_tokens",
        "Prompt tokens by where they were found (missed: nowhere) and their position, which is that of the label or "
        "more, and less than the next",
        labels=["found", _CLASS, "position"],
    )
    for name, tokens in zip(CLASS_NAMES, report.tokens, strict=True):
        for kind in (*tiers, "missed"):
            for edge, count in zip(report.edges, getattr(tokens, kind), strict=True):
                heat.add_metric([kind, name, str(edge)], count)
    return heat


def _evictions(report: KVReport) -> Iterator[Metric]:
    shards = CounterMetricFamily(
        "firsttoken_kv_evicted_shards",
        "Shards evicted from the device, by their class and that of the request that they made room for",
        labels=[_CLASS, "by_class"],
    )
    early = CounterMetricFamily(
        "firsttoken_kv_evicted_early",
        "Shards evicted sooner after their last use than their class should be kept (p0 15 min, p1 8 min)",
        labels=[_CLASS],
    )
    for name, row, count in zip(CLASS_NAMES, report.evictions, report.evicted_early, strict=True):
        for by, evicted in zip(CLASS_NAMES, row, strict=True):
            shards.add_metric([name, by], evicted)
        early.add_metric([name], count)
    yield from (shards, early)
    yield _total("kv_evicted_blocks", "KV blocks evicted from the device", report.evicted_blocks)
    yield _total("kv_evicted_kept", "Shards that a caller's hint kept and no tier has kept", report.evicted_kept)


def _restores(report: RestoreReport, tiers: Sequence[str]) -> Iterator[Metric]:
    for name, text, value in (
        ("kv_restores", "Requests whose KV began to be restored from lower tiers", report.restores),
        ("kv_restores_cancelled", "Restores that were given up with their requests", report.cancelled),
        ("kv_restore_seconds", "From a request's start to its last restored block (s)", report.restore_s),
        ("kv_restore_declined_tokens", "Tokens that were sooner computed than restored", report.declined_tokens),
        ("kv_restore_failed_tokens", "Tokens that files were asked for and did not give", report.failed_tokens),
        ("kv_spilled_blocks", "KV blocks copied from the device to host memory", report.spilled_blocks),
        ("kv_unspilled_shards", "Shards evicted from the device before they were copied", report.unspilled_shards),
        ("kv_host_full_shards", "Shards for which host memory had no room", report.full_shards),
        ("kv_host_evicted_blocks", "KV blocks evicted from host memory", report.host_evicted_blocks),
    ):
        yield _total(name, text, value)
    restored = {tier: getattr(report, f"{tier}_tokens") for tier in tiers[1:]}
    yield _labelled("kv_restored_tokens", "Tokens restored to the device, by where from", "tier", restored)
    for name, text, value in (
        ("kv_host_blocks", "KV blocks of host memory in use", report.host_blocks),
        ("kv_host_capacity_blocks", "KV blocks that host memory has", report.host_capacity),
        (
            "kv_host_kept_blocks",
            "KV blocks of host memory that are kept because callers asked",
            report.host_kept_blocks,
        ),
    ):
        yield GaugeMetricFamily(f"firsttoken_{name}", text, value=value)


def _disk(report: DiskReport) -> Iterator[Metric]:
    for name, text, value in (
        ("kv_disk_bytes", "Bytes of the disk tier's files", report.nbytes),
        ("kv_disk_cap_bytes", "Bytes that they may take", report.cap_bytes),
        ("kv_disk_kept_bytes", "Bytes of files that are kept because callers asked for it", report.kept_bytes),
        ("kv_disk_files", "Shards in files that can be found", report.files),
        ("kv_disk_read_only", "1 where another process writes the folder", int(report.read_only)),
    ):
        yield GaugeMetricFamily(f"firsttoken_{name}", text, value=value)
    yield _labelled("kv_disk_reads", "Reads of the disk tier, by how they ended", "outcome", report.reads)
    yield _labelled("kv_disk_writes", "Writes to the disk tier, by how they ended", "outcome", report.writes)
    yield _labelled("kv_disk_errors", "What the system said of the disk tier's files", "error", report.errors)
    yield _total("kv_disk_evicted_files", "Files that made room for others", report.evicted)
    yield _total("kv_disk_damaged_files", "Damaged files found while looking through the folder", report.damaged)


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"firsttoken_{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"firsttoken_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
