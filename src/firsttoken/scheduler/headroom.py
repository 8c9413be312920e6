"""How long a request that came now would wait for its first token, and when a class will miss its target.

Two things are waited for, and the longer of both waits counts. *Prompts*: the tokens owed to those who go before, over
the rate at which the engine works prompts off. *Rows*: as many must end as requests go before, less the rows that are
free or that worse classes would give up. What better classes will send meanwhile goes before as well, so it is taken
off the rate; a tenth is left to every class, as the scheduler does.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from firsttoken.core.service import Targets
from firsttoken.scheduler.backlog import CLASSES, Backlog
from firsttoken.scheduler.tenant_queue import Ahead

# Of the engine's rate, what better classes leave at least.
LEAST_SHARE = 0.1


class Wait(NamedTuple):
    """``seconds`` until a request that came now would be next, and by how many these grow each second by the present
    trend, negative when they shrink."""

    seconds: float
    growth: float


class Outlook(NamedTuple):
    """Of new requests of a class: ``ttft_s`` predicted for one that came now, and in how many seconds the class's
    ``ttft_p99`` will be missed if requests go on coming and being served as they do now, for autoscalers.

    With T for ``ttft_s`` and g for its growth in seconds a second (prompt tokens that come over those that are worked
    off, less 1; or the same of requests and of rows that come free) that is (target - T) / g: 0 while T is over the
    target, infinite while T does not grow, None for a class without such a target.
    """

    ttft_s: float
    until_missed_s: float | None


class Headroom:
    """Predictions from a `Backlog`. What is not known yet (no prompts were waited for, no request has ended) is
    predicted to take no time: nobody is turned away for want of a measurement."""

    def __init__(self, backlog: Backlog, targets: Targets) -> None:
        self._backlog = backlog
        self._targets = targets

    def crowded(self, service: int) -> bool:
        """Whether anything at all goes before a new request of the class."""
        backlog = self._backlog
        ahead = any(backlog.waiting[: service + 1]) or any(backlog.running_tokens[: service + 1])
        return ahead or self._ends_needed(service, backlog.waiting[service]) > 0

    def wait(self, service: int, now_ns: int, ahead: Ahead | None = None) -> Wait:
        """For a new request of the class to be next, its own prompt not counted: after all of its class that wait, or
        after ``ahead`` of them."""
        backlog = self._backlog
        if ahead is None:
            ahead = Ahead(backlog.waiting[service], backlog.waiting_tokens[service])
        better_requests = better_tokens = 0.0
        for better in range(service):
            requests, tokens = backlog.offered_per_s(better, now_ns)
            better_requests += requests
            better_tokens += tokens
        requests, tokens = backlog.offered_per_s(service, now_ns)
        owed = ahead.tokens + sum(backlog.waiting_tokens[:service]) + sum(backlog.running_tokens[: service + 1])
        waits = [_wait(owed, backlog.tokens_per_s, better_tokens, tokens)]
        needed = self._ends_needed(service, ahead.requests)
        if needed > 0:
            waits.append(_wait(needed, backlog.ends_per_s, better_requests, requests))
        return max(waits)

    def ttft_s(self, service: int, tokens: float, now_ns: int, ahead: Ahead | None = None) -> float:
        """From now to the first token of a new request with so many prompt tokens; ``ahead`` as for `wait`."""
        rate = self._backlog.tokens_per_s
        return self.wait(service, now_ns, ahead).seconds + (tokens / rate if rate else 0.0)

    def outlook(self, service: int, now_ns: int) -> Outlook:
        """For prompts as long as those of the class that came lately."""
        requests, tokens = self._backlog.offered_per_s(service, now_ns)
        rate = self._backlog.tokens_per_s
        wait = self.wait(service, now_ns)
        ttft = wait.seconds + (tokens / requests / rate if requests and rate else 0.0)
        target_ms = self._targets.of(service).ttft_p99
        if target_ms is None:
            return Outlook(ttft, None)
        left = target_ms / 1000 - ttft
        if left <= 0:
            return Outlook(ttft, 0.0)
        return Outlook(ttft, left / wait.growth if wait.growth > 0 else inf)

    def _ends_needed(self, service: int, ahead: float) -> float:
        """How many must end before a new request of the class has a row, as a rule, after ``ahead`` of its class."""
        backlog = self._backlog
        free = 0 if backlog.short_of_kv else backlog.rows - sum(backlog.running)
        worse = sum(backlog.running[service + 1 : CLASSES])
        return ahead + sum(backlog.waiting[:service]) + 1 - free - worse


def _wait(ahead: float, rate: float, better: float, own: float) -> Wait:
    """For ``ahead`` units worked off at ``rate`` a second, when ``better`` and ``own`` of them come each second."""
    if not rate:
        return Wait(0.0, 0.0)
    left = max(rate - better, LEAST_SHARE * rate)
    return Wait(ahead / left, (better + own - rate) / left)
