"""The record of one request of a caller, made when it is over, from the generations that ran for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from firsttoken.core.clock import now_ns
from firsttoken.core.errors import FirstTokenError
from firsttoken.core.outcome import Outcome
from firsttoken.core.timeline import Timeline
from firsttoken.frontend.generation import Generation
from firsttoken.observability.account import timings
from firsttoken.observability.recent import EndedRequest

if TYPE_CHECKING:
    from firsttoken.observability.metrics import FrontendMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What the door knows of a request; the fields are those of `EndedRequest`."""

    id: str
    model: str
    outcome: Outcome
    route: str = ""
    response_id: str = ""
    tenant: str = ""
    status: int = 0
    error: str = ""
    traceparent: str = ""
    tracestate: str = ""


@contextmanager
def counting_errors(metrics: FrontendMetrics) -> Iterator[None]:
    """Whatever ends a request inside, before it is asked of the engine, is counted."""
    try:
        yield
    except FirstTokenError as error:
        metrics.request_over(error.outcome, error.word)
        raise


def last_of(generations: Sequence[Generation]) -> Generation | None:
    """The one whose answers ended last, for which the caller waited; None without any."""
    return max(generations, key=_ended_ns, default=None)


def ended_request(door: Door, generations: Sequence[Generation], timeline: Timeline) -> EndedRequest:
    """``timeline`` is the request's where it has no generation: it was refused at the door.

    Several prompts in one request are one record: its account is that of the answer that ended last, its tokens are
    those of all.
    """
    last = last_of(generations)
    if last is not None:
        timeline = last.timeline
    began = timeline.times[0]
    firsts = [one.ttft_ns for one in generations if one.ttft_ns is not None]
    return EndedRequest(
        id=door.id,
        response_id=door.response_id,
        engine_ids=tuple(id_ for one in generations for id_ in one.engine_ids),
        tenant=door.tenant,
        service_class=last.service.label if last is not None else "",
        route=door.route,
        model=door.model,
        received_ns=began,
        received_unix_ns=time.time_ns() - (now_ns() - began),
        ended_ns=timeline.times[-1],
        prompt_tokens=sum(one.prompt_tokens for one in generations),
        cached_tokens=sum(one.cached_tokens for one in generations),
        output_tokens=sum(one.completion_tokens for one in generations),
        outcome=door.outcome,
        status=door.status,
        error=door.error,
        traceparent=door.traceparent,
        tracestate=door.tracestate,
        finish_reason=last.finish_reason if last is not None else None,
        ttft_ns=min(firsts, default=None),
        make_account=last.account() if last is not None else partial(timings, timeline),
        timeline=tuple(timeline.stamps()),
        queue_ns=tuple(last.times.queue_ns) if last is not None else (),
        stop_ns=last.times.stop_ns if last is not None else 0,
        **({} if last is None else {"token_times": last.times.token_times}),
    )


def _ended_ns(generation: Generation) -> int:
    return generation.timeline.times[-1]
