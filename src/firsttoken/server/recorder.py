"""What is counted and kept of a call once it is over: ``/metrics``, and the record behind ``GET /v1/requests``."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from firsttoken.core.clock import now_ns
from firsttoken.frontend.ended import Door, ended_request
from firsttoken.server.call import RECEIVED_NS, Call, header

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.server.audit import Audit
    from firsttoken.server.call import Scope
    from firsttoken.server.errors import ApiError

log = logging.getLogger(__name__)

# W3C asks for 512 characters of a tracestate at least, and a longer one may be dropped.
_MAX_HEADER = 1024
# The routes that run requests on the engine.
KEPT = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank"),
    }
)
# Those whose calls are counted.
HOT = KEPT | {"/v1/messages/count_tokens", "/tokenize", "/detokenize"}


class Recorder:
    """Counts each finished call on the routes of `HOT`, and gives those on `KEPT` to the front end's
    `RecentRequests`; all are in the ``audit`` log, where there is one."""

    def __init__(self, llm: AsyncLLM, audit: Audit | None = None) -> None:
        self._llm = llm
        self._audit = audit

    def refused(self, scope: Scope, error: ApiError) -> None:
        """A call was answered with ``error`` before anything was read of it: it is counted, and not kept."""
        if self._audit is not None:
            self._audit.other(scope, error.status, error.word, scope.get(RECEIVED_NS) or now_ns())
        if scope["path"] in HOT:
            self._llm.metrics.request_over(error.outcome, error.word)

    def keep(self, call: Call) -> None:
        """The call is over, and its last byte is written. It is kept once the engine has told all of it."""
        self._llm.metrics.request_over(call.outcome, call.error)
        if self._audit is not None:
            self._audit.call(call)
        if call.scope["path"] not in KEPT:
            return
        last = call.last
        if last is None:
            self._add(call)
        else:
            last.when_known(partial(self._add, call))

    def _add(self, call: Call) -> None:
        """Raises nothing: the caller has his answer."""
        try:
            self._llm.recent.add(ended_request(self._door(call), call.generations, call.timeline))
        except Exception:
            log.exception("the record of request %s could not be made", call.request_id)

    def _door(self, call: Call) -> Door:
        return Door(
            id=call.request_id,
            response_id=call.response_id,
            tenant=call.caller.tenant,
            route=call.scope["path"],
            model=self._llm.model_name,
            outcome=call.outcome,
            status=call.status,
            error=call.error,
            traceparent=_text(header(call.scope, b"traceparent")),
            tracestate=_text(header(call.scope, b"tracestate")),
        )


def _text(value: bytes | None) -> str:
    return "" if value is None or len(value) > _MAX_HEADER else value.decode("latin-1")
