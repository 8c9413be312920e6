"""What a live picture shows of one moment, as JSON objects. Nothing here knows who looks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.errors import FirstTokenError
from firsttoken.core.service import CLASS_NAMES
from firsttoken.observability.kv_dashboard import kv_dashboard
from firsttoken.observability.live import RATE_S, WINDOW_S
from firsttoken.version import __version__

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.observability.recent import EndedRequest

# Percentiles of a minute need not be put together at every tick: that is half of what a tick takes.
WINDOWS_NS = 200 * NS_PER_MS


class Snapshots:
    """Looks at ``llm`` as often as it is asked to."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._engine: dict[str, Any] | None = None
        self._windows: Mapping[str, dict[str, Any]] = {}
        self._rates: dict[str, float | None] = {}
        self._windows_ns = -WINDOWS_NS

    def now(self) -> dict[str, Any]:
        """Everything but steps, requests and the cache's totals."""
        llm, stats = self._llm, self._llm.metrics.stats  # which are those of nothing once the engine is dead
        health = llm.progress()
        classes = self._classes()
        for name, told in zip(CLASS_NAMES, stats.classes, strict=False):
            classes[name] |= {
                "running": told.running,
                "waiting": told.waiting,
                "turned_away": sum(told.refused.values()),
                "predicted_ttft_s": told.predicted_ttft_s,
                "until_missed_s": told.until_missed_s,
            }
        free = max(stats.kv_total - stats.kv_used - stats.kv_cached, 0)
        return {
            "now_ms": round(now_ns() / NS_PER_MS, 3),
            "unix_ms": round(time.time() * 1e3),
            "state": "draining" if llm.is_draining and health.state != "dead" else health.state,
            "error": self._error(),
            "heartbeat_age_ms": round(health.heartbeat_age_ms, 1),
            "step_age_ms": None if health.step_age_ms is None else round(health.step_age_ms, 1),
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_blocks": {"total": stats.kv_total, "used": stats.kv_used, "cached": stats.kv_cached, "free": free},
            "preemptions": stats.preemptions,
            "window_s": WINDOW_S,
            "rate_s": RATE_S,
            "outcomes": llm.metrics.live.outcomes(),
            "classes": classes,
            "rates": self._rates,
        }

    def engine(self) -> dict[str, Any] | None:
        """What does not change; None of an engine that died before anybody looked."""
        try:
            info = self._llm.info
        except FirstTokenError:
            return self._engine
        self._engine = {
            "version": __version__,
            "model": self._llm.model_name,
            "device": info.device if info.device == "cpu" else info.device_name or info.device,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "block_tokens": info.block_tokens,
            "bytes_per_block": info.bytes_per_block,
        }
        return self._engine

    def kv(self) -> dict[str, Any] | None:
        """The cache's totals, as ``GET /v1/kv`` has them; None once the engine is dead."""
        try:
            return kv_dashboard(self._llm.info, self._llm.stats, self._llm.kv_report)
        except FirstTokenError:
            return None

    def _classes(self) -> dict[str, dict[str, Any]]:
        now = now_ns()
        if now - self._windows_ns >= WINDOWS_NS:
            live = self._llm.metrics.live
            self._windows, self._windows_ns = live.read(), now
            self._rates = live.rates(self._windows)
        return {name: dict(window) for name, window in self._windows.items()}

    def _error(self) -> str | None:
        error = self._llm.error
        return None if error is None else str(error)


def request_line(ended: EndedRequest) -> dict[str, Any]:
    """One ended request in a list of them."""
    return {
        "id": ended.id,
        "route": ended.route,
        "service_class": ended.service_class,
        "unix_ms": ended.received_unix_ns // NS_PER_MS,
        "prompt_tokens": ended.prompt_tokens,
        "output_tokens": ended.output_tokens,
        "ttft_ms": None if ended.ttft_ns is None else round(ended.ttft_ns / NS_PER_MS, 3),
        "total_ms": round((ended.ended_ns - ended.received_ns) / NS_PER_MS, 3),
        "outcome": ended.outcome,
        "finish_reason": ended.finish_reason,
        "status": ended.status,
        "error": ended.error,
    }
