"""The waiting requests, in the order in which they are to start."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from firsttoken.core.request import Request

# Finding out what a request would cost walks its cached prefix: a step does that for so many in vain, and believes
# what it found for so many steps.
MAX_REFUSED_PROBES = 8
RECHECK_STEPS = 16


class Waiting:
    """A queued request.

    ``key`` orders the queue: priority (lower first), then preempted requests, then arrival. ``passes`` counts the
    steps in which a request behind it was admitted and it was not. ``cost`` is how many KV blocks it was found to
    need, believed until step ``recheck``, because finding out walks its whole cached prefix.
    """

    __slots__ = ("cost", "key", "passes", "recheck", "request")

    def __init__(self, request: Request, arrival: int, *, preempted: bool) -> None:
        self.request = request
        self.key = (request.priority, not preempted, arrival)
        self.passes = 0
        self.cost = 0
        self.recheck = 0


def _key(entry: Waiting) -> tuple[int, bool, int]:
    return entry.key


class WaitingQueue:
    """A sorted list: a step looks at the first few entries, whatever the length. Arrival numbers are unique."""

    def __init__(self) -> None:
        self._entries: list[Waiting] = []
        self._by_id: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._entries)

    def first(self, count: int) -> list[Waiting]:
        """A copy of the first ``count`` entries."""
        return self._entries[:count]

    def push(self, entry: Waiting) -> None:
        insort(self._entries, entry, key=_key)
        self._by_id[entry.request.request_id] = entry

    def remove(self, request_id: int) -> None:
        """Raises `KeyError` when the request does not wait."""
        entry = self._by_id.pop(request_id)
        del self._entries[bisect_left(self._entries, entry.key, key=_key)]
