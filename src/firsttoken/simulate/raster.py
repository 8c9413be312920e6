"""A small canvas for diagrams: smooth lines, a bitmap font, PNG. It spares a plotting library for one picture."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

Colour = tuple[int, int, int]
Point = tuple[float, float]

WHITE: Colour = (255, 255, 255)
GLYPH_WIDTH, GLYPH_HEIGHT = 5, 8
# Five columns of a glyph, each a byte whose lowest bit is the top row; characters from the space on.
_FONT = bytes.fromhex(
    "0000000000" "00005f0000" "0007000700" "147f147f14" "242a7f2a12" "2313086462" "3649562050" "0008070300"
    "001c224100" "0041221c00" "2a1c7f1c2a" "08083e0808" "0080703000" "0808080808" "0000606000" "2010080402"
    "3e5149453e" "00427f4000" "7249494946" "2141494d33" "1814127f10" "2745454539" "3c4a494931" "4121110907"
    "3649494936" "464949291e" "0000140000" "0040340000" "0008142241" "1414141414" "0041221408" "0201590906"
    "3e415d594e" "7c1211127c" "7f49494936" "3e41414122" "7f4141413e" "7f49494941" "7f09090901" "3e41415173"
    "7f0808087f" "00417f4100" "2040413f01" "7f08142241" "7f40404040" "7f021c027f" "7f0408107f" "3e4141413e"
    "7f09090906" "3e4151215e" "7f09192946" "2649494932" "03017f0103" "3f4040403f" "1f2040201f" "3f4038403f"
    "6314081463" "0304780403" "6159494d43" "007f414141" "0204081020" "004141417f" "0402010204" "4040404040"
    "0003070800" "2054547840" "7f28444438" "3844444428" "384444287f" "3854545418" "00087e0902" "18a4a49c78"
    "7f08040478" "00447d4000" "2040403d00" "7f10284400" "00417f4000" "7c04780478" "7c08040478" "3844444438"
    "fc18242418" "18242418fc" "7c08040408" "4854545424" "04043f4424" "3c4040207c" "1c2040201c" "3c4030403c"
    "4428102844" "4c9090907c" "4464544c44"
)  # fmt: skip
_UNKNOWN = ord("?") - ord(" ")


class Canvas:
    """Pixels with the origin at the top left; coordinates are those of pixel centres."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._pixels = np.full((height, width, 3), WHITE, dtype=np.float64)

    def line(self, points: Sequence[Point], colour: Colour, width: float = 1.0) -> None:
        """A polyline with smooth edges; what lies outside is cut off."""
        cover = np.zeros((self.height, self.width))
        for (x0, y0), (x1, y1) in pairwise(points):
            reach = width / 2 + 1
            left, right = _span(x0, x1, reach, self.width)
            top, bottom = _span(y0, y1, reach, self.height)
            ys, xs = np.mgrid[top:bottom, left:right]
            length = (x1 - x0) ** 2 + (y1 - y0) ** 2
            along = ((xs - x0) * (x1 - x0) + (ys - y0) * (y1 - y0)) / length if length else np.zeros(xs.shape)
            along = np.clip(along, 0, 1)
            distance = np.hypot(xs - x0 - along * (x1 - x0), ys - y0 - along * (y1 - y0))
            part = cover[top:bottom, left:right]
            np.maximum(part, np.clip(width / 2 + 0.5 - distance, 0, 1), out=part)
        self._pixels += cover[:, :, None] * (np.array(colour) - self._pixels)

    def text(self, x: int, y: int, text: str, colour: Colour = (0, 0, 0), scale: int = 2) -> None:
        """``y`` is the top; characters that the font lacks become question marks."""
        for number, character in enumerate(text):
            left = x + number * (GLYPH_WIDTH + 1) * scale
            glyph = np.kron(_glyph(character), np.ones((scale, scale), dtype=bool))
            part = self._pixels[max(y, 0) : y + glyph.shape[0], max(left, 0) : left + glyph.shape[1]]
            part[glyph[: part.shape[0], : part.shape[1]]] = colour

    def png(self) -> bytes:
        """The picture as a PNG file."""
        pixels = np.rint(self._pixels).astype(np.uint8)
        rows = np.concatenate([np.zeros((self.height, 1), np.uint8), pixels.reshape(self.height, -1)], axis=1)
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)

    def save(self, path: Path) -> None:
        """Raises `OSError`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.png())


def text_width(text: str, scale: int = 2) -> int:
    """Pixels that `Canvas.text` takes for it."""
    return max(len(text) * (GLYPH_WIDTH + 1) - 1, 0) * scale


def _span(low: float, high: float, reach: float, size: int) -> tuple[int, int]:
    low, high = min(low, high), max(low, high)
    return min(max(int(low - reach), 0), size), min(max(int(high + reach) + 1, 0), size)


def _glyph(character: str) -> npt.NDArray[np.bool_]:
    place = ord(character) - ord(" ")
    if not 0 <= place < len(_FONT) // GLYPH_WIDTH:
        place = _UNKNOWN
    columns = np.frombuffer(_FONT, np.uint8, GLYPH_WIDTH, place * GLYPH_WIDTH)
    return np.unpackbits(columns[None, :], axis=0, bitorder="little").astype(bool)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
