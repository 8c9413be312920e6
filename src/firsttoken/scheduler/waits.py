"""What the waiting requests wait for, told for each class at every plan and summed for each request at its end.

At a plan the first of a class that does not start lacks something, and so do those behind it, for that reason or
because they are behind it: until the next plan the class waits for this. A class has running sums of such time, and a
request takes the difference of two moments: from the first plan that could have started it to the one that did.
"""

from __future__ import annotations

from collections.abc import Sequence

from firsttoken.core.service import ServiceClass
from firsttoken.core.waits import Wait
from firsttoken.scheduler.queue import Ticket

_STEP = int(Wait.STEP)


class Waits:
    """Costs less than a microsecond a plan, and nothing while nobody waits: the sums are brought up to date only when a
    reason changes or somebody comes or goes."""

    __slots__ = ("_charged_ns", "_new", "_planned_ns", "_sums", "_why")

    def __init__(self) -> None:
        self._sums = [[0] * len(Wait) for _ in ServiceClass]
        self._why = [_STEP for _ in ServiceClass]
        self._planned_ns = self._charged_ns = 0
        self._new: dict[int, Ticket] = {}  # that no plan has looked at, by their requests' ids

    def begin(self, ticket: Ticket) -> None:
        """It begins to wait, at the time of its last stamp."""
        ticket.waits_since_ns = ticket.request.timeline.times[-1]
        ticket.looked_at = None
        self._new[ticket.request.request_id] = ticket

    def plan(self, now_ns: int) -> None:
        """A plan begins, and somebody waits."""
        self._planned_ns = now_ns
        if self._new:
            self._charge()
            before = [tuple(sums) for sums in self._sums]
            for ticket in self._new.values():
                ticket.looked_at = (now_ns, before[ticket.service])
            self._new.clear()

    def explain(self, whys: Sequence[int | None], rest: int) -> None:
        """What each class waits for until the next plan; ``rest`` where that is None."""
        given = [rest if why is None else why for why in whys]
        if given != self._why:
            self._charge()
            self._why = given

    def end(self, ticket: Ticket, *, started: bool) -> None:
        """It waits no longer since the time of its last stamp: it was ``started`` by the present plan, or has ended."""
        ns, spent = ticket.request.timeline.times[-1], ticket.request.queue_ns
        if ticket.looked_at is None:
            self._new.pop(ticket.request.request_id, None)
            spent[_STEP] += ns - ticket.waits_since_ns
            return
        self._charge()
        first_ns, before = ticket.looked_at
        for why, (now, then) in enumerate(zip(self._sums[ticket.service], before, strict=True)):
            spent[why] += now - then
        spent[_STEP] += first_ns - ticket.waits_since_ns
        spent[_STEP if started else self._why[ticket.service]] += ns - self._planned_ns

    def _charge(self) -> None:
        """Bring the sums up to the last plan."""
        elapsed = self._planned_ns - self._charged_ns
        if elapsed:
            for sums, why in zip(self._sums, self._why, strict=True):
                sums[why] += elapsed
            self._charged_ns = self._planned_ns
