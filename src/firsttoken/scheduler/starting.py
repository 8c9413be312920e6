"""Which waiting requests start in a step, and at whose cost.

In the order of the queue, each takes what is free: a slot, KV blocks (but for a reserve) and prefill tokens. Beyond
that

- **A better class takes the place of worse ones** (`Preemption`). For a slot alone at once: the victim's KV stays
  cached, so it loses little. For KV blocks once it has waited for its class's ``max_queue``, as they may come free by
  themselves and the victim must compute its own again; at once if the class has none. Until then worse classes start
  nothing. Its own class's prompts, and better ones, go on as before: no class has a claim on those.
- **A request that fits passes one that does not**, but in at most ``max_passes`` steps: then all wait for it.
- **An aged request**, which has waited for half of ``starts_within``, is first in the queue, and nobody passes it: all
  that comes free is kept for it, and better classes start by taking the place of worse ones only. It needs no more
  prefill tokens than the floor that is kept for it, and no better class takes its place before it has a token. So it
  starts within ``starts_within`` if enough of what runs ends in the other half of that time, unless an eighth of the
  slots is with aged requests already (`WaitingQueue`).
- **Whose place was taken comes back slowly**, or the next better request would take it again: not while better ones
  wait, and unless none of them runs only where a reserve stays free beyond its own need, or once it has stayed out for
  50 ms, doubled each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass, Targets
from firsttoken.core.timeline import Mark
from firsttoken.core.waits import Wait
from firsttoken.kvcache import KVCache, Probe
from firsttoken.scheduler.config import SchedulerConfig
from firsttoken.scheduler.preemption import Preemption
from firsttoken.scheduler.queue import Ticket, WaitingQueue
from firsttoken.scheduler.reservation import KVReservation
from firsttoken.scheduler.restoring import Restoring
from firsttoken.scheduler.running import RunningSet
from firsttoken.scheduler.shares import PrefillShares
from firsttoken.scheduler.step import Counters, StepBuilder
from firsttoken.scheduler.waits import Waits

# Finding out what a request would cost walks its cached prefix: a step does that for so many in vain, and believes
# what it found for so many steps. Finding out who could make way walks the blocks of many.
MAX_REFUSED_PROBES = 8
RECHECK_STEPS = 16
RETRY_STEPS = 4
# A victim comes back where this part of the slots, and one at least, stays free.
RESERVED_SLOTS = 16


@dataclass(slots=True, kw_only=True)
class Turn:
    """One step's admissions. ``owed``: the decode rows that take a block each in this step. Only classes better than
    ``below`` start anything, because of ``closed``. ``claimed``: what is free is kept for an aged request. ``lacks``:
    what the first of each class that does not start waits for."""

    step: StepBuilder
    step_id: int
    shares: PrefillShares
    now_ns: int
    owed: set[int]
    below: int
    closed: Wait
    leaders: dict[bytes | None, int]
    claimed: bool = False
    candidates: list[Ticket] | None = None
    refused: list[Ticket] = field(default_factory=list)
    lacks: list[Wait | None] = field(default_factory=lambda: [None for _ in ServiceClass])
    victims: list[Ticket] = field(default_factory=list)

    def tell(self, ticket: Ticket, why: Wait) -> None:
        """The ticket does not start."""
        if self.lacks[ticket.service] is None:
            self.lacks[ticket.service] = why


class Starting:
    """Moves requests from the queue to the running set."""

    def __init__(
        self,
        config: SchedulerConfig,
        targets: Targets,
        kv: KVCache,
        queue: WaitingQueue,
        running: RunningSet,
        preemption: Preemption,
        reservation: KVReservation,
        counters: Counters,
        restoring: Restoring,
        waits: Waits,
    ) -> None:
        self._waits = waits
        self._restoring = restoring
        self._config = config
        self._kv = kv
        self._queue = queue
        self._running = running
        self._preemption = preemption
        self._reservation = reservation
        self._counters = counters
        self._patience = [round((targets.of(each).max_queue or 0) * NS_PER_MS) for each in ServiceClass]
        self._reserved_slots = max(1, config.max_num_seqs // RESERVED_SLOTS)
        self._watermark = int(config.watermark * kv.num_blocks)

    def reserve(self) -> int:
        """Blocks that admission leaves to the running requests. None when nothing runs, or the largest would never
        start."""
        return min(len(self._running), self._watermark)

    def start_waiting(self, turn: Turn) -> None:
        """Start all that may start; ``turn.victims`` are those whose place was taken."""
        self._waits.explain(turn.lacks, self._start_in_order(turn))

    def _start_in_order(self, turn: Turn) -> Wait:
        """Returns what those wait for that were not looked at."""
        overtaken = probed = 0
        rest = Wait.ORDER
        for ticket in self._queue.first(self._config.lookahead):
            if ticket.service >= turn.below:
                turn.tell(ticket, turn.closed)
                if ticket.aged:
                    continue
                break
            if ticket.aged:
                self._try_aged(ticket, turn)
                continue
            nothing = self._nothing_for(ticket, turn)
            if nothing is not None:
                rest = nothing  # nor is there for those behind it
                break
            # pending: preempted, and its last token is under way; one step, not worth losing its place
            if ticket.request.num_pending or self._stays_out(ticket, turn):
                turn.tell(ticket, Wait.STEP if ticket.request.num_pending else Wait.ORDER)
                break
            lacks = self._try_start(ticket, turn)
            if lacks is None:
                overtaken = len(turn.refused)
                continue
            turn.tell(ticket, lacks)
            if ticket.passes >= self._config.max_passes:
                break
            turn.refused.append(ticket)
            probed += ticket.recheck == turn.step_id + RECHECK_STEPS
            if probed == MAX_REFUSED_PROBES:
                break  # the others are looked at in the next steps, when these are known not to fit
        for ticket in turn.refused[:overtaken]:
            ticket.passes += 1
        return rest

    # ------------------------------------------------------------------ inside

    def _try_aged(self, ticket: Ticket, turn: Turn) -> None:
        """Not even another aged one passes it. One that lacks nothing but tokens starts in the next step."""
        if turn.claimed:
            turn.tell(ticket, Wait.ORDER)
        elif not turn.shares.may_enter(ticket):
            turn.tell(ticket, Wait.BUDGET)
        else:
            lacks = Wait.STEP if ticket.request.num_pending else self._try_start(ticket, turn)
            if lacks is not None:
                turn.tell(ticket, lacks)
                turn.claimed = True

    def _nothing_for(self, ticket: Ticket, turn: Turn) -> Wait | None:
        """What is lacking so that neither it nor anybody behind it can start in this step; None if that is not so."""
        full = turn.claimed or not self._running.free_slots or self._free(turn) <= 0
        # Any admission takes a block at least, since one token at least must be computed.
        if full and not turn.claimed and self._running.free_slots and self._kv.reclaim():
            full = self._free(turn) <= 0
        if full and not self._running.worse_than(ticket.service):
            if turn.claimed:
                return Wait.ORDER
            return Wait.KV if self._running.free_slots else Wait.SLOT
        return None if turn.shares.open_for(ticket.service) else Wait.BUDGET

    def _free(self, turn: Turn) -> int:
        return self._kv.available - self.reserve() - len(turn.owed)

    def _stays_out(self, ticket: Ticket, turn: Turn) -> bool:
        """True for one whose place was taken before, and would be again."""
        if not ticket.evictions:
            return False
        if any(other.service < ticket.service for other in turn.refused):
            return True
        if not self._running.better_than(ticket.service) or turn.now_ns >= ticket.returns_ns:
            return False
        spare = self._free(turn) - self._kv.blocks_for(ticket.request.num_tokens) - self._watermark
        return self._running.free_slots <= self._reserved_slots or spare < 0

    def _try_start(self, ticket: Ticket, turn: Turn) -> Wait | None:
        """Start it, or say what it waits for."""
        request = ticket.request
        if not turn.shares.may_enter(ticket):
            return Wait.BUDGET
        free = 0 if turn.claimed else self._free(turn)
        # Beside nobody it is asked anew: without a step, no later one would come.
        known = turn.step_id < ticket.recheck and len(self._running) > 0
        if known and ticket.cost > free and not self._may_evict(ticket, turn, blocks=True):
            return Wait.ORDER if turn.claimed else Wait.KV
        probe = self._kv.probe(request)
        need = self._need(ticket, probe, free)
        if need > free and not turn.claimed and self._kv.reclaim():
            free, probe = self._free(turn), self._kv.probe(request)
            need = self._need(ticket, probe, free)
        # The very block it needs next is computed by this step: in the next one it need not be computed again.
        patient = not ticket.aged and ticket.passes < self._config.max_passes
        if patient and follows(request, probe, turn.leaders):
            return Wait.PREFIX
        lacks_slot = turn.claimed or not self._running.free_slots
        if need > free or lacks_slot:
            if not self._make_way(ticket, turn, probe, need - free, int(lacks_slot)):
                if need > free:
                    ticket.cost, ticket.recheck = need, turn.step_id + RECHECK_STEPS
                if turn.claimed:
                    return Wait.ORDER
                return Wait.KV if need > free else Wait.SLOT
            probe = self._kv.probe(request)  # what the victims gave back may be found now
        self._start(ticket, turn, probe)
        return None

    def _need(self, ticket: Ticket, probe: Probe, free: int) -> int:
        """Blocks that must be available, of which ``free`` are, for it to start."""
        return probe.cost if ticket.aged else probe.cost + self._reservation.growth(ticket.request, free)

    def _may_evict(self, ticket: Ticket, turn: Turn, *, blocks: bool) -> bool:
        """True when it may take the place of others now; ``blocks``: it lacks those. If it only has to be patient yet,
        worse classes start nothing meanwhile."""
        if turn.step_id < ticket.retry or not self._running.worse_than(ticket.service):
            return False
        if blocks and turn.now_ns - ticket.since_ns < self._patience[ticket.service]:
            turn.below, turn.closed = min(turn.below, ticket.service + 1), Wait.ORDER
            return False
        return True

    def _make_way(self, ticket: Ticket, turn: Turn, probe: Probe, blocks: int, slots: int) -> bool:
        """Take the place of worse classes. False, with nobody gone, when that is not allowed or not enough."""
        if not self._may_evict(ticket, turn, blocks=blocks > 0):
            return False
        if blocks > 0:
            before, cost = self._kv.available, probe.cost
            self._preemption.free_ended()
            # What it would share with those that have ended is available by now, and as much as that costs it more.
            probe = self._kv.probe(ticket.request)
            blocks -= self._kv.available - before - (probe.cost - cost)
        if turn.candidates is None:
            turn.candidates = self._preemption.candidates()
        if blocks > 0 or slots:
            victims = self._preemption.victims(turn.candidates, ticket.service, probe, blocks, slots)
            if not victims:
                ticket.retry = turn.step_id + RETRY_STEPS
                return False
            for victim in victims:
                self._preemption.evict(victim, turn.now_ns)
                turn.shares.leave(victim)
                turn.owed.discard(victim.request.request_id)
            turn.victims.extend(victims)
        return True

    def _start(self, ticket: Ticket, turn: Turn, probe: Probe) -> None:
        request = ticket.request
        admission = self._kv.admit(request, probe, reserve=len(turn.owed))
        assert admission is not None, "a request that fits was not admitted"
        self._queue.start(ticket)
        self._running.start(ticket)
        self._reservation.started(request)
        request.num_computed = admission.cached_tokens
        if not request.first_scheduled:
            request.first_scheduled = True
            request.num_cached = admission.cached_tokens
            self._counters.prompt_tokens += request.num_prompt
            self._counters.cached_prompt_tokens += admission.cached_tokens
        if not self._restoring.begin(ticket):
            request.timeline.stamp(Mark.SCHEDULED)
            turn.step.start(request, admission.blocks)
            turn.shares.enter(ticket)
        self._waits.end(ticket, started=True)
        if probe.next_hash is not None:
            turn.leaders.setdefault(probe.next_hash, ticket.service)


def leaders_of(prefills: list[Ticket], kv: KVCache) -> dict[bytes | None, int]:
    """The hash of the block that each running prefill computes next, if it is full, with the best class that does."""
    leaders: dict[bytes | None, int] = {}
    for ticket in reversed(prefills):
        request = ticket.request
        leaders[kv.next_hash(request)] = ticket.service
    return leaders


def follows(request: Request, probe: Probe, leaders: dict[bytes | None, int]) -> bool:
    """True when a running prefill of no worse class computes the block that the request would begin with."""
    return probe.next_hash is not None and leaders.get(probe.next_hash, request.service + 1) <= request.service
