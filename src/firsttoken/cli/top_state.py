"""What a terminal's picture is made from: the latest frame, and a little of those before."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from firsttoken.core.service import CLASS_NAMES

# Frames whose figures are kept for lines; a terminal is seldom wider.
HISTORY = 300
STEPS_MS = 10_000.0
REQUESTS = 50
# A server that sends nonsense must not fill the memory here.
MAX_BARS = 20_000
_LINES = ("tokens/s", "running", "waiting", "TTFT p99", "ITL p99")


@dataclass(slots=True)
class LiveState:
    """``bars`` are steps as `server.dashboard.steps.FIELDS` says, by those names."""

    frames: int = 0
    frame: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    kv: dict[str, Any] | None = None
    fields: list[str] = field(default_factory=list)
    bars: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_BARS))
    requests: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=REQUESTS))
    lines: dict[str, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=HISTORY) for name in _LINES},
    )

    def add(self, frame: dict[str, Any]) -> None:
        """The newest frame. The first of a connection tells the last steps and requests again."""
        self.frames += 1
        self.frame = frame
        if "step_fields" in frame:
            self.fields = frame["step_fields"]
            self.bars.clear()
            self.requests.clear()
        self.engine = frame.get("engine") or self.engine
        self.kv = frame.get("kv") or self.kv
        self.bars.extend(dict(zip(self.fields, row, strict=True)) for row in frame["steps"])
        while self.bars and self.bars[0]["end"] < frame["now_ms"] - STEPS_MS:
            self.bars.popleft()
        self.requests.extend(frame["requests"])
        self._extend_lines(frame)

    def _extend_lines(self, frame: dict[str, Any]) -> None:
        values = {
            "tokens/s": frame["rates"]["output_tokens_per_s"],
            "running": frame["running"],
            "waiting": frame["waiting"],
            "TTFT p99": self.worst("ttft_ms"),
            "ITL p99": self.worst("itl_ms"),
        }
        for name, value in values.items():
            self.lines[name].append(math.nan if value is None else value)

    def worst(self, kind: str) -> float | None:
        """The highest p99 of all classes."""
        found = [self.frame["classes"][name][kind]["p99"] for name in CLASS_NAMES]
        return max((value for value in found if value is not None), default=None)

    def summary(self, url: str) -> dict[str, Any]:
        """The whole, as one object: the last frame, and what only the first one of a connection tells."""
        return {
            "url": url,
            **self.frame,
            "engine": self.engine or None,
            "kv": self.kv,
            "step_fields": self.fields,
            "steps": [list(bar.values()) for bar in self.bars],
            "requests": list(self.requests),
        }
