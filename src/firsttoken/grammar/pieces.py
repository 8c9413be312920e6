"""Into how many pieces each token cuts a JSON text, which bounds how much farther from its end it may lead (`growth`).

Inside a string nothing but its end begins anything: there a token of sixteen colons is part of one run. So all of this
is told for each place that a token may begin at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firsttoken.grammar.growth import BEGINNERS

# Where a token begins: outside of strings, inside of one, and there behind a backslash. A text begins outside.
OUTSIDE, INSIDE, ESCAPED = range(3)
PLACES = 3


@dataclass(frozen=True)
class Pieces:
    """Of each token, by the place where it begins (arrays [`PLACES`, V]): the number of its pieces (``count``), whether
    its first and its last byte are part of a run, and the place ``after`` it. ``longer[place]`` are masks
    (int32 [most, ceil(V / 32)]) of the tokens of more than so many pieces: to look for one among those that a mask
    allows takes some microseconds."""

    count: NDArray[np.int32]
    begins_in_run: NDArray[np.bool_]
    ends_in_run: NDArray[np.bool_]
    after: NDArray[np.uint8]
    longer: list[NDArray[np.int32]]

    @classmethod
    def of(cls, tokens: list[bytes]) -> Pieces:
        lengths = np.array([len(spelt) for spelt in tokens], dtype=np.int64)
        order = np.argsort(-lengths, kind="stable")
        starts = (np.cumsum(lengths) - lengths)[order]
        flat = np.frombuffer(b"".join(tokens), dtype=np.uint8)
        walks = [_Walk(len(tokens), place) for place in range(PLACES)]
        for index in range(int(lengths.max(initial=0))):
            count = np.count_nonzero(lengths > index)  # the first of them in the order
            byte = flat[starts[:count] + index]
            for walk in walks:
                walk.go_on(byte)
        back = np.argsort(order)
        counts = np.array([walk.count[back] for walk in walks])
        return cls(
            count=counts,
            begins_in_run=np.array([walk.begins_in_run[back] for walk in walks]),
            ends_in_run=np.array([walk.in_run[back] for walk in walks]),
            after=np.array([walk.place[back] for walk in walks]),
            longer=[_longer(count) for count in counts],
        )


class _Walk:
    """Over all tokens at once, the longest first, byte by byte, each of them from one place."""

    def __init__(self, tokens: int, place: int) -> None:
        self.place = np.full(tokens, place, dtype=np.uint8)
        self.count = np.zeros(tokens, dtype=np.int32)
        self.in_run = np.zeros(tokens, dtype=np.bool_)
        self.begins_in_run = self.in_run

    def go_on(self, byte: NDArray[np.uint8]) -> None:
        """The next byte of the first of them; the others are over."""
        some = slice(len(byte))
        step = 256 * self.place[some].astype(np.intp) + byte
        begins = _BEGINS[step]
        self.count[some] += begins | ~self.in_run[some]
        np.logical_not(begins, out=self.in_run[some])
        self.place[some] = _NEXT[step]
        if self.begins_in_run is self.in_run:
            self.begins_in_run = self.in_run.copy()  # after the first byte


def _tables() -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """At 256 times a place plus a byte: whether that is a piece of its own, and the place behind it."""
    begins = np.zeros((PLACES, 256), dtype=np.bool_)
    begins[OUTSIDE, list(BEGINNERS)] = True
    begins[INSIDE, ord('"')] = True
    after = np.repeat(np.array([[OUTSIDE], [INSIDE], [INSIDE]], dtype=np.uint8), 256, axis=1)
    after[OUTSIDE, ord('"')] = INSIDE
    after[INSIDE, ord('"')] = OUTSIDE
    after[INSIDE, ord("\\")] = ESCAPED
    return begins.ravel(), after.ravel()


_BEGINS, _NEXT = _tables()


def _longer(count: NDArray[np.int32]) -> NDArray[np.int32]:
    padded = np.zeros(32 * -(-len(count) // 32), dtype=np.int32)
    padded[: len(count)] = count
    masks = [np.packbits(padded > pieces, bitorder="little").view(np.int32) for pieces in range(int(padded.max()))]
    return np.array(masks, dtype=np.int32).reshape(-1, len(padded) // 32)
