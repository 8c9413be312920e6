"""What is remembered of shards that left."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Ghosts(Generic[T]):
    """The last ``limit`` (which may change) keys that left, each with something to remember. O(1) a call."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[bytes, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def add(self, key: bytes, memory: T) -> T | None:
        """Remember a key; returns what is forgotten for it, the oldest, if anything."""
        kept = self._kept
        kept[key] = memory
        return kept.popitem(last=False)[1] if len(kept) > self.limit else None

    def take(self, key: bytes) -> T | None:
        """What is remembered of a key, which is forgotten by this; None when nothing is."""
        return self._kept.pop(key, None)
