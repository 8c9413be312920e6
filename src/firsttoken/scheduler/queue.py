"""The live requests' places in the order, and those who wait, in the order in which they are to start."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass, Targets
from firsttoken.scheduler.patience import Patience
from firsttoken.scheduler.tenants import TenantTags, cost_of

Key = tuple[int, int, bool, float, int]
Alarm = tuple[int, int, "Ticket"]


_AGED = -1  # goes before every class
_LEAST = -(1 << 63)  # no ``priority`` is lower
# An alarm whose ticket waits no longer stays in its heap; of so many and more than half the heap, all are thrown out.
_STALE_ALARMS = 64


class Ticket:
    """The place of a live request in the order, from `Scheduler.add` to its end. Times in ns.

    ``arrival`` is a unique number. Of several that might have to go the one with the highest ``seniority`` does.
    ``since_ns`` is when its present wait began: its arrival while it has no token, else when it was preempted. ``tag``
    is its start tag among the tenants of its class, and ``charge`` what that cost.
    ``due``: it has waited for half of its class's ``starts_within``, while better classes are served. ``aged``: it was
    moved before them for that, and had no token since.
    ``passes`` counts the steps in which a request behind it was admitted and it was not. ``cost`` is how many KV blocks
    it was found to need, believed until step ``recheck``, because finding out walks its whole cached prefix; until step
    ``retry`` nobody is sought who could make way for it. ``evictions`` counts how often a better class took its place,
    and until ``returns_ns`` it is slow to come back. ``waits_since_ns`` and ``looked_at`` are for `Waits`.
    """

    __slots__ = (
        "aged",
        "ages_ns",
        "arrival",
        "charge",
        "cost",
        "due",
        "evictions",
        "key",
        "looked_at",
        "passes",
        "place",
        "recheck",
        "request",
        "retry",
        "returns_ns",
        "seniority",
        "service",
        "since_ns",
        "tag",
        "waits",
        "waits_since_ns",
    )

    def __init__(self, request: Request, arrival: int, now_ns: int) -> None:
        self.request = request
        self.service = int(request.service)
        self.arrival = arrival
        self.seniority = (self.service, arrival)
        self.since_ns = now_ns
        self.ages_ns = 0
        self.tag = 0.0
        self.place = 0.0
        self.charge = 0.0
        self.due = self.aged = self.waits = False
        self.passes = self.cost = self.recheck = self.retry = 0
        self.evictions = 0
        self.returns_ns = 0
        self.waits_since_ns = now_ns
        self.looked_at: tuple[int, tuple[int, ...]] | None = None
        self.key: Key = (self.service, request.priority, True, 0.0, arrival)

    @property
    def rank(self) -> tuple[int, bool, int, float, int]:
        """Lower is better: the order in which prompts are given tokens."""
        return self.service, not self.aged, self.request.priority, self.place, self.arrival


def _key(ticket: Ticket) -> Key:
    return ticket.key


class WaitingQueue:
    """A sorted list: a step looks at the first few tickets, whatever the length.

    The order is: aged requests, then by class, then ``priority`` (lower first), then preempted requests, then fair
    shares of the tenants (`TenantTags`) with ``patience`` (see `PromptOrder`, `Patience`), then arrival.

    Ageing is between classes only. For each due request of a class the one that stands first in the class is aged:
    where it is not the due one itself, that comes later by the class's own order, of which better classes know nothing.
    No more than ``most_aged`` requests are aged at a time, counted until their first token: were the bound of a worse
    class too short for what it sends, better ones would still have the rest of the slots.
    """

    def __init__(self, targets: Targets, most_aged: int, patience: float) -> None:
        self._patience = patience
        self.num_aged = 0
        self._most_aged = most_aged
        self._starts_within = [round(targets.of(service).starts_within * NS_PER_MS) for service in ServiceClass]
        self._tenants = [TenantTags() for _ in ServiceClass]
        self._patiences: list[Patience[Ticket]] = [Patience() for _ in ServiceClass]
        self._waiting = [0 for _ in ServiceClass]
        self._due = [0 for _ in ServiceClass]
        self._aged_waiting = [0 for _ in ServiceClass]
        self._tickets: list[Ticket] = []
        self._num_promoted = 0
        self._num_alarms = 0
        self._ageing: list[Alarm] = []
        self._deadlines: list[Alarm] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    def first(self, count: int) -> list[Ticket]:
        """A copy of the first ``count`` tickets."""
        return self._tickets[:count]

    def waiting(self, service: int) -> int:
        """How many of the class wait."""
        return self._waiting[service]

    @property
    def aged_first(self) -> bool:
        """True when an aged request waits."""
        return bool(self._tickets) and self._tickets[0].aged

    def push(self, ticket: Ticket) -> None:
        """A new request, or one that was preempted."""
        request = ticket.request
        if not request.first_scheduled:
            ticket.tag, ticket.charge = self._tenants[ticket.service].charge(request)
            ticket.place = ticket.tag + self._patience * request.num_prompt / request.share
            patience = self._patiences[ticket.service]
            patience.begin(ticket, cost_of(request), self._patience * request.num_prompt)
            if request.deadline_ns:
                self._set(self._deadlines, request.deadline_ns, ticket)
        ticket.waits = True
        ticket.passes = ticket.cost = ticket.recheck = ticket.retry = 0
        if ticket.aged:
            self._aged_waiting[ticket.service] += 1
        else:
            ticket.key = (ticket.service, request.priority, not request.preemptions, ticket.place, ticket.arrival)
            ticket.ages_ns = ticket.since_ns + self._starts_within[ticket.service] // 2
            if ticket.service > ServiceClass.P0:
                self._set(self._ageing, ticket.ages_ns, ticket)
        insort(self._tickets, ticket, key=_key)
        self._waiting[ticket.service] += 1

    def start(self, ticket: Ticket) -> None:
        """It waits no longer: it runs."""
        if not ticket.request.first_scheduled:
            self._tenants[ticket.service].start(ticket.tag)
        self._remove(ticket)
        if not ticket.request.first_scheduled:
            self._passed(ticket)

    def end(self, ticket: Ticket) -> None:
        """The request has ended, waiting or not."""
        if ticket.waits:
            if not ticket.request.first_scheduled:
                self._tenants[ticket.service].refund(ticket.request, ticket.charge)
                self._remove(ticket)
                self._passed(ticket)
            else:
                self._remove(ticket)
        if ticket.aged:
            self._rejuvenate(ticket)
        self._patiences[ticket.service].forget(ticket)

    def had_token(self, ticket: Ticket) -> None:
        """A running request was served, so it is aged no longer. What waits again stays so until it runs."""
        if ticket.aged and not ticket.waits:
            self._rejuvenate(ticket)

    def age(self, now_ns: int, best_running: int) -> None:
        """Move those to the front that have waited too long for better classes; ``best_running`` is the best class that
        runs."""
        alarms = self._ageing
        while alarms and alarms[0][0] <= now_ns:
            at_ns, _, ticket = heappop(alarms)
            if ticket.waits and not ticket.due and ticket.ages_ns == at_ns:
                ticket.due = True
                self._due[ticket.service] += 1
        best = best_running
        for service, due in enumerate(self._due):
            if due and best < service:
                while self._aged_waiting[service] < due and self.num_aged < self._most_aged:
                    self._promote_first(service)
            if self._waiting[service]:
                best = min(best, service)

    def late(self, now_ns: int) -> list[Ticket]:
        """Those whose deadline has passed before they ever started."""
        late: list[Ticket] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            ticket = heappop(self._deadlines)[2]
            if ticket.waits and not ticket.request.first_scheduled:
                late.append(ticket)
        return late

    # ------------------------------------------------------------------ inside

    def _passed(self, ticket: Ticket) -> None:
        """Its work is no longer to come. Those whose patience is at its end stand where one of usual length does, which
        is where others who have just come stand too: who of several tenants is next is for their tags to say."""
        patience = self._patiences[ticket.service]
        for ripe in patience.passed(cost_of(ticket.request)):
            usual = min(float(ripe.request.num_prompt), patience.mean_cost)
            place = ripe.tag + self._patience * usual / ripe.request.share
            if ripe.waits and not ripe.aged:
                del self._tickets[self._index(ripe)]
                ripe.key = (*ripe.key[:3], place, ripe.arrival)
                insort(self._tickets, ripe, key=_key)
            ripe.place = place

    def _promote_first(self, service: int) -> None:
        """There is one of the class that is not aged: more of it are due than aged."""
        ticket = self._tickets.pop(bisect_left(self._tickets, (service, _LEAST, False, 0.0, 0), key=_key))
        self._num_promoted += 1
        self.num_aged += 1
        self._aged_waiting[service] += 1
        ticket.aged = True
        ticket.key = (_AGED, 0, False, float(self._num_promoted), ticket.arrival)
        insort(self._tickets, ticket, key=_key)

    def _rejuvenate(self, ticket: Ticket) -> None:
        ticket.aged = False
        self.num_aged -= 1

    def _remove(self, ticket: Ticket) -> None:
        del self._tickets[self._index(ticket)]
        ticket.waits = False
        self._waiting[ticket.service] -= 1
        self._due[ticket.service] -= ticket.due
        self._aged_waiting[ticket.service] -= ticket.aged
        ticket.due = False
        if not self._waiting[ticket.service]:
            self._tenants[ticket.service].forget()
        # A stale alarm keeps a whole request alive, and after those that leave nobody may come for long.
        self._drop_stale(self._ageing)
        self._drop_stale(self._deadlines)

    def _index(self, ticket: Ticket) -> int:
        return bisect_left(self._tickets, ticket.key, key=_key)

    def _set(self, alarms: list[Alarm], at_ns: int, ticket: Ticket) -> None:
        self._num_alarms += 1  # breaks ties
        heappush(alarms, (at_ns, self._num_alarms, ticket))

    def _drop_stale(self, alarms: list[Alarm]) -> None:
        if not self._tickets:
            alarms.clear()
        elif len(alarms) > 2 * len(self._tickets) + _STALE_ALARMS:
            alarms[:] = [alarm for alarm in alarms if alarm[2].waits]
            heapify(alarms)
