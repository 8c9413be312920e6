"""How long each request lets others pass, in work."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class Patience(Generic[T]):
    """Tells when a request has let enough pass: when the work that came before it and as much as its patience have
    started (or left). Counted in the tokens of a whole class: virtual time, by which the order goes, is slower the more
    tenants there are, and a long prompt would be passed by so much of each of them.
    """

    def __init__(self) -> None:
        self._arrived = 0.0
        self._started = 0.0
        self._heap: list[tuple[float, int, T]] = []
        self._waiting: set[int] = set()  # by id: those in the heap that are not forgotten
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def mean_cost(self) -> float:
        """Of all that have come."""
        return self._arrived / self._count if self._count else 0.0

    def begin(self, item: T, cost: float, patience: float) -> None:
        """A request has come that needs ``cost`` tokens, and lets ``patience`` pass."""
        self._arrived += cost
        self._count += 1  # breaks ties
        self._waiting.add(id(item))
        heappush(self._heap, (self._arrived + patience, self._count, item))

    def passed(self, cost: float) -> list[T]:
        """Work of ``cost`` has started, or will not come; those whose patience is at its end by that, each once."""
        self._started += cost
        ripe: list[T] = []
        while self._heap and self._heap[0][0] <= self._started:
            item = heappop(self._heap)[2]
            if id(item) in self._waiting:
                self._waiting.discard(id(item))
                ripe.append(item)
        return ripe

    def forget(self, item: T) -> None:
        """The request has ended."""
        self._waiting.discard(id(item))
        if 2 * len(self._heap) > 3 * len(self._waiting):
            self._heap = [entry for entry in self._heap if id(entry[2]) in self._waiting]
            heapify(self._heap)
