"""A row whose masks are made on another thread, while the device computes what they are for."""

from __future__ import annotations

from concurrent.futures import Executor, Future

from firsttoken.core.errors import ConstraintFailed
from firsttoken.grammar.row import GrammarRow, Mask

# All answers of a step wait for a mask. It takes a millisecond as a rule.
_MASK_S = 0.5


class BesideRow:
    """``row``, which ``workers`` make the next mask of after each token that is taken. Used by one thread, which waits
    for them where it must. Whoever uses it uses ``row`` through it alone."""

    def __init__(self, row: GrammarRow, workers: Executor) -> None:
        self._row = row
        self._workers = workers
        self._made: Future[None] = workers.submit(row.prepare)
        self._late = False

    def mask(self) -> Mask:
        """As `GrammarRow.mask`; raises `ConstraintFailed` for one that takes longer than half a second, too."""
        self._wait()
        return self._row.mask()

    def take(self, token: int) -> bool:
        self._wait()
        if not self._row.take(token):
            return False
        self._made = self._workers.submit(self._row.prepare)
        return True

    def take_way_out(self) -> int:
        self._wait()
        token = self._row.take_way_out()
        self._made = self._workers.submit(self._row.prepare)
        return token

    @property
    def may_refuse(self) -> bool:
        self._wait()
        return self._row.may_refuse

    def _wait(self) -> None:
        if not self._late:
            try:
                self._made.result(_MASK_S)
                return
            except TimeoutError:
                self._late = True  # it may still be at work on the row
        raise ConstraintFailed(f"the grammar is too complex: its next tokens were not known after {_MASK_S} s")
