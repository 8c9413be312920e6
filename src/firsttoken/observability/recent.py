"""The requests that have ended lately, each with its account of time: for whoever asks afterwards where it went."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.outcome import Outcome

log = logging.getLogger(__name__)

Subscriber = Callable[["EndedRequest"], None]


@dataclass(frozen=True, kw_only=True)
class EndedRequest:
    """One request of a caller, however many answers it had, from its first byte read to its last byte written.

    ``id`` is what the caller sent or got as ``X-Request-Id``, ``response_id`` the ``id`` in its answer ("" without
    one). ``engine_ids`` are those of its answers in the engine. ``tenant`` is who shares a class, "" without keys.
    ``prompt_tokens`` (``cached_tokens`` of them were found in the cache) and ``output_tokens`` are those of all prompts
    and answers. ``outcome``: finished, aborted (the caller left, or the server stopped), refused (it was never run),
    expired (it had not started by its deadline) or failed. ``status`` is HTTP's as it was sent (a stream that fails had
    its 200 before), 0 outside HTTP and where nothing was answered; ``error`` is the code of the error that the caller
    got, or its type where it has none, "" without an error.

    ``account`` is what `observability.account.timings` says of the answer that ended last, since the caller waited for
    that one; it is made by ``make_account`` when it is first asked for, since most are never looked at. Of that answer
    are also ``finish_reason``, ``queue_ns`` (its waiting by `core.waits.Wait`, () where that is not known), ``stop_ns``
    (of the time for its last text, the search for stop strings),
    ``timeline`` (``(mark, ns)``) and ``token_times`` (ns, when the caller's side got each token). ``ttft_ns`` is from
    the first byte to the first token of any answer, None without one. ``traceparent`` and ``tracestate`` are the
    caller's headers of W3C's Trace Context as they came.
    """

    id: str
    route: str
    model: str
    outcome: Outcome
    received_ns: int
    received_unix_ns: int
    ended_ns: int
    make_account: Callable[[], dict[str, Any]]
    timeline: tuple[tuple[int, int], ...]
    response_id: str = ""
    engine_ids: tuple[int, ...] = ()
    tenant: str = ""
    service_class: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    status: int = 0
    error: str = ""
    finish_reason: str | None = None
    ttft_ns: int | None = None
    queue_ns: tuple[int, ...] = ()
    stop_ns: int = 0
    traceparent: str = ""
    tracestate: str = ""
    token_times: array[int] = field(default_factory=lambda: array("q"))

    @cached_property
    def account(self) -> dict[str, Any]:
        return self.make_account()


class RecentRequests:
    """The last ``capacity`` requests of the last ``age_s`` seconds, of no more than ``max_tokens`` token times in all
    (8 bytes each). One thread, the event loop's, adds and reads.

    Subscribers are called for each request after its caller has his answer. They run on the event loop, so they must be
    short; what one raises is logged, and nobody else hears of it.
    """

    def __init__(self, capacity: int = 1000, age_s: float = 600.0, max_tokens: int = 2_000_000) -> None:
        if capacity < 1 or age_s <= 0 or max_tokens < 1:
            raise ValueError(
                "recent requests need a capacity, an age and a bound of tokens above 0, "
                f"got {capacity}, {age_s} s and {max_tokens}"
            )
        self.capacity = capacity
        self.age_s = age_s
        self._max_tokens = max_tokens
        self._tokens = 0
        self._kept: deque[EndedRequest] = deque()
        self._by_id: dict[str, deque[EndedRequest]] = {}  # ids are the callers' to choose, so they may repeat
        self._by_engine: dict[int, EndedRequest] = {}
        self._subscribers: list[Subscriber] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, ended: EndedRequest) -> None:
        """Keep it, and tell the subscribers."""
        self._kept.append(ended)
        self._tokens += len(ended.token_times)
        for name in _names(ended):
            self._by_id.setdefault(name, deque()).append(ended)
        for engine_id in ended.engine_ids:
            self._by_engine[engine_id] = ended
        self._forget_old(ended.ended_ns)
        for tell in self._subscribers:
            try:
                tell(ended)
            except Exception:
                log.exception("a subscriber of ended requests failed")

    def get(self, id_: str, tenant: str | None = None) -> EndedRequest | None:
        """The newest of that ``id`` or ``response_id``; None when it is not kept. With ``tenant`` only that one's."""
        self._forget_old(now_ns())
        for ended in reversed(self._by_id.get(id_, ())):
            if tenant is None or ended.tenant == tenant:
                return ended
        return None

    def of_engine(self, engine_id: int) -> EndedRequest | None:
        """The one that an answer of this id in the engine was for; None when it is not kept."""
        return self._by_engine.get(engine_id)

    def latest(self, count: int, tenant: str | None = None) -> list[EndedRequest]:
        """The last ``count``, newest first; with ``tenant`` only that one's."""
        self._forget_old(now_ns())
        found = (one for one in reversed(self._kept) if tenant is None or one.tenant == tenant)
        return list(islice(found, count))

    def subscribe(self, tell: Subscriber) -> Callable[[], None]:
        """Call ``tell`` for each request that ends from now on; what is returned ends that."""
        self._subscribers = [*self._subscribers, tell]  # a new list: `add` may be walking the old one

        def leave() -> None:
            self._subscribers = [one for one in self._subscribers if one is not tell]

        return leave

    def _forget_old(self, now: int) -> None:
        since = now - round(self.age_s * NS_PER_S)
        kept = self._kept
        while kept and (
            len(kept) > self.capacity or kept[0].ended_ns < since or (self._tokens > self._max_tokens and len(kept) > 1)
        ):
            old = kept.popleft()
            self._tokens -= len(old.token_times)
            for engine_id in old.engine_ids:
                self._by_engine.pop(engine_id, None)
            for name in _names(old):
                same = self._by_id[name]
                same.popleft()  # the oldest of all is the oldest of its name
                if not same:
                    del self._by_id[name]


def _names(ended: EndedRequest) -> Iterator[str]:
    yield ended.id
    if ended.response_id and ended.response_id != ended.id:
        yield ended.response_id
