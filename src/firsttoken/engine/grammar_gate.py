"""Requests that wait for their grammar before they join the queue: it is compiled beside the loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.request import Request
from firsttoken.core.timeline import Mark
from firsttoken.core.waits import Wait
from firsttoken.grammar.grammars import Grammars

log = logging.getLogger(__name__)


class GrammarGate:
    """Nothing here costs anything while no request has a grammar."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._waiting: dict[int, Request] = {}

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
        compiling = self._grammars.ask(grammar)
        if not compiling.done():
            self._waiting[request.request_id] = request
            return True
        error = compiling.exception()
        if isinstance(error, InvalidRequest):
            raise error
        if error is not None:
            log.error("a grammar could not be compiled", exc_info=error)
            raise InvalidRequest(f"the grammar could not be compiled: {error}", param="grammar")
        compiling.result().check_room(request.max_tokens)
        return False

    def released(self) -> Iterator[tuple[Request, InvalidRequest | None]]:
        """Those that wait no longer, in the order in which they came, and why they cannot run."""
        for request in list(self._waiting.values()):
            del self._waiting[request.request_id]
            refusal: InvalidRequest | None = None
            try:
                if self.keeps(request):
                    continue
            except InvalidRequest as error:
                refusal = error
            since_ns = request.timeline.times[-1]
            request.queue_ns[Wait.GRAMMAR] += request.timeline.stamp(Mark.ARRIVED) - since_ns  # it queues from here on
            yield request, refusal

    def drop(self, request_id: int) -> Request | None:
        """End one that waits; None where it does not."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            since_ns = request.timeline.times[-1]
            request.finish("abort")
            request.queue_ns[Wait.GRAMMAR] += request.timeline.times[-1] - since_ns
        return request
