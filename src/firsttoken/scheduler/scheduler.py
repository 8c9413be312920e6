"""The one scheduling rule: every step gives each request a number of the tokens that it wants.

`plan` works in this order, and each part relies on those before it:

1. the queue moves on with time: who has waited long goes to the front, who is too late ends;
2. when decode rows lack KV blocks, victims are chosen and *fully* removed (blocks, slot, place in the running set);
3. waiting requests start, as far as budget, slots and KV allow, better classes at the cost of worse ones (`Starting`).
   Who runs is settled then, and no row of the plan exists yet;
4. decode rows, all of them, and prefill chunks by what `PrefillShares` has given out;
5. blocks that the step fills are registered for reuse, but only when the scheduler is asked for anything else: their
   hashes would be part of every first token.

Counts move at planning, tokens arrive in `complete`. So `plan` may be called again before the step before was
completed; results come back in the order of the plans.
"""

from __future__ import annotations

from collections import deque

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.plan import RowBlocks, RowSample, StepResult
from firsttoken.core.request import Request, Status
from firsttoken.core.service import ServiceClass, Targets
from firsttoken.core.timeline import Mark
from firsttoken.core.waits import Wait
from firsttoken.kvcache import KVCache
from firsttoken.scheduler.backlog import CLASSES
from firsttoken.scheduler.budget import Budget
from firsttoken.scheduler.config import SchedulerConfig
from firsttoken.scheduler.limits import refusal
from firsttoken.scheduler.preemption import Preemption
from firsttoken.scheduler.queue import Ticket, WaitingQueue
from firsttoken.scheduler.reservation import KVReservation
from firsttoken.scheduler.restoring import Restoring
from firsttoken.scheduler.running import RunningSet
from firsttoken.scheduler.shares import ClassFloors, PrefillShares, PromptOrder
from firsttoken.scheduler.starting import Starting, Turn, leaders_of
from firsttoken.scheduler.step import Counters, PlannedStep, StepBuilder, Update
from firsttoken.scheduler.step_time import StepLoad
from firsttoken.scheduler.waits import Waits
from firsttoken.scheduler.window import BatchWindow, Hold

# Compared for every token, and to look a member up in its enum takes as long as all else that a token does.
_DECODES, _FINISHED = int(Mark.FIRST_TOKEN), Status.FINISHED
# Aged requests without a token hold no more than this part of the slots, or one.
AGED_PART = 8
# Steps aim at this share of the promised gap: predictions are off by some percent, and 99 % of the gaps are promised.
GAP_SHARE = 0.9
# How often it is asked whether KV that is being restored has arrived, where nothing else is computed meanwhile.
RESTORE_POLL_NS = 200_000
# Prompt tokens on rows that weigh as much as a waiting request.
CROWD_TOKENS = 2048
_ALL = (None,) * len(ServiceClass)
_ORDER = PromptOrder()
_TARGETS = Targets()


class Scheduler:
    """Owns every live request, its slot and (through ``kv``) its blocks. Not thread-safe.

    ``order`` is that of prompts inside a class; ``targets`` say what the classes were promised; ``window`` holds
    waiting requests back, None for never.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        budget: Budget,
        order: PromptOrder = _ORDER,
        targets: Targets = _TARGETS,
        window: BatchWindow | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.budget = budget
        self.order = order
        self.counters = Counters()
        self._floors = ClassFloors(tuple(targets.of(service).weight for service in ServiceClass))
        promised = [targets.of(service).itl_p99 for service in ServiceClass]
        self._gaps = [GAP_SHARE * gap if gap is not None else None for gap in promised]
        self._tickets: dict[int, Ticket] = {}
        self._running = RunningSet(config.max_num_seqs)
        self._queue = WaitingQueue(targets, max(1, config.max_num_seqs // AGED_PART), order.patience)
        self._reservation = KVReservation(kv, config.max_num_seqs)
        self._waits = Waits()
        self._preemption = Preemption(kv, self._queue, self._running, self._reservation, self.counters, self._waits)
        self._restoring = Restoring(kv, self._running, self.counters)
        self._starting = Starting(
            config,
            targets,
            kv,
            self._queue,
            self._running,
            self._preemption,
            self._reservation,
            self.counters,
            self._restoring,
            self._waits,
        )
        self._expired: list[Request] = []
        self._filled: list[Request] = []  # with blocks that the last plan fills
        self._in_flight: deque[int] = deque()
        self._next_arrival = 0
        self._next_step = 0
        self._hold = None if window is None else Hold(window, targets)

    # ------------------------------------------------------------------ the door

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and not completed yet."""
        return len(self._in_flight)

    @property
    def wake_ns(self) -> int:
        """When to plan again though nothing has happened: for requests whose KV is being restored, or that the batch
        window holds back. 0 without any."""
        if self._restoring.waits:
            return now_ns() + RESTORE_POLL_NS
        return 0 if self._hold is None else self._hold.wake_ns

    def get(self, request_id: int) -> Request | None:
        """A live request, None when it is unknown or has ended."""
        ticket = self._tickets.get(request_id)
        return ticket.request if ticket is not None else None

    def can_ever_fit(self, request: Request) -> InvalidRequest | None:
        """Why a request can never run, with the numbers; None when it can."""
        return refusal(request, self.kv, self.config.max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest` when it can never fit, `ValueError` when its id is live."""
        if request.request_id in self._tickets:
            raise ValueError(f"request id {request.request_id} is live already; ids must be unique")
        never = self.can_ever_fit(request)
        if never is not None:
            raise never
        if not request.prompt_only:
            request.max_tokens = min(request.max_tokens, self.config.max_model_len - request.num_prompt)
        ticket = Ticket(request, self._next_arrival, now_ns())
        self._tickets[request.request_id] = ticket
        if self._hold is not None:
            self._hold.arrived(request, queue_was_empty=not self._queue)
        self._queue.push(ticket)
        self._waits.begin(ticket)
        self._next_arrival += 1
        self.kv.prefetch(request)

    def abort(self, request_id: int) -> Request | None:
        """End a request at once and free all that it holds; None when it is not live. Its results in flight will be
        dropped."""
        self._register_filled()
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return None
        self._end(ticket, "abort")
        self.counters.aborted += 1
        return ticket.request

    def preempt(self, request_id: int) -> None:
        """Take a running request off its row, to be added again with all its tokens. Raises `KeyError` when it does not
        run."""
        self._register_filled()
        self._preemption.preempt(self._running.tickets[request_id], now_ns())

    def expired(self) -> list[Request]:
        """Requests that `plan` has ended since the last call because they had not started by their deadline, with
        finish reason "error". Told once."""
        expired, self._expired = self._expired, []
        return expired

    # ------------------------------------------------------------------ planning

    def plan(self) -> PlannedStep | None:
        """The next step, None when nothing can be computed now. See `PlannedStep` for what must be done with it."""
        self._register_filled()
        now = now_ns()
        if self._queue:
            self._expire(now)
            self._queue.age(now, self._running.best_class)
            self._waits.plan(now)
        if self._restoring:
            self._restoring.settle()
        step = self._compose(now, decode=not self.order.decodes_wait)
        if not step and self.order.decodes_wait:
            step = self._compose(now, decode=True)
        if not step:
            return None
        planned = step.build(self._next_step, self._running.take_retired())
        self._in_flight.append(self._next_step)
        self._next_step += 1
        self._filled = step.prefilled
        self._reservation.planned()
        return planned

    def _register_filled(self) -> None:
        """Before anything may look for the blocks of the last plan, or give them back."""
        filled, self._filled = self._filled, []
        for request in filled:
            self.kv.commit(request)

    def _expire(self, now: int) -> None:
        for ticket in self._queue.late(now):
            self._end(ticket, "error")
            self.counters.failed += 1
            self._expired.append(ticket.request)

    def _compose(self, now: int, *, decode: bool) -> StepBuilder:
        """A step's rows; of decode rows only with ``decode``."""
        decodes, prefills = self._running.wanting()
        if self._restoring:
            decodes, prefills = self._restoring.sift(decodes, prefills)
        if not decode:
            decodes = []
        lacking = self._preemption.lacking(decodes)
        below = CLASSES
        for victim in self._preemption.make_room(lacking, now):
            below = min(below, victim.service)  # who goes for want of blocks does not come back at once
        if below < CLASSES:
            decodes = [request for request in decodes if request.status is Status.RUNNING]
            prefills = [ticket for ticket in prefills if not ticket.waits]
        closed = Wait.KV
        if self._is_held(now, decodes, prefills):
            below, closed = 0, Wait.WINDOW
        if not below:
            self._waits.explain(_ALL, closed)
        step = StepBuilder()
        shares: PrefillShares | None = None
        if prefills or (self._queue and below):
            shares = self._share_out(decodes, prefills, below)
            if self._queue and below:
                turn = Turn(
                    step=step,
                    step_id=self._next_step,
                    shares=shares,
                    now_ns=now,
                    owed=lacking,
                    below=below,
                    closed=closed,
                    leaders=leaders_of(prefills + self._restoring.tickets, self.kv),
                )
                self._starting.start_waiting(turn)
                if turn.victims:
                    decodes = [request for request in decodes if request.status is Status.RUNNING]
        for request in decodes if lacking else ():
            if request.request_id in lacking:
                self._grow(request, step)
        step.decode(decodes)
        if shares is not None:
            for request, count in shares.settle():
                step.prefill(request, count)
            step.full = not shares.left
        if self._restoring:
            self._restoring.tell(step)
        return step

    def _is_held(self, now: int, decodes: list[Request], prefills: list[Ticket]) -> bool:
        """True while the batch window lets none of the waiting requests start."""
        hold = self._hold
        if hold is None or not hold.holding:
            return False
        return hold.keeps(now, len(self._queue), _known_load(decodes, prefills))

    def _share_out(self, decodes: list[Request], prefills: list[Ticket], below: int) -> PrefillShares:
        if len(prefills) > 1:
            prefills.sort(key=lambda ticket: ticket.rank)
        promised = [self._gaps[service] for service in {request.service for request in decodes}]
        gap_ms = min((gap for gap in promised if gap is not None), default=None)
        tokens = self.budget.prefill_tokens(_known_load(decodes, prefills), self._crowd(decodes, prefills), gap_ms)
        return PrefillShares(
            self._floors,
            prefills,
            max(tokens, 0 if decodes else 1),
            waiting=[self._queue.waiting(service) for service in range(below)],
            aged=self._queue.aged_first,
        )

    def _crowd(self, decodes: list[Request], prefills: list[Ticket]) -> int:
        """How many requests wait for their first token, for the budget. Beside decode rows the running prompts count
        too, a request for each `CROWD_TOKENS` that they still want: long ones are a crowd long before rows are short,
        and admission, which predicts from the pace, would keep the queue from ever becoming one."""
        waiting = len(self._queue)
        if decodes:
            waiting += sum([ticket.request.num_wanted for ticket in prefills]) // CROWD_TOKENS
        return waiting

    def _grow(self, request: Request, step: StepBuilder) -> None:
        """A block for the token that a decode row computes now. There is one: `make_room` has seen to it."""
        new = self.kv.grow(request, request.num_computed + 1)
        assert new, "a decode row lacks a KV block although room was made"
        step.blocks.append(RowBlocks(request.slot, new))

    # ------------------------------------------------------------------ results

    def complete(self, planned: PlannedStep, result: StepResult) -> list[Update]:
        """Take in the tokens of the oldest step in flight. Results of requests that have ended meanwhile are
        dropped; those of a preempted request count.

        Raises `RuntimeError` when the result is not that step's: the rows' state would be wrong from there on.
        """
        self._register_filled()
        plan = planned.plan
        if not self._in_flight or not plan.step_id == result.step_id == self._in_flight[0]:
            raise RuntimeError(
                f"result of step {result.step_id} given for step {plan.step_id}, but the steps in flight are "
                f"{list(self._in_flight)}; complete them in order"
            )
        slots = [work.slot for work in plan.work if work.sample]
        if slots != [sample.slot for sample in result.samples]:
            raise RuntimeError(
                f"step {plan.step_id} sampled slots {[sample.slot for sample in result.samples]}, planned were {slots}"
            )
        self._in_flight.popleft()
        now, queue, kv, counters = now_ns(), self._queue, self.kv, self.counters
        updates: list[Update] = []
        sampled = [request for work, request in zip(plan.work, planned.requests, strict=True) if work.sample]
        for request, sample in zip(sampled, result.samples, strict=True):
            request.num_pending -= 1
            if request.status is _FINISHED:
                continue
            if sample.error is not None:
                updates.append(self._fail(request, sample.error, sample.code))
                continue
            if request.prompt_only:
                updates.append(self._complete_prompt(request, sample))
                continue
            token, tokens = sample.token, request.tokens
            tokens.append(token)
            if request.timeline.marks[-1] != _DECODES:
                self._stamp_token(request, now)
            counters.output_tokens += 1
            if queue.num_aged:
                queue.had_token(self._tickets[request.request_id])
            known = len(tokens)
            may_end = known - request.num_prompt >= request.max_tokens or token in request.stop_ids
            finished = may_end and self._end_of_text(request, token)
            # Others are registered with the next full block, or at the end: nothing is lost, and most steps are spared.
            if not finished and not min(request.num_computed, known) % kv.block_tokens:
                kv.commit(request)
            updates.append(Update(request, token, sample.logprobs, finished, prompt_logprobs=sample.prompt_logprobs))
        return updates

    def _complete_prompt(self, request: Request, sample: RowSample) -> Update:
        """The prompt is computed, and that was all."""
        self._end(self._tickets[request.request_id], "length" if request.pooling is None else "stop")
        self.counters.finished += 1
        return Update(request, None, finished=True, pooled=sample.pooled, prompt_logprobs=sample.prompt_logprobs)

    def _end_of_text(self, request: Request, token: int) -> bool:
        """End the request if ``token`` is its last; False when it goes on."""
        # A masked stop token cannot come before min_tokens; an executor that lets one through does not end the text. A
        # grammar lets one come where nothing else may.
        early = request.num_output <= request.params.min_tokens and request.params.grammar is None
        if token in request.stop_ids and not early:
            chosen = token in (request.params.stop_token_ids or ())
            self._end(self._tickets[request.request_id], "stop", token if chosen else None)
        elif request.num_output >= request.max_tokens:
            self._end(self._tickets[request.request_id], "length")
        else:
            return False
        self.counters.finished += 1
        return True

    def _fail(self, request: Request, error: str, code: str | None) -> Update:
        self._end(self._tickets[request.request_id], "error")
        self.counters.failed += 1
        return Update(request, None, finished=True, error=error, code=code)

    def _stamp_token(self, request: Request, now: int) -> None:
        """Decode begins with the first token after each admission; that of a request preempted meanwhile is its
        first token too, but it goes on queueing."""
        timeline = request.timeline
        if timeline.marks[-1] == Mark.SCHEDULED:
            timeline.stamp(Mark.FIRST_TOKEN, now)
        elif timeline.marks[-1] == Mark.PREEMPTED and request.num_output == 1:
            timeline.stamp(Mark.FIRST_TOKEN, now)
            timeline.stamp(Mark.PREEMPTED, now)
        if self._hold is not None and request.num_output == 1:
            self._hold.window.first_token(now, (now - timeline.times[0]) / NS_PER_MS, len(self._queue))

    def _end(self, ticket: Ticket, reason: str, stop_reason: int | None = None) -> None:
        """The one way out: blocks, slot and queue place are given back, whatever state the request is in."""
        request = ticket.request
        waited = ticket.waits
        # A failed request's KV is suspect: nobody may find it.
        failed = reason == "error"
        if not failed:
            self.kv.commit(request)
            request.kept = self.kv.keep(request)
        self.kv.release(request, forget=failed)
        if request.status is Status.RUNNING:
            self._running.leave(ticket)
        if failed or request.prompt_only:  # that one says nothing of how long outputs get
            self._reservation.left(request)
        else:
            self._reservation.ended(request)
        self._queue.end(ticket)
        del self._tickets[request.request_id]
        request.finish(reason, stop_reason)
        if waited:
            self._waits.end(ticket, started=False)


def _known_load(decodes: list[Request], prefills: list[Ticket]) -> StepLoad:
    """What a budget is told: ``decodes`` will compute a token each, what ``prefills`` will is not known yet."""
    context = len(decodes) + sum([request.num_computed for request in decodes])  # a list: sum is twice as fast with it
    reach = max((ticket.request.num_computed for ticket in prefills), default=0)
    return StepLoad(len(decodes), context, 0, 0, reach)
