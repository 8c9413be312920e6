"""What the pictures share: colours, and an axis of milliseconds on a logarithmic scale of whole decades."""

from __future__ import annotations

import math

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
PANEL_WIDTH, PANEL_HEIGHT = 500, 400
LEFT, RIGHT, TOP, BOTTOM = 88, 40, 44, 64
LINE_HEIGHT = 26
LEAST_MS = 1e-3


def colour(number: int) -> Colour:
    return COLOURS[number % len(COLOURS)]


def legend(canvas: Canvas, title: str, labels: list[str]) -> None:
    """The title, and for each label a stroke of its colour and its name: lines of ``LINE_HEIGHT``."""
    canvas.text(16, 12, title, INK)
    for number, label in enumerate(labels):
        legend_line(canvas, number, label, colour(number), 3)


def legend_line(canvas: Canvas, number: int, label: str, ink: Colour, width: float) -> None:
    y = 12 + LINE_HEIGHT * (number + 1)
    canvas.line([(16, y + 8), (52, y + 8)], ink, width)
    canvas.text(64, y, label, INK)


class Milliseconds:
    """Upwards between two heights of a canvas, in whole decades from ``low`` to ``high`` or beyond."""

    def __init__(self, low: float, high: float, top: int, bottom: int) -> None:
        self._top, self._bottom = top, bottom
        self._low = math.floor(math.log10(max(low, LEAST_MS)))
        self._high = max(math.ceil(math.log10(max(high, LEAST_MS))), self._low + 1)

    def y(self, ms: float) -> float:
        """What lies beyond the ends is drawn at them."""
        height = (math.log10(max(ms, LEAST_MS)) - self._low) / (self._high - self._low)
        return self._bottom - (self._bottom - self._top) * min(max(height, 0.0), 1.0)

    def draw(self, canvas: Canvas, left: int, right: int) -> None:
        for decade in range(self._low, self._high + 1):
            for multiple in (1, 2, 5):
                if decade == self._high and multiple > 1:
                    break
                y = self.y(multiple * 10.0**decade)
                canvas.line([(left, y), (right, y)], GRID)
                label = f"{multiple * 10.0**decade:g}"
                canvas.text(left - 10 - text_width(label), round(y) - 7, label, INK)
        canvas.line([(left, self._top), (left, self._bottom), (right, self._bottom)], INK)
