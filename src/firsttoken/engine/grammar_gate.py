"""Requests that wait for their grammar before they join the queue: it is compiled beside the loop, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass
from firsttoken.core.timeline import Mark
from firsttoken.core.waits import Wait
from firsttoken.grammar.grammars import Grammars, Verdict

if TYPE_CHECKING:
    from firsttoken.grammar.compiled import Compiled

log = logging.getLogger(__name__)


# Grammars that requests of one class may have at once, and bytes of them: no further one is begun beyond that.
MOST_HELD = 128
MOST_HELD_BYTES = 512_000_000
# When an engine has had nothing to do for so long, the vocabulary is read for the first grammar to come.
REST_NS = NS_PER_S


class _Held:
    """A grammar as the requests of a class have it: it is found for as long as one of them lives, so that its row
    starts at once."""

    __slots__ = ("__weakref__", "compiled")

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled


class GrammarGate:
    """Of several grammars that are waited for the best class's is compiled first, then that of whoever had none
    compiled for longest: who sends many slow ones waits for them himself. While requests of a class have `MOST_HELD`,
    or `MOST_HELD_BYTES` of them, no further one is compiled for it, which bounds the memory of all. Nothing is compiled
    for who has left.

    Nothing here costs a request without a grammar anything. With ``ahead`` the vocabulary is read before the first one
    with a grammar comes, when the engine `rest`s.
    """

    def __init__(self, grammars: Grammars | None, *, ahead: bool = False) -> None:
        self._grammars = grammars
        self._ahead = ahead
        self._made_ns = now_ns()
        self._waiting: dict[int, Request] = {}
        self._compiling: tuple[Grammar, Future[Verdict]] | None = None
        self._turns: dict[str, int] = {}  # by tenant: when he last had one compiled
        self._turn = 0
        self._deadline_ns = 0  # none of those that wait has an earlier one; 0 where none has any
        self._held: dict[int, WeakValueDictionary[Grammar, _Held]] = {
            service: WeakValueDictionary() for service in ServiceClass
        }

    def __len__(self) -> int:
        return len(self._waiting)

    def keeps(self, request: Request) -> bool:
        """Whether the request, which has just come, has to wait. Raises `InvalidRequest` when its grammar cannot be
        used, or needs more tokens than it may have."""
        grammar = request.params.grammar
        if grammar is None:
            return False
        if self._grammars is None:
            raise InvalidRequest("this engine holds no answers to grammars", param="grammar")
        verdict = self._grammars.known(grammar)
        if verdict is None:
            self._waiting[request.request_id] = request
            if request.deadline_ns:
                self._deadline_ns = min(self._deadline_ns or request.deadline_ns, request.deadline_ns)
            self._compile_next()
            return True
        self._give(request, verdict)
        return False

    def released(self) -> Iterator[tuple[Request, InvalidRequest | None]]:
        """Those that wait no longer, in the order in which they came, and why they cannot run. Those whose deadline has
        passed are among them, without a grammar: they never start."""
        if self._compiling is not None and self._compiling[1].done():
            grammar, compiling = self._compiling
            self._compiling = None
            error = compiling.exception()
            if error is not None:
                log.error("a grammar could not be compiled", exc_info=error)
                verdict: Verdict = InvalidRequest(f"the grammar could not be compiled: {error}", param="grammar")
            else:
                verdict = compiling.result()
            for request in [one for one in self._waiting.values() if one.params.grammar == grammar]:
                yield self._release(request, verdict)
        if self._deadline_ns and now_ns() >= self._deadline_ns:
            yield from self._too_late(now_ns())
        self._compile_next()

    def rest(self, since_ns: int) -> None:
        """The engine has had nothing to do ``since_ns``, or since this was made."""
        if self._ahead and self._grammars is not None and now_ns() - max(since_ns, self._made_ns) >= REST_NS:
            self._ahead = False
            self._grammars.prepare()

    def drop(self, request_id: int) -> Request | None:
        """End one that waits; None where it does not."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            since_ns = request.timeline.times[-1]
            request.finish("abort")
            request.queue_ns[Wait.GRAMMAR] += request.timeline.times[-1] - since_ns
        return request

    def _compile_next(self) -> None:
        if self._compiling is not None or self._grammars is None:
            return
        if not self._waiting:
            self._turns.clear()
            return
        roomy = {service for service in self._held if self._has_room(service)}
        ready = [one for one in self._waiting.values() if one.service in roomy]
        if not ready:
            return
        first = min(ready, key=lambda one: (one.service, self._turns.get(one.tenant, 0)))  # of equals the first to come
        self._turn += 1
        self._turns[first.tenant] = self._turn
        assert first.params.grammar is not None
        self._compiling = first.params.grammar, self._grammars.compile(first.params.grammar)

    def _has_room(self, service: int) -> bool:
        held = list(self._held[service].values())
        return len(held) < MOST_HELD and sum(one.compiled.nbytes for one in held) < MOST_HELD_BYTES

    def _too_late(self, now: int) -> Iterator[tuple[Request, InvalidRequest | None]]:
        for request in [one for one in self._waiting.values() if 0 < one.deadline_ns <= now]:
            yield self._release(request, None)
        deadlines = [one.deadline_ns for one in self._waiting.values() if one.deadline_ns]
        self._deadline_ns = min(deadlines, default=0)

    def _release(self, request: Request, verdict: Verdict | None) -> tuple[Request, InvalidRequest | None]:
        del self._waiting[request.request_id]
        refusal: InvalidRequest | None = None
        try:
            if verdict is not None:
                self._give(request, verdict)
        except InvalidRequest as error:
            refusal = error
        since_ns = request.timeline.times[-1]
        request.queue_ns[Wait.GRAMMAR] += request.timeline.stamp(Mark.ARRIVED) - since_ns  # it queues from here on
        return request, refusal

    def _give(self, request: Request, verdict: Verdict) -> None:
        if isinstance(verdict, InvalidRequest):
            raise InvalidRequest(verdict.message, param=verdict.param, code=verdict.code)
        verdict.check_room(request.max_tokens)
        assert request.params.grammar is not None
        request.held = self._held[request.service].setdefault(request.params.grammar, _Held(verdict))
