"""The picture of a simulation: up to which latency each share of the requests (or gaps) got."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from firsttoken.observability.percentiles import percentile
from firsttoken.simulate.axes import (
    BOTTOM,
    GRID,
    INK,
    LEFT,
    LINE_HEIGHT,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    RIGHT,
    TOP,
    Milliseconds,
    colour,
    legend,
)
from firsttoken.simulate.raster import Canvas, text_width

# Shares on the horizontal axis, which gives each further nine the same room.
TICKS = (0.0, 0.5, 0.9, 0.99, 0.999)
POINTS = 160


@dataclass(frozen=True)
class Curve:
    """``values`` in ms, ascending."""

    label: str
    values: Sequence[float]


def draw_shares(path: Path, title: str, panels: Mapping[str, Sequence[Curve]]) -> None:
    """A panel for each kind of latency, with one line a curve; all panels have the same labels in the same order.

    Raises `OSError`.
    """
    labels = [curve.label for curve in next(iter(panels.values()))]
    top = LINE_HEIGHT * (len(labels) + 2)
    canvas = Canvas(len(panels) * PANEL_WIDTH, top + PANEL_HEIGHT)
    legend(canvas, title, labels)
    for number, (name, curves) in enumerate(panels.items()):
        _Panel(canvas, number * PANEL_WIDTH, top, curves).draw(name)
    canvas.save(path)


class _Panel:
    """Shares to the right, milliseconds upwards."""

    def __init__(self, canvas: Canvas, left: int, top: int, curves: Sequence[Curve]) -> None:
        self._canvas = canvas
        self._left, self._right = left + LEFT, left + PANEL_WIDTH - RIGHT
        self._top, self._bottom = top + TOP, top + PANEL_HEIGHT - BOTTOM
        self._curves = [(number, curve) for number, curve in enumerate(curves) if curve.values]
        # From the fastest tenth on: a few that are far faster would only take room from the others.
        lows = [percentile(curve.values, 0.1) for _, curve in self._curves]
        highs = [percentile(curve.values, TICKS[-1]) for _, curve in self._curves]
        self._ms = Milliseconds(min(lows, default=1.0), max(highs, default=1.0), self._top, self._bottom)

    def draw(self, name: str) -> None:
        self._axes(name)
        for number, curve in self._curves:
            last = _nines(TICKS[-1])
            shares = [1 - 10 ** (-last * step / POINTS) for step in range(POINTS + 1)]
            points = [(self._x(share), self._ms.y(percentile(curve.values, share))) for share in shares]
            self._canvas.line(points, colour(number), 2.5)

    def _axes(self, name: str) -> None:
        canvas = self._canvas
        canvas.text(self._left, self._top - 28, f"{name} (ms)", INK)
        for share in TICKS:
            x = self._x(share)
            canvas.line([(x, self._top), (x, self._bottom)], GRID)
            label = f"{100 * share:g}%"
            canvas.text(round(x - text_width(label) / 2), self._bottom + 10, label, INK)
        self._ms.draw(canvas, self._left, self._right)

    def _x(self, share: float) -> float:
        return self._left + (self._right - self._left) * _nines(share) / _nines(TICKS[-1])


def _nines(share: float) -> float:
    """0 for 0, 1 for 0.9, 2 for 0.99."""
    return -math.log10(1 - share)
