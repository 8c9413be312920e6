"""Who gets how many of a step's prefill tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass
from firsttoken.scheduler.backlog import CLASSES
from firsttoken.scheduler.queue import Ticket

FLOOR_PARTS = 10


class PromptOrder(msgspec.Struct, frozen=True):
    """How the prompts of one class line up, running ones and those that wait alike.

    Each stands behind the work that is sent within ``patience`` times its own length after it, in tokens: short prompts
    pass long ones, but only those that came before. So nothing waits for ever, and the longest waits stay what they are
    first come first served (a ``patience`` of 0), while the median one is half as long. It is the order of deadlines
    proportional to size, by which the largest stretch is kept low (Bender, Chakrabarti, Muthukrishnan 1998).

    With ``decodes_wait`` decode rows stand still as long as any prompt can be computed.
    """

    patience: float = 5.0
    decodes_wait: bool = False


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
    """Divides a step's prefill tokens: floors first (`ClassFloors`), then the best class in order of rank until it
    wants no more, then the next one. Requests that wait are let in between, in the order of the queue: each takes what
    those that rank before it leave."""

    def __init__(
        self,
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
        """False when those that rank before it take all that is left. An aged one may enter by its own floor."""
        if ticket.aged:
            return self._pot > 0
        group = self._groups.get(ticket.service, [])
        while self.left and group and group[0].rank < ticket.rank:
            first = group.pop(0)
            self._give(first, self.left)
        return self.left > 0

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
        self._reach(CLASSES)
        return ((ticket.request, count) for ticket, count in self._grants.items() if count)

    # ------------------------------------------------------------------ inside

    def _reach(self, service: int) -> None:
        """Let better classes take what they want."""
        while self._reached < service:
            self._top_up(self._reached)
            self._reached += 1

    def _top_up(self, service: int) -> None:
        """The rest, once no more of the class can be let in. Newly admitted ones have what they could get."""
        if self.left:
            for ticket in self._grants:
                if ticket.service == service:
                    self._give(ticket, self.left)

    def _give(self, ticket: Ticket, most: int) -> None:
        count = min(self._wanted[ticket] - self._grants[ticket], most, self.left)
        self._grants[ticket] += count
        self.left -= count
