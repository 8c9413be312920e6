"""Requests that have started and whose KV is still on its way from a lower tier.

They hold a slot and their blocks and are in no step. Their row is told to the executor with the first step that they
are part of: a plan without work is none, and would be lost.
"""

from __future__ import annotations

from firsttoken.core.request import Request, Status
from firsttoken.core.timeline import Mark
from firsttoken.kvcache import KVCache
from firsttoken.scheduler.queue import Ticket
from firsttoken.scheduler.running import RunningSet
from firsttoken.scheduler.step import Counters, StepBuilder


class Restoring:
    """Nothing here costs anything while nobody restores."""

    def __init__(self, kv: KVCache, running: RunningSet, counters: Counters) -> None:
        self._kv = kv
        self._running = running
        self._counters = counters
        self._waiting: dict[int, Ticket] = {}
        self._untold: dict[int, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting or self._untold)

    @property
    def waits(self) -> bool:
        """True while a request waits for its KV, and a plan made later may have it."""
        return bool(self._waiting)

    @property
    def tickets(self) -> list[Ticket]:
        """Of those that wait."""
        return list(self._waiting.values())

    def begin(self, ticket: Ticket) -> bool:
        """A request was admitted. True when it has to wait for KV first."""
        request = ticket.request
        if not self._kv.begin_restore(request):
            return False
        request.timeline.stamp(Mark.RESTORING)
        self._running.hold_back(request)
        self._untold.pop(request.request_id, None)  # of a start before this one
        self._waiting[request.request_id] = ticket
        return True

    def settle(self) -> None:
        """Let those go on whose KV has arrived, and forget those that run no more."""
        for request_id, request in list(self._untold.items()):
            if request.status is not Status.RUNNING:
                del self._untold[request_id]
        for request_id, ticket in list(self._waiting.items()):
            request = ticket.request
            if request.status is not Status.RUNNING:
                del self._waiting[request_id]
                continue
            restored = self._kv.poll_restore(request)
            if restored is None:
                continue
            del self._waiting[request_id]
            self._untold[request_id] = request
            request.num_computed += restored.tokens
            request.timeline.stamp(Mark.SCHEDULED)
            if not request.preemptions:  # of the prompt as it came
                request.num_cached_host, request.num_cached_disk = restored.host, restored.disk
                request.num_cached += restored.tokens
                self._counters.cached_prompt_tokens += restored.tokens

    def sift(self, decodes: list[Request], prefills: list[Ticket]) -> tuple[list[Request], list[Ticket]]:
        """Those that may be part of a step."""
        waiting = self._waiting
        if not waiting:
            return decodes, prefills
        return (
            [request for request in decodes if request.request_id not in waiting],
            [ticket for ticket in prefills if ticket.request.request_id not in waiting],
        )

    def tell(self, step: StepBuilder) -> None:
        """Have the rows start that are part of a step for the first time."""
        for request in step.requests:
            if self._untold.pop(request.request_id, None) is not None:
                self._running.told(request)
                step.start(request, self._kv.blocks_of(request))
