"""The result as one self-contained page: no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from firsttoken.diagnose.fit import in_words
from firsttoken.diagnose.histogram import histogram
from firsttoken.diagnose.sample import PHASES

# One hue a layer: blue is the network, orange waiting for the server, green the model's tokens.
COLOURS = {
    "dns": "#9ecae1",
    "tcp": "#6baed6",
    "tls": "#3182bd",
    "ttfb": "#fd8d3c",
    "first_token": "#fdbe85",
    "gaps": "#41ab5d",
    "transfer": "#756bb1",
}
WATERFALL_WIDTH, ROW_HEIGHT, MOST_ROWS = 860, 16, 40
GAPS_WIDTH, GAPS_HEIGHT = 860, 180


def page(result: Mapping[str, Any]) -> str:
    """Of `report.diagnosis`, with the ``url`` and ``date``. All text is escaped: some is the server's."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    samples = result["samples"][:MOST_ROWS]
    return environment.from_string(source).render(
        result=result,
        colours=COLOURS,
        rows=_rows(samples),
        axis=_axis(samples),
        width=WATERFALL_WIDTH,
        height=ROW_HEIGHT * len(samples),
        row_height=ROW_HEIGHT,
        bars=_bars([gap for sample in result["samples"] for gap in sample["gaps_ms"]]),
        gaps_width=GAPS_WIDTH,
        gaps_height=GAPS_HEIGHT,
        columns=("mean", "p50", "p95", "p99", "max"),
        fitted=in_words(result["sweep"]),
    )


def _longest(samples: Sequence[Mapping[str, Any]]) -> float:
    return max((sample["total_ms"] for sample in samples), default=0.0) or 1.0


def _rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a request: its phases one after another."""
    scale = WATERFALL_WIDTH / _longest(samples)
    rows = []
    for number, sample in enumerate(samples):
        begun, boxes = 0.0, []
        for name in PHASES:
            ms = sample["phases"][name]
            boxes.append({"name": name, "x": begun * scale, "width": ms * scale, "ms": ms})
            begun += ms
        rows.append({"y": number * ROW_HEIGHT, "boxes": boxes, "total": sample["total_ms"]})
    return rows


def _axis(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    longest = _longest(samples)
    return [{"x": WATERFALL_WIDTH * part / 5, "ms": longest * part / 5} for part in range(6)]


def _bars(gaps_ms: Sequence[float]) -> list[dict[str, Any]]:
    bins = histogram(gaps_ms)
    most = max((one.count for one in bins), default=1)
    width = GAPS_WIDTH / max(len(bins), 1)
    return [
        {
            "x": number * width,
            "width": width,
            "height": GAPS_HEIGHT * one.count / most,
            "low": one.low_ms,
            "high": one.high_ms,
            "count": one.count,
            "labelled": number % max(len(bins) // 8, 1) == 0,
        }
        for number, one in enumerate(bins)
    ]
