"""The one scheduling rule: every step gives each request a number of the tokens that it wants.

`plan` works in this order, and each part relies on those before it:

1. make room: when decode rows lack KV blocks, victims are chosen and *fully* removed (blocks, slot, place in the
   running set) before any row of the plan exists; then the same for a waiting request of a better class;
2. decode rows, all of them;
3. running prefills and admissions, as far as budget, slots and KV allow (`PrefillShares`, `WaitingQueue`);
4. blocks that the step fills are registered for reuse, but only when the scheduler is asked for anything else: their
   hashes would be part of every first token.

Counts move at planning, tokens arrive in `complete`. So `plan` may be called again before the step before was
completed; results come back in the order of the plans.
"""

from __future__ import annotations

from collections import deque

from firsttoken.core.clock import now_ns
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.plan import RowBlocks, RowSample, StepResult
from firsttoken.core.request import Request, Status
from firsttoken.core.timeline import Mark
from firsttoken.kvcache import KVCache, Probe
from firsttoken.scheduler.budget import Budget
from firsttoken.scheduler.config import SchedulerConfig
from firsttoken.scheduler.queue import MAX_REFUSED_PROBES, RECHECK_STEPS, Waiting, WaitingQueue
from firsttoken.scheduler.shares import PrefillShares
from firsttoken.scheduler.step import Counters, PlannedStep, StepBuilder, Update
from firsttoken.scheduler.step_time import StepLoad


class Scheduler:
    """Owns every live request, its slot and (through ``kv``) its blocks. Not thread-safe."""

    def __init__(self, config: SchedulerConfig, kv: KVCache, budget: Budget) -> None:
        self.config = config
        self.kv = kv
        self.budget = budget
        self.counters = Counters()
        self._requests: dict[int, Request] = {}
        self._arrivals: dict[int, int] = {}
        self._running: dict[int, Request] = {}
        self._queue = WaitingQueue()
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._retired: list[int] = []
        self._filled: list[Request] = []  # with blocks that the last plan fills
        self._in_flight: deque[int] = deque()
        self._next_arrival = 0
        self._next_step = 0

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

    def get(self, request_id: int) -> Request | None:
        """A live request, None when it is unknown or has ended."""
        return self._requests.get(request_id)

    def can_ever_fit(self, request: Request) -> InvalidRequest | None:
        """Why a request can never run, with the numbers; None when it can."""
        prompt, longest = request.num_prompt, self.config.max_model_len
        if prompt == 0:
            return InvalidRequest("the prompt has no tokens; give at least one", param="prompt", code="empty_prompt")
        if request.max_tokens < 1:
            return InvalidRequest(f"max_tokens must be 1 or more, got {request.max_tokens}", param="max_tokens")
        if prompt >= longest:
            return InvalidRequest(
                f"the prompt has {prompt} tokens, but prompt and output together may have at most {longest} and the "
                f"output has at least one; shorten the prompt to {longest - 1} tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        output = min(request.max_tokens, longest - prompt)
        # The KV of the last token is never needed.
        blocks = self.kv.blocks_for(prompt + output - 1)
        if blocks > self.kv.num_blocks:
            room = self.kv.num_blocks * self.kv.block_tokens + 1
            return InvalidRequest(
                f"{prompt} prompt tokens and {output} output tokens need {blocks} KV blocks of "
                f"{self.kv.block_tokens} tokens, but the cache has {self.kv.num_blocks}; ask for at most {room} tokens "
                "in all, or start the engine with more KV memory",
                param="max_tokens" if prompt < room else "prompt",
                code="kv_capacity_exceeded",
            )
        return None

    def add(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest` when it can never fit, `ValueError` when its id is live."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is live already; ids must be unique")
        refusal = self.can_ever_fit(request)
        if refusal is not None:
            raise refusal
        request.max_tokens = min(request.max_tokens, self.config.max_model_len - request.num_prompt)
        self._requests[request.request_id] = request
        self._arrivals[request.request_id] = self._next_arrival
        self._queue.push(Waiting(request, self._next_arrival, preempted=False))
        self._next_arrival += 1

    def abort(self, request_id: int) -> Request | None:
        """End a request at once and free all that it holds; None when it is not live. Its results in flight will be
        dropped."""
        self._register_filled()
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "abort")
            self.counters.aborted += 1
        return request

    # ------------------------------------------------------------------ planning

    def plan(self) -> PlannedStep | None:
        """The next step, None when nothing can be computed now. See `PlannedStep` for what must be done with it."""
        self._register_filled()
        decodes, prefills = self._wanting()
        crowded = self._make_room(decodes)
        if crowded or self._preempt_for_class(prefills):
            decodes, prefills = self._wanting()
        step = StepBuilder()
        for request in decodes:
            self._grow(request, step)
            step.decode(request)
        if prefills or (self._queue and not crowded):
            load = _known_load(decodes, prefills)
            tokens = max(self.budget.prefill_tokens(load, len(self._queue)), 0 if decodes else 1)
            self._plan_prefills(step, prefills, tokens, admit=not crowded)
        if not step:
            return None
        planned = step.build(self._next_step, self._retired)
        self._retired = []
        self._in_flight.append(self._next_step)
        self._next_step += 1
        self._filled = step.prefilled
        return planned

    def _register_filled(self) -> None:
        """Before anything may look for the blocks of the last plan, or give them back."""
        filled, self._filled = self._filled, []
        for request in filled:
            self.kv.commit(request)

    def _wanting(self) -> tuple[list[Request], list[Request]]:
        """Running requests that want one token, and those that want more; what is planned to the end wants none."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._running.values():
            # `all_planned` and `num_wanted`, spelled out: this loop is most of a decode step's planning time.
            known = len(request.tokens) + request.num_pending
            if known - request.num_prompt < request.max_tokens:
                (decodes if known - request.num_computed == 1 else prefills).append(request)
        return decodes, prefills

    def _grow(self, request: Request, step: StepBuilder) -> None:
        """A block for the token that a decode row computes now. `_make_room` has seen to it that there is one."""
        if request.num_computed % self.kv.block_tokens:
            return
        new = self.kv.grow(request, request.num_computed + 1)
        assert new is not None, "a decode row lacks a KV block although room was made"
        if new:
            step.blocks.append(RowBlocks(request.slot, new))

    def _plan_prefills(self, step: StepBuilder, prefills: list[Request], tokens: int, *, admit: bool) -> None:
        prefills.sort(key=self._rank)
        ahead = self._queue.first(1)
        outranked = bool(admit and ahead and prefills and ahead[0].request.priority < prefills[0].priority)
        shares = PrefillShares(prefills, tokens, contended=admit and bool(ahead), outranked=outranked)
        if admit:
            self._admit(step, shares, prefills)
        for request, count in shares.settle():
            step.prefill(request, count)

    def _admit(self, step: StepBuilder, shares: PrefillShares, prefills: list[Request]) -> None:
        """Start waiting requests, in order. One that does not fit is overtaken by those behind it, but in at most
        ``max_passes`` steps: then they wait for it."""
        leaders = {self._computing(request): request.priority for request in prefills}
        refused: list[Waiting] = []
        overtaken = probed = 0
        for entry in self._queue.first(self.config.lookahead):
            # Any admission takes a block at least, since one token at least must be computed.
            if not shares.left or not self._free_slots or self.kv.available <= self._reserve():
                break
            if entry.request.num_pending:
                break  # preempted, and its last token is still under way: one step, not worth losing its place
            if self._try_admit(entry, step, shares, leaders):
                overtaken = len(refused)
            elif entry.passes >= self.config.max_passes:
                break
            else:
                refused.append(entry)
                probed += entry.recheck == self._next_step + RECHECK_STEPS
                if probed == MAX_REFUSED_PROBES:
                    break  # the others are looked at in the next steps, when these are known not to fit
        for entry in refused[:overtaken]:
            entry.passes += 1

    def _try_admit(
        self, entry: Waiting, step: StepBuilder, shares: PrefillShares, leaders: dict[bytes | None, int]
    ) -> bool:
        request = entry.request
        reserve = self._reserve()
        if not shares.may_enter(request):
            return False
        if entry.cost + reserve > self.kv.available and self._next_step < entry.recheck:
            return False
        probe = self.kv.probe(request)
        if probe.cost + reserve > self.kv.available:
            entry.cost, entry.recheck = probe.cost, self._next_step + RECHECK_STEPS
            return False
        # The very block it needs next is computed by this step: in the next one it need not be computed again.
        if self._follows(request, probe, leaders) and entry.passes < self.config.max_passes:
            return False
        admission = self.kv.admit(request, probe, reserve=reserve)
        assert admission is not None, "a request that fits was not admitted"
        self._queue.remove(request.request_id)
        self._running[request.request_id] = request
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()
        request.num_computed = admission.cached_tokens
        request.timeline.stamp(Mark.SCHEDULED)
        if not request.first_scheduled:
            request.first_scheduled = True
            request.num_cached = admission.cached_tokens
            self.counters.prompt_tokens += request.num_prompt
            self.counters.cached_prompt_tokens += admission.cached_tokens
        step.start(request, admission.blocks)
        shares.enter(request)
        if probe.next_hash is not None:
            leaders.setdefault(probe.next_hash, request.priority)
        return True

    def _computing(self, request: Request) -> bytes | None:
        """The hash of the first block that a running prefill computes next, if it is full."""
        return self.kv.hash_of(request, request.num_computed // self.kv.block_tokens)

    @staticmethod
    def _follows(request: Request, probe: Probe, leaders: dict[bytes | None, int]) -> bool:
        """True when a running prefill of no worse class computes the block that the request would begin with."""
        return probe.next_hash is not None and leaders.get(probe.next_hash, request.priority + 1) <= request.priority

    def _reserve(self) -> int:
        """Blocks that admission leaves to the running requests. None when nothing runs, or the largest would never
        start."""
        return min(len(self._running), int(self.config.watermark * self.kv.num_blocks))

    # ------------------------------------------------------------------ making room

    def _make_room(self, decodes: list[Request]) -> bool:
        """Free blocks until every decode row can have the one it lacks. True when a request was preempted for it."""
        lacking = {r.request_id for r in decodes if self._lacks_block(r)}
        if len(lacking) <= self.kv.available:
            return False
        for request in self._running.values():
            if request.all_planned:  # its last step is planned: no later step reads its blocks
                self._give_blocks_back(request)
        preempted = False
        while len(lacking) > self.kv.available:
            candidates = [request for request in self._running.values() if not request.all_planned]
            # Alone it has room, because `can_ever_fit` let it in.
            assert len(candidates) > 1, "a request that runs alone lacks KV blocks"
            victim = max(candidates, key=self._rank)
            self._preempt(victim)
            lacking.discard(victim.request_id)
            preempted = True
        return preempted

    def _lacks_block(self, request: Request) -> bool:
        computed = request.num_computed
        return computed % self.kv.block_tokens == 0 and self.kv.lacks(request, computed + 1) > 0

    def _preempt_for_class(self, prefills: list[Request]) -> bool:
        """Make room for the first waiting request at the cost of running ones of a worse class. True when it did."""
        for entry in self._queue.first(1):
            victims = self._victims_for(entry.request, prefills)
            for victim in victims:
                self._preempt(victim)
            return bool(victims)
        return False

    def _victims_for(self, request: Request, prefills: list[Request]) -> list[Request]:
        """Those of a worse class that must go for ``request`` to start, the worst and newest first.

        None unless it can start then: who is preempted for nothing would only start again, and be preempted again.
        """
        worse = [r for r in self._running.values() if r.priority > request.priority and not r.all_planned]
        if not worse or request.num_pending:
            return []
        first = min(prefills, key=self._rank, default=None)
        if first is not None and first.priority <= request.priority and request.num_tokens >= first.num_wanted:
            return []  # `PrefillShares.may_enter` will refuse it
        probe = self.kv.probe(request)
        if self._follows(request, probe, {self._computing(each): each.priority for each in prefills}):
            return []
        blocks = probe.cost + self._reserve() - self.kv.available
        slots = 0 if self._free_slots else 1
        victims: list[Request] = []
        for victim in sorted(worse, key=self._rank, reverse=True):
            if blocks <= 0 and len(victims) >= slots:
                break
            victims.append(victim)
            blocks -= self.kv.exclusive_blocks(victim)
        return victims if blocks <= 0 and len(victims) >= slots else []

    def _rank(self, request: Request) -> tuple[int, int]:
        """Lower is better: class, then arrival."""
        return request.priority, self._arrivals[request.request_id]

    def _preempt(self, request: Request) -> None:
        """Take a request off its row, to be added again with all tokens known by then."""
        self._give_blocks_back(request)
        self._give_slot_back(request)
        request.num_computed = 0
        request.preemptions += 1
        request.status = Status.WAITING
        request.timeline.stamp(Mark.PREEMPTED)
        self.counters.preemptions += 1
        self._queue.push(Waiting(request, self._arrivals[request.request_id], preempted=True))

    def _give_blocks_back(self, request: Request, *, forget: bool = False) -> None:
        if not forget:
            self.kv.commit(request)
        self.kv.release(request, forget=forget)

    def _give_slot_back(self, request: Request) -> None:
        del self._running[request.request_id]
        self._free_slots.append(request.slot)
        self._retired.append(request.slot)
        request.slot = -1

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
        rows = [(work, request) for work, request in zip(plan.work, planned.requests, strict=True) if work.sample]
        slots = [work.slot for work, _ in rows]
        if slots != [sample.slot for sample in result.samples]:
            raise RuntimeError(
                f"step {plan.step_id} sampled slots {[sample.slot for sample in result.samples]}, planned were {slots}"
            )
        self._in_flight.popleft()
        now = now_ns()
        updates: list[Update] = []
        for (_, request), sample in zip(rows, result.samples, strict=True):
            request.num_pending -= 1
            if request.status is not Status.FINISHED:
                updates.append(self._harvest(request, sample, now))
        return updates

    def _harvest(self, request: Request, sample: RowSample, now: int) -> Update:
        if sample.error is not None:
            self._end(request, "error")
            self.counters.failed += 1
            return Update(request, None, finished=True, error=sample.error)
        request.tokens.append(sample.token)
        self.counters.output_tokens += 1
        self._stamp_token(request, now)
        # A masked stop token cannot come before min_tokens; an executor that lets one through does not end the text.
        output = len(request.tokens) - request.num_prompt
        if sample.token in request.stop_ids and output > request.params.min_tokens:
            chosen = sample.token in (request.params.stop_token_ids or ())
            self._end(request, "stop", sample.token if chosen else None)
        elif output >= request.max_tokens:
            self._end(request, "length")
        else:
            # Others are registered with the next full block, or at the end: nothing is lost, and most steps are spared.
            if min(request.num_computed, len(request.tokens)) % self.kv.block_tokens == 0:
                self.kv.commit(request)
            return Update(request, sample.token, sample.logprobs)
        self.counters.finished += 1
        return Update(request, sample.token, sample.logprobs, finished=True)

    def _stamp_token(self, request: Request, now: int) -> None:
        """Decode begins with the first token after each admission; that of a request preempted meanwhile is its
        first token too, but it goes on queueing."""
        timeline = request.timeline
        if timeline.marks[-1] == Mark.SCHEDULED:
            timeline.stamp(Mark.FIRST_TOKEN, now)
        elif timeline.marks[-1] == Mark.PREEMPTED and request.num_output == 1:
            timeline.stamp(Mark.FIRST_TOKEN, now)
            timeline.stamp(Mark.PREEMPTED, now)

    def _end(self, request: Request, reason: str, stop_reason: int | None = None) -> None:
        """The one way out: blocks, slot and queue place are given back, whatever state the request is in."""
        # A failed request's KV is suspect: nobody may find it.
        self._give_blocks_back(request, forget=reason == "error")
        if request.status is Status.RUNNING:
            self._give_slot_back(request)
        else:
            self._queue.remove(request.request_id)
        del self._requests[request.request_id]
        del self._arrivals[request.request_id]
        request.finish(reason, stop_reason)


def _known_load(decodes: list[Request], prefills: list[Request]) -> StepLoad:
    """What a budget is told: ``decodes`` are planned, ``prefills`` are not."""
    context = sum([request.num_computed for request in decodes])  # a list: sum is twice as fast with it
    return StepLoad(len(decodes), context, 0, 0, max((request.num_computed for request in prefills), default=0))
