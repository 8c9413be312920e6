"""The picture of a frontier: requests within target to the right, the latest percent upwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

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
    legend_line,
)
from firsttoken.simulate.frontier import Latency, Point, pareto
from firsttoken.simulate.raster import Canvas, Colour, text_width

SCALE = 1.5  # a panel here has few lines of text and many curves
DOT = 7
TICKS = 5
FRONT: Colour = (150, 150, 150)
FRONT_WIDTH = 9.0


def draw_frontier(path: Path, title: str, points: Sequence[Point]) -> None:
    """A panel for the first tokens and one for the gaps, with a curve a policy and a dot a load; below all of them,
    broad and grey, the Pareto frontier of each panel. Raises `OSError`."""
    curves: dict[str, list[Point]] = {}
    for point in points:
        curves.setdefault(point.policy, []).append(point)
    top = LINE_HEIGHT * (len(curves) + 3)
    width, height = round(SCALE * PANEL_WIDTH), round(SCALE * PANEL_HEIGHT)
    canvas = Canvas(2 * width, top + height)
    legend(canvas, title, list(curves))
    legend_line(canvas, len(curves), "Pareto frontier", FRONT, FRONT_WIDTH)
    panels: tuple[tuple[str, Latency], ...] = (("TTFT p99 (ms)", "ttft_p99_ms"), ("ITL p99 (ms)", "itl_p99_ms"))
    for number, (name, latency) in enumerate(panels):
        _Panel(canvas, number * width, top, width, height, points, latency).draw(name, curves)
    canvas.save(path)


class _Panel:
    def __init__(
        self, canvas: Canvas, left: int, top: int, width: int, height: int, points: Sequence[Point], latency: Latency
    ) -> None:
        self._canvas, self._latency = canvas, latency
        self._left, self._right = left + LEFT, left + width - RIGHT
        self._top, self._bottom = top + TOP, top + height - BOTTOM
        self._points = points
        values = [self._value(point) for point in points]
        self._ms = Milliseconds(min(values), max(values), self._top, self._bottom)
        self._most = _round_up(max(point.goodput_rps for point in points))

    def draw(self, name: str, curves: dict[str, list[Point]]) -> None:
        self._axes(name)
        front = [self._at(point) for point in pareto(self._points, self._latency)]
        self._canvas.line(front, FRONT, FRONT_WIDTH)
        # The first curve last, on top of those that coincide with it.
        for number, points in reversed(list(enumerate(curves.values()))):
            places = [self._at(point) for point in points]
            self._canvas.line(places, colour(number), 2.5)
            for place in places:
                self._canvas.line([place, place], colour(number), DOT)

    def _axes(self, name: str) -> None:
        canvas = self._canvas
        canvas.text(self._left, self._top - 28, name, INK)
        for step in range(TICKS + 1):
            rate = self._most * step / TICKS
            x = self._x(rate)
            canvas.line([(x, self._top), (x, self._bottom)], GRID)
            tick = f"{rate:g}"
            canvas.text(round(x - text_width(tick) / 2), self._bottom + 10, tick, INK)
        words = "requests/s within target"
        canvas.text(self._right - text_width(words), self._bottom + 36, words, INK)
        self._ms.draw(canvas, self._left, self._right)

    def _at(self, point: Point) -> tuple[float, float]:
        return self._x(point.goodput_rps), self._ms.y(self._value(point))

    def _value(self, point: Point) -> float:
        value: float = getattr(point, self._latency)
        return value

    def _x(self, rate: float) -> float:
        return self._left + (self._right - self._left) * rate / self._most


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power >= value)
