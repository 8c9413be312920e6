"""The picture of a simulation: up to which latency each share of the requests (or gaps) got."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from firsttoken.observability.percentiles import percentile
from firsttoken.simulate.raster import Canvas, Colour, text_width

# Okabe and Ito's colours, told apart by most kinds of colour vision.
COLOURS: tuple[Colour, ...] = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (0, 0, 0),
)
GRID: Colour = (222, 222, 222)
INK: Colour = (60, 60, 60)
# Shares on the horizontal axis, which gives each further nine the same room.
TICKS = (0.0, 0.5, 0.9, 0.99, 0.999)
POINTS = 160
PANEL_WIDTH, PANEL_HEIGHT = 500, 400
LEFT, RIGHT, TOP, BOTTOM = 88, 40, 44, 64
LINE_HEIGHT = 26


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
    canvas.text(16, 12, title, INK)
    for number, label in enumerate(labels):
        y = 12 + LINE_HEIGHT * (number + 1)
        canvas.line([(16, y + 8), (52, y + 8)], _colour(number), 3)
        canvas.text(64, y, label, INK)
    for number, (name, curves) in enumerate(panels.items()):
        _Panel(canvas, number * PANEL_WIDTH, top, curves).draw(name)
    canvas.save(path)


class _Panel:
    """Shares to the right, milliseconds upwards on a logarithmic scale of whole decades."""

    def __init__(self, canvas: Canvas, left: int, top: int, curves: Sequence[Curve]) -> None:
        self._canvas = canvas
        self._left, self._right = left + LEFT, left + PANEL_WIDTH - RIGHT
        self._top, self._bottom = top + TOP, top + PANEL_HEIGHT - BOTTOM
        self._curves = [(number, curve) for number, curve in enumerate(curves) if curve.values]
        # From the fastest tenth on: a few that are far faster would only take room from the others.
        lows = [percentile(curve.values, 0.1) for _, curve in self._curves]
        highs = [percentile(curve.values, TICKS[-1]) for _, curve in self._curves]
        self._low = math.floor(math.log10(max(min(lows, default=1.0), 1e-3)))
        self._high = max(math.ceil(math.log10(max(*highs, 1e-3) if highs else 1.0)), self._low + 1)

    def draw(self, name: str) -> None:
        self._axes(name)
        for number, curve in self._curves:
            last = _nines(TICKS[-1])
            shares = [1 - 10 ** (-last * step / POINTS) for step in range(POINTS + 1)]
            points = [(self._x(share), self._y(percentile(curve.values, share))) for share in shares]
            self._canvas.line(points, _colour(number), 2.5)

    def _axes(self, name: str) -> None:
        canvas = self._canvas
        canvas.text(self._left, self._top - 28, f"{name} (ms)", INK)
        for share in TICKS:
            x = self._x(share)
            canvas.line([(x, self._top), (x, self._bottom)], GRID)
            label = f"{100 * share:g}%"
            canvas.text(round(x - text_width(label) / 2), self._bottom + 10, label, INK)
        for decade in range(self._low, self._high + 1):
            for multiple in (1, 2, 5):
                if decade == self._high and multiple > 1:
                    break
                y = self._y(multiple * 10.0**decade)
                canvas.line([(self._left, y), (self._right, y)], GRID)
                label = f"{multiple * 10.0**decade:g}"
                canvas.text(self._left - 10 - text_width(label), round(y) - 7, label, INK)
        canvas.line([(self._left, self._top), (self._left, self._bottom), (self._right, self._bottom)], INK)

    def _x(self, share: float) -> float:
        return self._left + (self._right - self._left) * _nines(share) / _nines(TICKS[-1])

    def _y(self, ms: float) -> float:
        height = (math.log10(max(ms, 1e-3)) - self._low) / (self._high - self._low)
        return self._bottom - (self._bottom - self._top) * min(max(height, 0.0), 1.0)


def _nines(share: float) -> float:
    """0 for 0, 1 for 0.9, 2 for 0.99."""
    return -math.log10(1 - share)


def _colour(number: int) -> Colour:
    return COLOURS[number % len(COLOURS)]
