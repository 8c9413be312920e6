"""What an engine still owes its callers, as running sums, and how fast it works that off."""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.request import Request, Status
from firsttoken.core.service import ServiceClass
from firsttoken.scheduler.step import PlannedStep
from firsttoken.scheduler.tenant_queue import TenantQueue

CLASSES = len(ServiceClass)
# Seconds after which what was measured counts for 1/e: of work, time in which there was enough of it; of arrivals, and
# of ends, any time.
WORK_MEMORY_S, ARRIVAL_MEMORY_S, END_MEMORY_S = 2.0, 10.0, 10.0
# Fewer full steps, or ends, say nothing about how fast it goes.
MIN_STEPS, MIN_ENDS = 4, 8
# Time without ends is added up until it is so much, or until the next.
QUIET_S = 0.1
# A step that is slower than this many of its like counts as so many: a kernel was compiled, a clock read late.
OUTLIER = 4.0


class Rate:
    """A sum of amounts over a sum of exposures, both of which fade with time."""

    __slots__ = ("_amount", "_exposure", "_memory_s", "samples")

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._amount = self._exposure = 0.0
        self.samples = 0

    def add(self, amount: float, exposure: float, seconds: float, samples: int = 1) -> None:
        """``amount`` came of ``exposure`` during the last ``seconds``."""
        left = exp(-seconds / self._memory_s)
        self._amount = self._amount * left + amount
        self._exposure = self._exposure * left + exposure
        self.samples += samples

    @property
    def value(self) -> float:
        """Amount for each of exposure; 0 while nothing is known."""
        return self.of_at_least(0.0)

    def of_at_least(self, amount: float) -> float:
        """The same as if at least so much had come in the time that is remembered."""
        return max(self._amount, amount) / self._exposure if self._exposure > 0 else 0.0


class StepWork(NamedTuple):
    """Of a planned step: by how many prompt tokens less are owed after it, found in the cache or computed, and whether
    it had as much to do as its budget allows."""

    tokens: int
    full: bool


class _Live:
    """A request that is owed its prompt: ``owed`` tokens of it, waiting or not."""

    __slots__ = ("owed", "request", "service", "waits")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.service = int(request.service)
        self.owed = request.num_tokens
        self.waits = True


class Backlog:
    """Counts and token sums of each class, kept up to date from what the loop sees, in O(1) a request and O(prompts in
    progress) a step. Tokens of prompts count in full, whether they will be found in the cache or not, on both sides: in
    what is owed, and in the rate at which that shrinks.

    ``rows`` requests can run at once. The loop tells of each request once that it arrived and once that it ended.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.waiting = [0] * CLASSES  # requests
        self.waiting_tokens = [0] * CLASSES
        self.queues = [TenantQueue() for _ in range(CLASSES)]  # the same by tenant
        self.running = [0] * CLASSES
        self.running_tokens = [0] * CLASSES  # of prompts that run and are not computed to their ends
        self.fresh = [0] * CLASSES  # of those that wait: came since the last plan, which may be about to start them
        # Something else than the budget keeps requests waiting although rows are free: KV, as a rule.
        self.short_of_kv = False
        self._live: dict[int, _Live] = {}
        self._prompts: dict[int, _Live] = {}  # running, with tokens owed
        self._preemptions = 0
        self._work = Rate(WORK_MEMORY_S)
        self._ends = Rate(END_MEMORY_S)
        self._quiet_s = self._exposed = 0.0  # since the last end, not added yet: time, and that times running requests
        self._arrivals = [_Arrivals() for _ in range(CLASSES)]

    # ------------------------------------------------------------------ told by the loop

    def offered(self, request: Request, now_ns: int) -> None:
        """A request came, whether it is let in or not."""
        self._arrivals[request.service].add(request.num_tokens, now_ns)

    def arrived(self, request: Request) -> None:
        """It was let in, and waits."""
        live = self._live[request.request_id] = _Live(request)
        self.fresh[live.service] += 1
        self._wait(live)

    def planned(self, step: PlannedStep, preemptions: int) -> StepWork:
        """A step was planned; the scheduler has counted so many ``preemptions`` so far."""
        if preemptions != self._preemptions:
            self._preemptions = preemptions
            self._find_preempted()
        for start in step.plan.starts:
            self._start(self._live[start.request_id])
        done = self._compute() if self._prompts else 0
        self.fresh = [0] * CLASSES
        self.short_of_kv = not step.full and any(self.waiting) and sum(self.running) < self.rows
        return StepWork(done, step.full)

    def ran(self, work: StepWork, seconds: float, ends: int) -> None:
        """A step took ``seconds``, and so many requests ended with it."""
        self._quiet_s += seconds
        self._exposed += (sum(self.running) + ends) * seconds
        if ends or self._quiet_s > QUIET_S:
            self._ends.add(ends, self._exposed, self._quiet_s, ends)
            self._quiet_s = self._exposed = 0.0
        if not work.tokens or seconds <= 0:
            return
        # A step that had less to do than it could says what can be done at least.
        if work.full or work.tokens > self._work.value * seconds:
            if work.full and self._work.samples >= MIN_STEPS:
                seconds = min(seconds, OUTLIER * work.tokens / self._work.value)
            self._work.add(work.tokens, seconds, seconds, work.full)

    def ended(self, request: Request) -> None:
        """Whatever the reason; one that it was not told of has no place here."""
        live = self._live.pop(request.request_id, None)
        if live is None:
            return
        if live.waits:
            self._wait_no_longer(live)
            self.fresh[live.service] = min(self.fresh[live.service], self.waiting[live.service])
        else:
            self.running[live.service] -= 1
            self.running_tokens[live.service] -= live.owed
            self._prompts.pop(request.request_id, None)

    # ------------------------------------------------------------------ asked

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that it gets done while there are enough; 0 while that is not known."""
        return self._work.value if self._work.samples >= MIN_STEPS else 0.0

    @property
    def ends_per_s(self) -> float:
        """Running requests that end, with as many running as now; 0 while that is not known. One at least is taken to
        end in the time remembered: that none did for long makes none later."""
        return self._ends.of_at_least(1.0) * sum(self.running) if self._ends.samples >= MIN_ENDS else 0.0

    def offered_per_s(self, service: int, now_ns: int) -> tuple[float, float]:
        """(requests, their prompt tokens) of a class that come each second."""
        return self._arrivals[service].per_s(now_ns)

    # ------------------------------------------------------------------ inside

    def _wait(self, live: _Live) -> None:
        live.waits = True
        live.owed = live.request.num_tokens
        self.waiting[live.service] += 1
        self.waiting_tokens[live.service] += live.owed
        self.queues[live.service].add(live.request.tenant, live.request.share, live.owed)

    def _wait_no_longer(self, live: _Live) -> None:
        live.waits = False
        self.waiting[live.service] -= 1
        self.waiting_tokens[live.service] -= live.owed
        self.queues[live.service].remove(live.request.tenant, live.owed)

    def _start(self, live: _Live) -> None:
        if live.waits:
            self._wait_no_longer(live)
            self.running[live.service] += 1
            self.running_tokens[live.service] += live.owed
        else:  # preempted and started again by one plan
            self.running_tokens[live.service] += live.request.num_tokens - live.owed
            live.owed = live.request.num_tokens
        self._prompts[live.request.request_id] = live

    def _compute(self) -> int:
        """Look what the plan has left of the prompts in progress."""
        done = 0
        complete: list[int] = []
        for request_id, live in self._prompts.items():
            request = live.request
            left = max(len(request.tokens) - request.num_computed, 0)
            if left != live.owed:
                done += live.owed - left
                self.running_tokens[live.service] -= live.owed - left
                live.owed = left
            if not left:
                complete.append(request_id)
        for request_id in complete:
            del self._prompts[request_id]
        return done

    def _find_preempted(self) -> None:
        for request_id, live in self._live.items():
            if not live.waits and live.request.status is Status.WAITING:
                self._prompts.pop(request_id, None)
                self.running[live.service] -= 1
                self.running_tokens[live.service] -= live.owed
                self._wait(live)


class _Arrivals:
    """How many requests and prompt tokens come each second. Before the first, a quarter of a second is taken for quiet:
    a burst is no rate."""

    __slots__ = ("_requests", "_seconds", "_seen_ns", "_tokens")

    def __init__(self) -> None:
        self._seen_ns = 0
        self._requests = self._tokens = 0.0
        self._seconds = 0.25

    def add(self, tokens: int, now_ns: int) -> None:
        gap = max(now_ns - self._seen_ns, 0) / NS_PER_S if self._seen_ns else 0.0
        left = exp(-gap / ARRIVAL_MEMORY_S)
        self._requests = self._requests * left + 1
        self._tokens = self._tokens * left + tokens
        self._seconds = self._seconds * left + gap
        self._seen_ns = now_ns

    def per_s(self, now_ns: int) -> tuple[float, float]:
        if not self._seen_ns:
            return 0.0, 0.0
        gap = max(now_ns - self._seen_ns, 0) / NS_PER_S
        left = exp(-gap / ARRIVAL_MEMORY_S)
        seconds = self._seconds * left + gap
        return self._requests * left / seconds, self._tokens * left / seconds
