"""Rows whose masks are made on other threads, while the device computes what they are for.

A step's rows are handed over together: to wake a thread for each takes longer than most masks, and the thread that
does it has the step to look after.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from firsttoken.core.errors import ConstraintFailed
from firsttoken.grammar.row import GrammarRow, Mask

# All answers of a step wait for a mask. It takes a millisecond as a rule.
_MASK_S = 0.5

# Rows whose masks are to be made: of whoever takes one first.
_Work: TypeAlias = "deque[BesideRow]"


class Maskers:
    """Up to ``most`` threads that make masks. Used by one thread, but for those."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._gathered: list[BesideRow] = []

    def add(self, row: BesideRow) -> None:
        """Its next mask is to be made after the next `begin`."""
        self._gathered.append(row)

    def begin(self) -> None:
        """Have the masks made of rows that were added, in their order; one that takes long keeps but one thread."""
        if not self._gathered:
            return
        work = deque(self._gathered)
        self._gathered.clear()
        wanted = min(self._most, len(work))
        while len(self._threads) < wanted:
            thread = threading.Thread(
                target=_make, args=(self._queue.get,), name=f"grammar-mask-{len(self._threads)}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        for _ in range(wanted):
            self._queue.put(work)

    def close(self) -> None:
        """Let the threads go once what was begun is made."""
        for _ in self._threads:
            self._queue.put(None)


def _make(get: Callable[[], _Work | None]) -> None:
    while (work := get()) is not None:
        while work:
            try:
                row = work.popleft()
            except IndexError:  # another thread was faster
                break
            row.make()


class BesideRow:
    """``row``, of which ``maskers`` make the first mask, and the next one after each token that is taken, when they are
    told to `Maskers.begin`. Used by one thread, which waits for them where it must. Whoever uses it uses ``row``
    through it alone."""

    def __init__(self, row: GrammarRow, maskers: Maskers) -> None:
        self._row = row
        self._maskers = maskers
        self._made = threading.Lock()  # held until the mask is made
        self._failure: BaseException | None = None
        self._late = False
        self._begin()

    def make(self) -> None:
        """By one of the threads: the next mask."""
        try:
            self._row.prepare()
        except BaseException as error:
            self._failure = error
        finally:
            self._made.release()

    def mask(self) -> Mask:
        """As `GrammarRow.mask`; raises `ConstraintFailed` for one that takes longer than half a second, too."""
        self._wait()
        return self._row.mask()

    def take(self, token: int) -> bool:
        self._wait()
        if not self._row.take(token):
            return False
        self._begin()
        return True

    def take_way_out(self) -> int:
        self._wait()
        token = self._row.take_way_out()
        self._begin()
        return token

    @property
    def may_refuse(self) -> bool:
        self._wait()
        return self._row.may_refuse

    def _begin(self) -> None:
        self._made.acquire()
        self._maskers.add(self)

    def _wait(self) -> None:
        if not self._late:
            if not self._made.acquire(blocking=False):
                self._maskers.begin()  # if nobody has
                self._late = not self._made.acquire(timeout=_MASK_S)  # it may still be at work on the row
            if not self._late:
                self._made.release()
                if self._failure is not None:
                    raise self._failure
                return
        raise ConstraintFailed(f"the grammar is too complex: its next tokens were not known after {_MASK_S} s")
