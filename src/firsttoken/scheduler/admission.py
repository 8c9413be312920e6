"""Who is let in when more come than can be served in time.

To turn away one who would have been served in time is worse than to let in one who will not: so a prediction must be
over its limit clearly, nothing is refused by it while nothing goes before, and a class with ``max_queue`` never is.

What one tenant sends too much of turns away that tenant: a prediction counts of a class's queue what goes before the
tenant's own requests, and a full queue still takes tenants that have less than their part of it.
"""

from __future__ import annotations

from math import ceil
from typing import Literal, NamedTuple

from firsttoken.core.clock import NS_PER_MS, NS_PER_S, now_ns
from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass, Targets
from firsttoken.scheduler.backlog import CLASSES, Backlog
from firsttoken.scheduler.headroom import Headroom

Reason = Literal["queue", "ttft", "deadline"]
REASONS: tuple[Reason, ...] = ("queue", "ttft", "deadline")

# A prediction must be over the target, or over what a deadline leaves, by so much.
TARGET_MARGIN, DEADLINE_MARGIN = 1.5, 2.0


class Refusal(NamedTuple):
    """``reason``: the class's queue is full, its first-token target would be missed, or the request's own deadline.
    ``retry_after_s`` (1 or more): when it would be let in, should nobody else come. ``late``: the deadline has
    passed, so that this very request can never start."""

    reason: Reason
    message: str
    retry_after_s: int
    late: bool = False


class Admission:
    """Decides on each request when it arrives, in O(1), from the sums of ``backlog``, and counts whom it refuses."""

    def __init__(self, targets: Targets, rows: int) -> None:
        self.targets = targets
        self.backlog = Backlog(rows)
        self.headroom = Headroom(self.backlog, targets)
        self.refused: list[dict[str, int]] = [dict.fromkeys(REASONS, 0) for _ in range(CLASSES)]

    def decide(self, request: Request) -> Refusal | None:
        """Why it is turned away; None when it is let in: then it is part of the backlog until `Backlog.ended`."""
        now = now_ns()
        self.backlog.offered(request, now)
        refusal = self._by_count(request, now) or self._by_time(request, now)
        if refusal is None:
            self.backlog.arrived(request)
        else:
            self.refused[request.service][refusal.reason] += 1
        return refusal

    def _by_count(self, request: Request, now: int) -> Refusal | None:
        service = request.service
        backlog, most = self.backlog, self.targets.of(service).max_waiting
        waiting = backlog.waiting[service]
        if waiting < most:
            return None
        # Those that came together while rows are free do not wait yet: the next plan is about to start them.
        free = max(backlog.rows - sum(backlog.running), 0)
        starting = min(backlog.fresh[service], free)
        if waiting - starting < most:
            return None
        if backlog.queues[service].has_less_than_its_part(request.tenant, most):
            return None
        # As many must start as are too many, at the pace at which all of them would.
        seconds = self.headroom.wait(service, now).seconds * (waiting - most + 1) / waiting
        name = ServiceClass(service).name.lower()
        told = f"{waiting - starting} requests of class {name} wait already"
        if starting:
            told += f" beside {starting} that are about to start"
        return _refusal("queue", f"{told}, and a new one is let in while fewer than {most} do (max_waiting)", seconds)

    def _by_time(self, request: Request, now: int) -> Refusal | None:
        service, deadline = request.service, request.deadline_ns
        if deadline and now >= deadline:
            late = (now - deadline) / NS_PER_MS
            why = (
                f"deadline exceeded: it passed {late:.3f} ms before the engine could look at the request; give it more "
                "time"
            )
            return Refusal("deadline", why, 1, late=True)
        targets = self.targets.of(service)
        if targets.max_queue is not None or (targets.ttft_p99 is None and not deadline):
            return None
        if not self.headroom.crowded(service):
            return None
        name = ServiceClass(service).name.lower()
        ahead = self.backlog.queues[service].ahead_of(request.tenant)
        if targets.ttft_p99 is not None:
            target = targets.ttft_p99 / 1000
            predicted = self.headroom.ttft_s(service, request.num_prompt, now, ahead)
            if predicted > TARGET_MARGIN * target:
                why = (
                    f"the first token would come after about {predicted:.1f} s, and class {name} is promised it within"
                )
                return _refusal("ttft", f"{why} {target:g} s (ttft_p99)", predicted - target)
        if deadline:
            left = (deadline - now) / NS_PER_S
            wait = self.headroom.wait(service, now, ahead).seconds
            if wait > DEADLINE_MARGIN * left:
                why = f"the request could start after about {wait:.1f} s, and its deadline is in {left:.1f} s"
                return _refusal("deadline", why, wait - left)
        return None


def _refusal(reason: Reason, why: str, seconds: float) -> Refusal:
    wait = max(1, ceil(seconds))
    return Refusal(reason, f"the engine is overloaded: {why}; try again in {wait} s", wait)
