"""Who must go when there is not enough for all. Preemption is finish and add again.

It is between service classes only: ``priority`` orders inside a class and never takes anything from anybody. The worst
class goes first, in it the newest. Equals never preempt each other to *start*; when decode rows lack blocks somebody
must go, whatever the classes.
"""

from __future__ import annotations

from operator import attrgetter

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.request import Request, Status
from firsttoken.core.timeline import Mark
from firsttoken.kvcache import KVCache, Probe
from firsttoken.scheduler.queue import Ticket, WaitingQueue
from firsttoken.scheduler.reservation import KVReservation
from firsttoken.scheduler.running import RunningSet
from firsttoken.scheduler.step import Counters
from firsttoken.scheduler.waits import Waits

# How long a request stays out after a better class took its place, doubled each time.
STAY_OUT_NS = 50 * NS_PER_MS
_MOST_DOUBLINGS = 16


class Preemption:
    """Takes requests off their rows and puts them back into the queue."""

    def __init__(
        self,
        kv: KVCache,
        queue: WaitingQueue,
        running: RunningSet,
        reservation: KVReservation,
        counters: Counters,
        waits: Waits,
    ) -> None:
        self._kv = kv
        self._queue = queue
        self._running = running
        self._reservation = reservation
        self._counters = counters
        self._waits = waits

    def preempt(self, ticket: Ticket, now_ns: int) -> None:
        """Take a running request off its row, to be added again with all tokens known by then."""
        request = ticket.request
        self._kv.commit(request)
        self._kv.release(request)
        self._running.leave(ticket)
        self._reservation.left(request)
        request.num_computed = 0
        request.preemptions += 1
        request.status = Status.WAITING
        request.timeline.stamp(Mark.PREEMPTED)
        self._counters.preemptions += 1
        if request.num_output or request.num_pending:
            ticket.since_ns = now_ns
        self._queue.push(ticket)
        self._waits.begin(ticket)

    def evict(self, ticket: Ticket, now_ns: int) -> None:
        """The same for the sake of a better class: it comes back slowly (`Starting`)."""
        ticket.returns_ns = now_ns + (STAY_OUT_NS << min(ticket.evictions, _MOST_DOUBLINGS))
        ticket.evictions += 1
        self.preempt(ticket, now_ns)

    def free_ended(self) -> None:
        """Blocks of requests whose last step is planned: no later step reads them."""
        for ticket in self._running.tickets.values():
            if ticket.request.all_planned:
                self._kv.commit(ticket.request)
                self._kv.release(ticket.request)

    def lacking(self, decodes: list[Request]) -> set[int]:
        """The ids of decode rows that must get a block before they compute their token."""
        size, lacks = self._kv.block_tokens, self._kv.lacks
        return {
            request.request_id
            for request in decodes
            if not request.num_computed % size and lacks(request, request.num_computed + 1)
        }

    def make_room(self, lacking: set[int], now_ns: int) -> list[Ticket]:
        """Free blocks until every row of ``lacking`` can have one; removes from it and returns who had to go."""
        victims: list[Ticket] = []
        if len(lacking) > self._kv.available:
            self._kv.reclaim()
            self.free_ended()
        while len(lacking) > self._kv.available:
            candidates = [ticket for ticket in self._running.tickets.values() if not ticket.request.all_planned]
            victim = max(candidates, key=attrgetter("seniority"))
            # Alone it has room, because `refusal` let it in, but for blocks of its own whose tokens another's have
            # been found under: when it starts again it has the other's alone.
            assert len(candidates) > 1 or self._kv.has_spare(victim.request), "a request alone lacks KV blocks"
            self.preempt(victim, now_ns)
            lacking.discard(victim.request.request_id)
            victims.append(victim)
        return victims

    def candidates(self) -> list[Ticket]:
        """Those that may have to go for a better class to start, who goes first last. Who was let in because it is
        aged stays until it has a token."""
        tickets = []
        for ticket in self._running.tickets.values():
            request = ticket.request
            planned = len(request.tokens) + request.num_pending - request.num_prompt  # `all_planned`, spelled out
            if planned < request.max_tokens and not ticket.aged:
                tickets.append(ticket)
        tickets.sort(key=attrgetter("seniority"))
        return tickets

    def victims(self, candidates: list[Ticket], service: int, probe: Probe, blocks: int, slots: int) -> list[Ticket]:
        """Those who must go for a request of class ``service`` to start, which ``probe`` is of, the worst first: so
        that ``blocks`` more are available and ``slots`` more free. They are taken off ``candidates``.

        None unless that is enough: who is preempted for nothing would only start again, and be preempted again.
        """
        if blocks > 0 and self._most_given(candidates, service) < blocks:
            return []
        wanted = set(probe.blocks)
        taken = 0
        while blocks > 0 or taken < slots:
            taken += 1
            if taken > len(candidates) or candidates[-taken].service <= service:
                return []
            blocks -= self._gives(candidates[-taken].request, wanted)
        victims = candidates[len(candidates) - taken :][::-1]
        del candidates[len(candidates) - taken :]
        return victims

    def _most_given(self, candidates: list[Ticket], service: int) -> int:
        """Blocks that all of worse classes have, and so can give at most; quicker than to count what they would."""
        most, size = 0, self._kv.block_tokens
        for ticket in reversed(candidates):
            if ticket.service <= service:
                break
            request = ticket.request
            most += max(len(request.tokens), request.num_computed + 1) // size + 1
        return most

    def _gives(self, request: Request, wanted: set[int]) -> int:
        """Blocks that are available once it has gone, but for those that the other shares with it: it holds them
        already."""
        return self._kv.exclusive_blocks(request, wanted)
