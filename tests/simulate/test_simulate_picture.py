from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from firsttoken.simulate.axes import COLOURS
from firsttoken.simulate.picture import Curve, draw_shares
from firsttoken.simulate.raster import Canvas, text_width


def pixels(png: bytes) -> np.ndarray:
    """Decode what `Canvas.png` writes, checking the format as a reader would."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        chunks[kind] = data
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert form == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_a_line_covers_its_pixels_and_no_others() -> None:
    canvas = Canvas(20, 10)
    canvas.line([(3, 5), (15, 5)], (255, 0, 0), 1)
    found = pixels(canvas.png())
    assert (found[5, 3:16] == (255, 0, 0)).all()
    assert (found[:4] == 255).all()
    assert (found[7:] == 255).all()


def test_what_lies_outside_is_cut_off() -> None:
    canvas = Canvas(8, 8)
    canvas.line([(-50, 4), (50, 4)], (0, 0, 0))
    canvas.line([(100, 100), (200, 100)], (0, 0, 0))
    canvas.text(-3, -3, "ABC")
    canvas.text(7, 7, "Z")
    canvas.text(100, 100, "Z")
    assert (pixels(canvas.png())[4] == 0).all()


def test_text_is_drawn_by_the_font() -> None:
    canvas = Canvas(text_width("Té", 1), 8)
    canvas.text(0, 0, "Té", scale=1)
    dark = (pixels(canvas.png()) == 0).all(axis=2)
    assert ["".join(".#"[int(dot)] for dot in row[:5]) for row in dark[:3]] == ["#####", "#.#.#", "..#.."]
    other = Canvas(text_width("T?", 1), 8)
    other.text(0, 0, "T?", scale=1)
    assert canvas.png() == other.png()


def count(image: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((image == colour).all(axis=2).sum())


def test_each_curve_is_drawn_in_each_panel(tmp_path: Path) -> None:
    fast, slow = Curve("fast", [1.0, 2.0, 3.0]), Curve("slow", [100.0, 200.0, 300.0])
    draw_shares(tmp_path / "a" / "one.png", "title", {"TTFT": [fast, slow]})
    draw_shares(tmp_path / "two.png", "title", {"TTFT": [fast, slow], "ITL": [Curve("fast", []), slow]})
    one, two = (pixels((tmp_path / name).read_bytes()) for name in ("a/one.png", "two.png"))
    assert two.shape[1] == 2 * one.shape[1]
    assert count(two[:, : one.shape[1]], COLOURS[0]) == count(one, COLOURS[0]) > 300
    assert count(two[:, one.shape[1] :], COLOURS[0]) == 0  # no values
    assert count(two[:, one.shape[1] :], COLOURS[1]) > 200
    # The slower curve lies above.
    rows = [np.argwhere((one[120:] == COLOURS[number]).all(axis=2))[:, 0].mean() for number in (0, 1)]
    assert rows[1] < rows[0]


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [5.0], [1e-9, 1e9]])
def test_odd_values_make_a_picture_too(tmp_path: Path, values: list[float]) -> None:
    draw_shares(tmp_path / "odd.png", "", {"TTFT": [Curve("odd", values)]})
    assert pixels((tmp_path / "odd.png").read_bytes()).shape[2] == 3
