"""Surfaces over length and shard size, drawn as a grid seen from above one corner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from firsttoken.simulate.axes import GRID, INK, colour
from firsttoken.simulate.raster import Canvas, Colour, text_width

WIDTH, HEIGHT, TOP = 860, 640, 60
# Of a step along either axis in the picture, and the height of the highest point.
_RIGHT, _DOWN, _HEIGHT = 46.0, 21.0, 230.0
_LOW: Colour = (0, 114, 178)
_HIGH: Colour = (213, 94, 0)
_DECADES = 4.0


@dataclass(frozen=True)
class Surface:
    """``values[i][j]``, not negative, at the ``i``-th length and the ``j``-th size. Heights are logarithmic."""

    title: str
    values: Sequence[Sequence[float]]


def draw_surfaces(
    path: Path, title: str, lengths: Sequence[str], sizes: Sequence[str], surfaces: Sequence[Surface]
) -> None:
    """A panel for each; in each, a dot at every length's least. Raises `OSError`."""
    canvas = Canvas(WIDTH * len(surfaces), TOP + HEIGHT)
    canvas.text(16, 14, title, INK)
    for number, surface in enumerate(surfaces):
        _Panel(canvas, number * WIDTH, surface, lengths, sizes).draw()
    canvas.save(path)


class _Panel:
    def __init__(
        self, canvas: Canvas, left: int, surface: Surface, lengths: Sequence[str], sizes: Sequence[str]
    ) -> None:
        self._canvas, self._left, self._surface = canvas, left, surface
        self._lengths, self._sizes = lengths, sizes
        self._most = max(max(row) for row in surface.values)

    def draw(self) -> None:
        values = self._surface.values
        self._canvas.text(self._left + 24, TOP + 4, f"{self._surface.title}, up to {self._most:.3g}", INK)
        self._floor()
        # From the back to the front, so that what is near is drawn last.
        for i in range(len(self._lengths)):
            for j in range(len(self._sizes)):
                for a, b in ((i + 1, j), (i, j + 1)):
                    if a < len(self._lengths) and b < len(self._sizes):
                        level = (self._share(values[i][j]) + self._share(values[a][b])) / 2
                        line = [self._at(i, j, values[i][j]), self._at(a, b, values[a][b])]
                        self._canvas.line(line, _blend(level), 2.5)
        for i, row in enumerate(values):
            j = min(range(len(row)), key=row.__getitem__)
            x, y = self._at(i, j, row[j])
            self._canvas.line([(x - 0.1, y), (x + 0.1, y)], colour(2), 11)

    def _floor(self) -> None:
        last, end = len(self._lengths) - 1, len(self._sizes) - 1
        for i, label in enumerate(self._lengths):
            self._canvas.line([self._at(i, 0, 0), self._at(i, end, 0)], GRID)
            x, y = self._at(i, 0, 0)
            self._canvas.text(round(x) - 14 - text_width(label), round(y), label, INK)
        for j, label in enumerate(self._sizes):
            self._canvas.line([self._at(0, j, 0), self._at(last, j, 0)], GRID)
            x, y = self._at(last, j, 0)
            self._canvas.text(round(x) - 8, round(y) + 14, label, INK)
        self._canvas.text(self._left + 24, TOP + 34, "down to the left: tokens of the prefix", INK)
        self._canvas.text(
            self._left + 24, TOP + 60, "down to the right: tokens a shard; dots: the least of each length", INK
        )

    def _share(self, value: float) -> float:
        """Of the height: the last `_DECADES` below the most."""
        if value <= 0:
            return 0.0
        return max(0.0, 1 + math.log10(value / self._most) / _DECADES)

    def _at(self, i: int, j: int, value: float) -> tuple[float, float]:
        x = self._left + 400 + (j - i) * _RIGHT * 0.8 + j * 8
        return x, TOP + 290 + (i + j) * _DOWN - _HEIGHT * self._share(value)


def _blend(level: float) -> Colour:
    red, green, blue = (round(low + (high - low) * level) for low, high in zip(_LOW, _HIGH, strict=True))
    return red, green, blue
