"""Files that callers' wishes keep for a while, and how many bytes that may be. A restart forgets the wishes."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

_MIN_OUTDATED = 64


@dataclass(slots=True)
class _Kept:
    until_ns: int
    ttl_ns: int
    nbytes: int


class KeptFiles:
    """Until when keys are kept, of ``most_bytes`` of files together. A key may be kept before its file is written: then
    the room for it is reserved. O(log keys) a call, amortised. Under the store's lock."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._kept: dict[bytes, _Kept] = {}
        self._ends: list[tuple[int, bytes]] = []

    def room(self, nbytes: int, now_ns: int) -> bool:
        self._expire(now_ns)
        return self.nbytes + nbytes <= self.most_bytes

    def keep(self, key: bytes, nbytes: int, until_ns: int, ttl_ns: int, now_ns: int) -> bool:
        """Keep a file of so many bytes until then, and for ``ttl_ns`` after each use. False where there is no room."""
        kept = self._kept.get(key)
        if kept is None:
            if not self.room(nbytes, now_ns):
                return False
            self.nbytes += nbytes
            kept = self._kept[key] = _Kept(until_ns, ttl_ns, nbytes)
        kept.ttl_ns = max(kept.ttl_ns, ttl_ns)
        self._prolong(key, kept, until_ns)
        return True

    def until(self, key: bytes) -> int:
        """0 for a key that is not kept."""
        kept = self._kept.get(key)
        return kept.until_ns if kept is not None else 0

    def used(self, key: bytes, now_ns: int) -> int:
        """Until when it is kept, now that it was used."""
        self._expire(now_ns)
        kept = self._kept.get(key)
        if kept is None:
            return 0
        self._prolong(key, kept, now_ns + kept.ttl_ns)
        return kept.until_ns

    def left(self, key: bytes) -> None:
        """The file had to go all the same, or is of no use."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.nbytes -= kept.nbytes

    def _prolong(self, key: bytes, kept: _Kept, until_ns: int) -> None:
        kept.until_ns = max(kept.until_ns, until_ns)
        heappush(self._ends, (kept.until_ns, key))
        if len(self._ends) > 2 * len(self._kept) + _MIN_OUTDATED:
            self._ends = [(each.until_ns, key) for key, each in self._kept.items()]
            heapify(self._ends)

    def _expire(self, now_ns: int) -> None:
        while self._ends and self._ends[0][0] <= now_ns:
            _, key = heappop(self._ends)
            if key in self._kept and self._kept[key].until_ns <= now_ns:
                self.left(key)
