"""What is remembered of shards that left."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Ghosts(Generic[T]):
    """The last ``limit`` keys that left, each with something to remember. O(1) a call, amortised.

    A dict that many keys pass through is laid out anew at times, all at once, which takes milliseconds for 65,536. So
    they may be dealt out over ``parts`` by a byte of their key; each part then has its share of the limit.
    """

    def __init__(self, limit: int, parts: int = 1) -> None:
        self.limit = limit
        self._parts: list[OrderedDict[bytes, T]] = [OrderedDict() for _ in range(parts)]
        self._turn = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, key: bytes) -> bool:
        return key in self._parts[key[0] % len(self._parts)]

    def add(self, key: bytes, memory: T) -> None:
        """Remember a key, which must not be empty. Whoever adds also trims, then or soon."""
        self._parts[key[0] % len(self._parts)][key] = memory

    def trim(self) -> T | None:
        """Forget the oldest of one part, whose turn it is, and return what was remembered of it, if there are more than
        its share."""
        parts = self._parts
        self._turn = (self._turn + 1) % len(parts)
        part = parts[self._turn]
        return part.popitem(last=False)[1] if len(part) * len(parts) > self.limit else None

    def take(self, key: bytes) -> T | None:
        """What is remembered of a key, which is forgotten by this; None when nothing is."""
        return self._parts[key[0] % len(self._parts)].pop(key, None)
