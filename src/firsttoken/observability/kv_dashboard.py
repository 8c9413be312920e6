"""The KV cache's totals as one JSON object, for a dashboard."""

from __future__ import annotations

from typing import Any

import msgspec

from firsttoken.core.service import CLASS_NAMES
from firsttoken.observability.kv_metrics import asked_and_found, tiers_of
from firsttoken.transport.kv_report import KVReport
from firsttoken.transport.messages import EngineInfo, EngineStats


def kv_dashboard(info: EngineInfo, stats: EngineStats, report: KVReport | None) -> dict[str, Any]:
    """Blocks as of now, all else totals since the start; None where nothing was told yet, or there is no such tier.

    ``hits[class][tier]`` has the prompt tokens that a tier was asked for and found, and their ratio (None of nothing).
    ``heat.tokens[class][found][i]`` counts prompt tokens from position ``heat.positions[i]`` on.
    """
    free = max(stats.kv_total - stats.kv_used - stats.kv_cached, 0)
    told: dict[str, Any] = {
        "blocks": {"total": stats.kv_total, "used": stats.kv_used, "cached": stats.kv_cached, "free": free},
        "block_tokens": info.block_tokens,
        "bytes_per_block": info.bytes_per_block,
    }
    if report is None:
        return told | dict.fromkeys(("hits", "heat", "misses", "evictions", "hints", "restores", "disk"))
    tiers = tiers_of(report)
    by_class = dict(zip(CLASS_NAMES, report.tokens, strict=True))
    hits = {name: {one[0]: _ratio(*one[1:]) for one in asked_and_found(each, tiers)} for name, each in by_class.items()}
    heat = {name: {kind: getattr(each, kind) for kind in (*tiers, "missed")} for name, each in by_class.items()}
    return told | {
        "hits": hits,
        "heat": {"positions": report.edges, "tokens": heat},
        "misses": report.misses,
        "evictions": {
            "blocks": report.evicted_blocks,
            "shards": {
                name: dict(zip(CLASS_NAMES, row, strict=True))
                for name, row in zip(CLASS_NAMES, report.evictions, strict=True)
            },
            "early": dict(zip(CLASS_NAMES, report.evicted_early, strict=True)),
            "kept": report.evicted_kept,
        },
        "hints": {"kept": report.hints_kept, "ignored": report.hints_ignored, "kept_blocks": report.kept_blocks},
        "restores": msgspec.to_builtins(report.restores),
        "disk": msgspec.to_builtins(report.disk),
    }


def _ratio(asked: int, found: int) -> dict[str, Any]:
    return {"asked": asked, "found": found, "ratio": found / asked if asked else None}
