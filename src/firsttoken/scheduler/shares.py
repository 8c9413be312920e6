"""Who gets how many of a step's prefill tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import msgspec

from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass
from firsttoken.scheduler.queue import Ticket

FLOOR_PARTS = 10


class PrefillOrder(Protocol):
    """How the prompts of one class share the tokens that are there for it. The best one comes first."""

    @property
    def decodes_wait(self) -> bool:
        """True when decode rows stand still as long as any prompt can be computed."""
        ...

    def sure(self, tokens: int, *, contended: bool) -> int:
        """How many of ``tokens`` the first running prompt takes before all others; ``contended``: there are others,
        running or waiting. What these leave is its own too."""
        ...

    def others(self, tickets: list[Ticket]) -> list[Ticket]:
        """The other running prompts, which come in order of rank, in the order in which they take what is left."""
        ...


class FairShares(msgspec.Struct, frozen=True):
    """A long prompt neither blocks short ones nor stands still: the first is sure of half, and the other half goes to
    the shortest remainders, running ones first, then newly admitted requests. So the oldest prompt takes at most twice
    as long as alone, and a short prompt does not wait for it to end."""

    decodes_wait: bool = False

    def sure(self, tokens: int, *, contended: bool) -> int:
        return tokens - tokens // 2 if contended else tokens

    def others(self, tickets: list[Ticket]) -> list[Ticket]:
        return sorted(tickets, key=lambda ticket: ticket.request.num_wanted)


class FirstCome(msgspec.Struct, frozen=True):
    """The oldest prompt takes all, the next what it leaves, and so on. With ``max_passes`` of 0 in `SchedulerConfig`
    nobody is admitted before those who came earlier, either."""

    decodes_wait: bool = False

    def sure(self, tokens: int, *, contended: bool) -> int:
        return tokens

    def others(self, tickets: list[Ticket]) -> list[Ticket]:
        return tickets


class ClassFloors(msgspec.Struct, frozen=True):
    """What running prompts of worse classes are sure of where better ones contend: a tenth of a step's prefill tokens,
    divided between the worse classes by their ``weights``. A step of one token has no floor."""

    weights: tuple[float, ...] = (1.0,) * len(ServiceClass)

    def of(self, services: Sequence[int], tokens: int) -> list[int]:
        """The floors of ``services``, the worse classes that have running prompts, best first."""
        left = min(max(self.whole(tokens), len(services)), tokens - 1)
        weight = sum(self.weights[service] for service in services)
        floors: list[int] = []
        for service in services:
            floors.append(min(max(int(left * self.weights[service] / weight), 1), left))
            left -= floors[-1]
            weight -= self.weights[service]
        return floors

    @staticmethod
    def whole(tokens: int) -> int:
        """All floors together: one token at least."""
        return max(1, -(-tokens // FLOOR_PARTS))


class PrefillShares:
    """Divides a step's prefill tokens: floors first (`ClassFloors`), then the best class by its `PrefillOrder` until it
    wants no more, then the next one. Requests that wait are let in between, in the order of the queue."""

    def __init__(
        self,
        order: PrefillOrder,
        floors: ClassFloors,
        prefills: list[Ticket],
        tokens: int,
        *,
        waiting: Sequence[int] = (),
        aged: bool = False,
    ) -> None:
        """``prefills`` are the running ones in order of rank. ``waiting``: how many of each class may be let in.
        ``aged``: one of them is aged, for which one more floor is kept."""
        self.left = tokens
        self._order = order
        self._waiting = waiting
        self._grants: dict[Ticket, int] = dict.fromkeys(prefills, 0)
        self._wanted = {ticket: ticket.request.num_wanted for ticket in prefills}
        self._groups = {service: list(group) for service, group in groupby(prefills, lambda ticket: ticket.service)}
        self._reached = -1  # the class whose turn it is
        self._pot = min(floors.whole(tokens), tokens) if aged else 0
        self.left -= self._pot
        best = min([*self._groups, *(service for service, count in enumerate(waiting) if count)], default=0)
        worse = [service for service in self._groups if service > best]
        if worse and self.left > 1:
            for service, floor in zip(worse, floors.of(worse, self.left), strict=True):
                self._give(self._groups[service][0], floor)

    def open_for(self, service: int) -> bool:
        """True when tokens are left for requests of the class; ask for better classes first."""
        self._reach(service)
        return self.left > 0

    def may_enter(self, ticket: Ticket) -> bool:
        """False for a request that would only delay the first running prompt of its class: one that could not end
        before it, while it wants all that is left. An aged one may enter by its own floor."""
        if ticket.aged:
            return self._pot > 0
        group = self._groups.get(ticket.service)
        if not group or ticket.request.num_tokens < self._wanted[group[0]]:
            return True
        missing = self._wanted[group[0]] - self._grants[group[0]]
        if missing >= self.left:
            return False
        self._give(group[0], missing)
        return True

    def enter(self, ticket: Ticket) -> None:
        """A newly admitted request takes what it wants of the tokens left."""
        self._grants[ticket] = 0
        self._wanted[ticket] = ticket.request.num_wanted
        if ticket.aged:
            before = self.left
            self.left = self._pot
            self._give(ticket, self._pot)
            self.left, self._pot = before, self.left
        else:
            self._give(ticket, self.left)

    def leave(self, ticket: Ticket) -> None:
        """A running prompt was preempted: its tokens are left for others."""
        self.left += self._grants.pop(ticket, 0)
        group = self._groups.get(ticket.service, [])
        if ticket in group:
            group.remove(ticket)

    def settle(self) -> Iterator[tuple[Request, int]]:
        """Hand out the tokens left, the best class first; yields each request that has any, with its tokens."""
        self.left += self._pot
        self._pot = 0
        for service in ServiceClass:
            self._reach(service)
        self._top_up(ServiceClass(len(ServiceClass) - 1))
        return ((ticket.request, count) for ticket, count in self._grants.items() if count)

    # ------------------------------------------------------------------ inside

    def _reach(self, service: int) -> None:
        """Let running prompts of all classes up to this one take their tokens, and better ones the rest."""
        while self._reached < service:
            self._top_up(self._reached)
            self._reached += 1
            group = self._groups.get(self._reached)
            if group:
                waiting = self._reached < len(self._waiting) and self._waiting[self._reached] > 0
                contended = waiting or len(group) > 1
                self._give(group[0], self._order.sure(self.left, contended=contended))
                for ticket in self._order.others(group[1:]):
                    self._give(ticket, self.left)

    def _top_up(self, service: int) -> None:
        """The rest, once no more of the class can be let in: in order of rank, newly admitted ones last."""
        if self.left:
            for ticket in self._grants:
                if ticket.service == service:
                    self._give(ticket, self.left)

    def _give(self, ticket: Ticket, most: int) -> None:
        count = min(self._wanted[ticket] - self._grants[ticket], most, self.left)
        self._grants[ticket] += count
        self.left -= count
