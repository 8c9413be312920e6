"""What is kept of a call once it is over: the record behind ``GET /v1/requests``."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from firsttoken.core.errors import DeadlineExceeded
from firsttoken.frontend.ended import Door, ended_request
from firsttoken.server.call import Call, header

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.observability.recent import EndedAs

log = logging.getLogger(__name__)

# W3C asks for 512 characters of a tracestate at least, and a longer one may be dropped.
_MAX_HEADER = 1024
# The routes that run requests on the engine.
KEPT = frozenset({"/v1/chat/completions", "/v1/completions"})


class Recorder:
    """Gives each finished call on the routes of `KEPT` to the front end's `RecentRequests`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def keep(self, call: Call) -> None:
        """The call is over, and its last byte is written. It is kept once the engine has told all of it."""
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
            outcome=_outcome(call),
            status=call.status,
            error=call.error,
            traceparent=_text(header(call.scope, b"traceparent")),
            tracestate=_text(header(call.scope, b"tracestate")),
        )


def _text(value: bytes | None) -> str:
    return "" if value is None or len(value) > _MAX_HEADER else value.decode("latin-1")


def _outcome(call: Call) -> EndedAs:
    if call.ended is not None or not call.status:
        return "aborted"
    if call.status < 400:
        return "finished"
    if call.error == DeadlineExceeded.code:
        return "expired"
    return "refused" if call.status < 500 or not call.generations else "failed"
