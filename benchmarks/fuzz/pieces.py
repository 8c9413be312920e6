"""Bytes of a fuzzer read as numbers, texts and cuts, so that near inputs stay near."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class Pieces:
    """Reads from the front; where nothing is left it gives zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        at = self._at
        self._at += 1
        return self._data[at] if at < len(self._data) else 0

    def below(self, limit: int) -> int:
        """A number from 0 to ``limit`` - 1, ``limit`` at most 256."""
        return self.byte() % limit

    def take(self, size: int) -> bytes:
        """So many bytes, or as many as there are."""
        found = self._data[self._at : self._at + size]
        self._at += size
        return found

    def rest(self) -> bytes:
        found = self._data[self._at :]
        self._at = len(self._data)
        return found

    def cut(self, raw: bytes, cuts: int) -> Iterator[bytes]:
        """``raw`` in pieces, of which up to ``cuts`` are as long as the input says."""
        at = 0
        for _ in range(cuts):
            size = self.byte()
            yield raw[at : at + size]
            at += size
        yield raw[at:]

    def text(self) -> str:
        """A few characters, whatever they are."""
        return self.take(self.below(12)).decode("utf-8", "replace")

    def value(self, words: Sequence[str], depth: int = 3) -> Any:
        """A JSON value: decoders that are not Python's tell the fuzzer nothing about how to make one. ``words`` are
        texts and keys that mean something to who reads it."""
        kind = self.below(12 if depth else 8)
        if kind < 2:
            return words[self.byte() % len(words)]
        if kind < 8:
            return (None, self.below(2) == 1, self.below(5), self._number(), self.text(), self.byte() / 16 - 2)[
                kind - 2
            ]
        if kind < 10:
            return [self.value(words, depth - 1) for _ in range(self.below(4))]
        return self.object(words, depth)

    def object(self, words: Sequence[str], depth: int = 3) -> dict[str, Any]:
        """A JSON object, most of its keys from ``words``."""
        found = {}
        for _ in range(self.below(5)):
            pick = self.byte()
            key = words[pick % len(words)] if pick < 240 else self.text()
            found[key] = self.value(words, depth - 1)
        return found

    def _number(self) -> int:
        """Of any size, at the edges of common types as often as not."""
        near = (0, 1 << 31, 1 << 32, 1 << 53, 1 << 63, 1 << 64, 10**30, 256)[self.below(8)]
        return (near + self.below(3) - 1) * (-1 if self.below(4) == 3 else 1)
