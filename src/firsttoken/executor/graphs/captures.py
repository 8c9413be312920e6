"""Which graphs there are, and which come next: the smallest first, and before them what was missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from firsttoken.executor.ahead.plan import GREEDY, RANDOM, Key
from firsttoken.executor.graphs.profiles import ShapeTable
from firsttoken.models.step_view import Logits, StepView

# A prefill of more tokens takes the GPU longer than its launches take the host.
LARGEST_LEARNED = 2048
# Of the steps that have decode rows too, those that the device's policy asks for.
LARGEST_MIXED = 1024
MOST_GRAPHS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A captured step; ``view`` is what it reads, ``logits`` tells where a graph of the model alone has left them. On a
    device that replays by running again they are new ones each time. ``choices`` are graphs of what is chosen from
    these, by the value of its needs, and None for what was launched by kernels once (`choice`)."""

    replay: Callable[[], None]
    view: StepView
    logits: Callable[[], Logits | None] = lambda: None
    choices: dict[int, Callable[[], None] | None] = field(default_factory=dict)


def first_captures(table: ShapeTable, *, deterministic: bool) -> list[Key]:
    """What is captured without having been missed, the most frequent first. A random step's graph serves greedy
    rows too, which among prompts costs nothing that could be felt."""
    prompts: list[Key] = [(shape, RANDOM) for shape in table.prompt_shapes(LARGEST_LEARNED)]
    if deterministic:
        return prompts
    decodes = table.decode_shapes()
    keys: list[Key] = [(shape, GREEDY) for shape in decodes]
    keys += prompts
    keys += [(shape, RANDOM) for shape in table.mixed_shapes(LARGEST_MIXED)]
    return keys + [(shape, needs) for needs in (RANDOM, None) for shape in decodes]


class Captures:
    """The graphs by key, and the queue of keys to capture: ``keys`` at first."""

    def __init__(self, keys: Sequence[Key], most: int = MOST_GRAPHS) -> None:
        self._graphs: dict[Key, Graph] = {}
        self._queue = list(keys)
        self._most = most
        self._refused: set[Key] = set()

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
        return self._is_worth(key) and len(self._graphs) < self._most

    def refuse(self, key: Key) -> None:
        """It cannot be captured: its steps run kernel by kernel from now on."""
        self._refused.add(key)
        if key in self._queue:
            self._queue.remove(key)

    def stop(self) -> None:
        """No more graphs than there are."""
        self._queue.clear()
        self._most = 0

    def clear(self) -> None:
        """Let go of all graphs, and make no more."""
        self._graphs.clear()
        self.stop()

    def missed(self, key: Key) -> None:
        """A step ran without a graph: make it the next one, if its like may have one."""
        if key in self._graphs or not self._is_worth(key):
            return
        if key in self._queue:
            self._queue.remove(key)
        elif len(self._graphs) + len(self._queue) >= self._most:
            return
        self._queue.insert(0, key)

    def next(self, ready: Callable[[Key], bool]) -> Key | None:
        """The first key in the queue that is ready."""
        return next((key for key in self._queue if ready(key)), None)

    def _is_worth(self, key: Key) -> bool:
        return key[0].tokens <= LARGEST_LEARNED and key not in self._refused

    @property
    def left(self) -> int:
        return len(self._queue)
