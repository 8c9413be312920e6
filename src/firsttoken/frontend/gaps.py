"""The whole account of an answer: its times, and why the largest gap between its tokens was that long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from firsttoken.core.clock import NS_PER_MS, NS_PER_S
from firsttoken.core.step_record import StepRecord
from firsttoken.core.timeline import Mark
from firsttoken.frontend.link import EngineLink
from firsttoken.frontend.times import RequestTimes
from firsttoken.observability.recent import RecentRequests
from firsttoken.observability.step_history import StepHistory
from firsttoken.observability.worst_gap import Gap, worst_gap

# How long before the gap steps are looked at for what is usual: so many times the gap, between these bounds.
_LOOK_BACK = 16
_LEAST_BACK_NS, _MOST_BACK_NS = 50 * NS_PER_MS, NS_PER_S
# Of a gap in which the request had no place in the batch, so long after it was taken and before the token came.
_AROUND_NS = NS_PER_S
_OTHERS = "another caller's"


class Owner(Protocol):
    """Of a prompt: a caller's request that runs or has ended."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...


@dataclass(frozen=True, slots=True)
class GapSources:
    """Where the steps of a gap and the owners of their prompts are found."""

    steps: StepHistory
    recent: RecentRequests
    link: EngineLink

    def whose(self, engine_id: int, tenant: str) -> str:
        """The request of an engine id, by its name only where it is the same tenant's."""
        live = cast(Owner | None, self.link.sink(engine_id))  # an event loop's link has `Generation`s only
        owner = live or self.recent.of_engine(engine_id)
        if owner is None or owner.tenant != tenant:
            return _OTHERS
        return f"request {owner.id}"


def steps_of(gap: Gap, stamps: Sequence[tuple[int, int]], history: StepHistory) -> list[StepRecord]:
    """The records that `worst_gap` looks at. A caller who does not read, or a preemption, may make a gap of minutes, in
    which others had hundreds of thousands of steps: to look at them all would hold up the event loop."""
    back = min(max(_LOOK_BACK * (gap.end - gap.start), _LEAST_BACK_NS), _MOST_BACK_NS)
    first, last = gap.start - back, min(max(gap.arrived, gap.start), gap.end)
    taken = next((ns for mark, ns in stamps if mark == Mark.PREEMPTED and gap.start <= ns < last), last)
    if last - taken <= 2 * _AROUND_NS:
        return history.between(first, last)
    return history.between(first, taken + _AROUND_NS) + history.between(last - _AROUND_NS, last)


@dataclass(frozen=True, slots=True)
class AccountMaker:
    """Makes the account when it is asked for. ``engine_ids`` are all answers' of the request."""

    times: RequestTimes
    sources: GapSources | None
    engine_ids: tuple[int, ...]
    tenant: str

    def __call__(self) -> dict[str, Any]:
        """See `observability.account.timings`; ``worst_gap`` is as `observability.worst_gap` says, None without a gap
        and without steps to look at."""
        return self.times.timings(self._worst_gap())

    def _worst_gap(self) -> dict[str, Any] | None:
        gap, sources = self.times.worst, self.sources
        if gap is None or sources is None:
            return None
        stamps = self.times.timeline.stamps()
        return worst_gap(gap, stamps, steps_of(gap, stamps, sources.steps), self._whose)

    def _whose(self, engine_id: int) -> str:
        if engine_id in self.engine_ids:
            return "this request's own"
        assert self.sources is not None
        return self.sources.whose(engine_id, self.tenant)
