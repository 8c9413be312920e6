"""Which graphs there are, and which come next: the smallest first, and before them what was missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firsttoken.executor.ahead.plan import Key
from firsttoken.models.step_view import Logits

# A prefill of more tokens takes the GPU longer than its launches take the host.
LARGEST_LEARNED = 2048
MOST_GRAPHS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A captured step; ``logits`` are where a graph of the model alone leaves them."""

    replay: Callable[[], None]
    logits: Logits | None = None


class Captures:
    """The graphs by key, and the queue of keys to capture: ``keys`` at first."""

    def __init__(self, keys: Sequence[Key], most: int = MOST_GRAPHS) -> None:
        self._graphs: dict[Key, Graph] = {}
        self._queue = list(keys)
        self._most = most

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def get(self, key: Key) -> Graph | None:
        return self._graphs.get(key)

    def add(self, key: Key, graph: Graph) -> None:
        self._graphs[key] = graph
        if key in self._queue:
            self._queue.remove(key)

    def may_have(self, key: Key) -> bool:
        """False for steps that are not worth a graph, and when there are enough."""
        return key[0].tokens <= LARGEST_LEARNED and len(self._graphs) < self._most

    def missed(self, key: Key) -> None:
        """A step ran without a graph: make it the next one, if its like may have one."""
        if key in self._graphs or key[0].tokens > LARGEST_LEARNED:
            return
        if key in self._queue:
            self._queue.remove(key)
        elif len(self._graphs) + len(self._queue) >= self._most:
            return
        self._queue.insert(0, key)

    def next(self, ready: Callable[[Key], bool]) -> Key | None:
        """The first key in the queue that is ready."""
        return next((key for key in self._queue if ready(key)), None)

    @property
    def left(self) -> int:
        return len(self._queue)
