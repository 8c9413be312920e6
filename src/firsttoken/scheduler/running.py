"""Who holds a slot."""

from __future__ import annotations

from firsttoken.core.request import Request, Status
from firsttoken.core.service import ServiceClass
from firsttoken.scheduler.queue import Ticket


class RunningSet:
    """The running requests in the order in which they started, their slots, and slots that a plan must retire."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.tickets: dict[int, Ticket] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._retired: list[int] = []
        self._untold: set[int] = set()  # slots whose rows no plan has started yet
        self._of_class = [0 for _ in ServiceClass]

    def __len__(self) -> int:
        return len(self.tickets)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def start(self, ticket: Ticket) -> None:
        """Give the request a slot."""
        request = ticket.request
        request.status = Status.RUNNING
        request.slot = self._free.pop()
        self.tickets[request.request_id] = ticket
        self._of_class[ticket.service] += 1

    def leave(self, ticket: Ticket) -> None:
        """Take the request's slot away."""
        request = ticket.request
        del self.tickets[request.request_id]
        self._free.append(request.slot)
        if request.slot in self._untold:
            self._untold.remove(request.slot)  # a row that nobody knows cannot be retired
        else:
            self._retired.append(request.slot)
        request.slot = -1
        self._of_class[ticket.service] -= 1

    def hold_back(self, request: Request) -> None:
        """Its row starts with a later plan than its slot was given with."""
        self._untold.add(request.slot)

    def told(self, request: Request) -> None:
        """A plan starts its row."""
        self._untold.remove(request.slot)

    def take_retired(self) -> list[int]:
        """Slots given back since the last call."""
        retired, self._retired = self._retired, []
        return retired

    @property
    def best_class(self) -> int:
        """The best class that runs; one worse than all when none does."""
        for service, count in enumerate(self._of_class):
            if count:
                return service
        return len(self._of_class)

    def better_than(self, service: int) -> int:
        """How many of better classes run."""
        return sum(self._of_class[:service])

    def worse_than(self, service: int) -> int:
        """How many of worse classes run."""
        return sum(self._of_class[service + 1 :])

    def wanting(self) -> tuple[list[Request], list[Ticket]]:
        """Those that want one token, and those that want more; what is planned to the end wants none."""
        decodes: list[Request] = []
        prefills: list[Ticket] = []
        for ticket in self.tickets.values():
            request = ticket.request
            # `all_planned` and `num_wanted`, spelled out: this loop is most of a decode step's planning time.
            known = len(request.tokens) + request.num_pending
            if known - request.num_prompt < request.max_tokens:
                if known - request.num_computed == 1:
                    decodes.append(request)
                else:
                    prefills.append(ticket)
        return decodes, prefills
