"""Responses that were answered lately, so that they can be asked for again and gone on with. In memory alone."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_BYTES = 64 << 20
"""Of all kept responses together."""
AGE_S = 3600.0
"""How long one is kept after its last use."""
_OVERHEAD = 512  # bytes of an entry, beside what it holds


@dataclass(frozen=True, slots=True)
class Kept:
    """A response: its JSON, the ``input`` that it was asked with, what was said in its turn as messages of a chat (both
    JSON, too), and the one that it goes on from."""

    id: str
    body: bytes
    input: bytes
    said: bytes
    previous: str | None

    @property
    def size(self) -> int:
        return len(self.body) + len(self.input) + len(self.said) + _OVERHEAD


@dataclass(slots=True)
class _Shelf:
    """One tenant's, the least lately used first, each with the time (s) of its last use."""

    entries: OrderedDict[str, tuple[Kept, float]] = field(default_factory=OrderedDict)
    size: int = 0

    def take(self, id_: str) -> Kept:
        kept, _ = self.entries.pop(id_)
        self.size -= kept.size
        return kept


class ResponseStore:
    """Bounded in number, bytes and age. One tenant never sees another's; where there is no room, whoever takes up most
    loses what he used least lately.

    For one thread. Every operation takes microseconds.
    """

    def __init__(
        self,
        capacity: int,
        *,
        max_bytes: int = MAX_BYTES,
        age_s: float = AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``capacity`` 0 keeps nothing."""
        self.capacity = capacity
        self.age_s = age_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}
        self._count = 0
        self._size = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self._size

    def put(self, tenant: str, kept: Kept) -> bool:
        """Keep it; False where there is no room for it, or for what it goes on from."""
        if not self.capacity or kept.size > self._max_bytes:
            return False
        self._drop_old()
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.entries[kept.id] = (kept, self._clock())
        shelf.size += kept.size
        self._count += 1
        self._size += kept.size
        while self._count > self.capacity:
            self._drop_first(max(self._shelves, key=lambda name: len(self._shelves[name].entries)))
        while self._size > self._max_bytes:
            self._drop_first(max(self._shelves, key=lambda name: self._shelves[name].size))
        return not isinstance(self.chain(tenant, kept.id), str)  # what it goes on from is used with it

    def get(self, tenant: str, id_: str) -> Kept | None:
        """It, used now; None where it is not known, or another's."""
        self._drop_old()
        shelf = self._shelves.get(tenant)
        found = None if shelf is None else shelf.entries.get(id_)
        if shelf is None or found is None:
            return None
        shelf.entries[id_] = (found[0], self._clock())
        shelf.entries.move_to_end(id_)
        return found[0]

    def chain(self, tenant: str, id_: str) -> list[Kept] | str:
        """The response and all that it goes on from, the oldest first; or the id of the first that is not known.

        The newest is marked as used first, so that of a conversation its end goes before what others may go on from.
        """
        found: list[Kept] = []
        wanted: str | None = id_
        while wanted is not None:
            kept = self.get(tenant, wanted)
            if kept is None:
                return wanted
            found.append(kept)
            wanted = kept.previous
        return found[::-1]

    def delete(self, tenant: str, id_: str) -> bool:
        """Forget it; False where it is not known."""
        shelf = self._shelves.get(tenant)
        if shelf is None or id_ not in shelf.entries:
            return False
        self._drop(tenant, id_)
        return True

    def _drop_old(self) -> None:
        oldest = self._clock() - self.age_s
        for tenant in list(self._shelves):
            while tenant in self._shelves and next(iter(self._shelves[tenant].entries.values()))[1] < oldest:
                self._drop_first(tenant)

    def _drop_first(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._shelves[tenant].entries)))

    def _drop(self, tenant: str, id_: str) -> None:
        shelf = self._shelves[tenant]
        self._size -= shelf.take(id_).size
        self._count -= 1
        if not shelf.entries:
            del self._shelves[tenant]
