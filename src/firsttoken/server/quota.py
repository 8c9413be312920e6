"""What each key may ask for: requests and tokens a minute, and requests at once.

A quota is a bucket that holds what a minute allows and fills evenly. Tokens are taken out when a request is let in, for
its prompt and for the longest answers that it asks for; when it is over, what it did not use goes back. A request that
says no ``max_tokens`` takes what there is, and what it uses beyond that is owed: the next ones wait until it is made
up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from firsttoken.core.service import KeyRule
    from firsttoken.server.errors import Headers

_MINUTE_S = 60


class Quota:
    """Of the holder of a key. Belongs to the event loop."""

    def __init__(self, rule: KeyRule, clock: Callable[[], int] = now_ns) -> None:
        self._most = rule.max_concurrent
        self._requests = _bucket(rule.requests_per_minute, clock)
        self._tokens = _bucket(rule.tokens_per_minute, clock)
        self._running = 0

    def enter(self) -> Grant:
        """Let one request in. Raises `ApiError` 429."""
        if self._most is not None and self._running >= self._most:
            raise _refused(
                f"This API key may have {self._most} requests at once (max_concurrent), and has them: send the next "
                "when one is over.",
                "requests",
                1.0,
                self._headers(),
            )
        if self._requests is not None and (wait_s := self._requests.take(1)):
            raise _refused(
                f"This API key has used its {self._requests.limit} requests a minute (requests_per_minute).",
                "requests",
                wait_s,
                self._headers(),
            )
        self._running += 1
        return Grant(self)

    def _take_tokens(self, prompt: int, output: int, *, asked: bool) -> int:
        """How many were taken: ``output`` at most, and all of it where it was ``asked`` for."""
        bucket = self._tokens
        if bucket is None:
            return 0
        wanted = prompt + (output if asked else 1)
        if wanted > bucket.limit:
            raise bad_request(
                f"the request may take {wanted} tokens ({prompt} of prompt, {wanted - prompt} of output), more than "
                f"the {bucket.limit} tokens a minute of this API key (tokens_per_minute): lower max_tokens or n, or "
                "shorten the prompt",
                "max_tokens" if prompt < bucket.limit else "prompt",
                "request_over_quota",
            )
        if not asked:
            wanted = prompt + min(output, max(1, int(bucket.level()) - prompt))
        if wait_s := bucket.take(wanted):
            left = max(0, int(bucket.level()))
            raise _refused(
                f"This API key may use {bucket.limit} tokens a minute (tokens_per_minute): {left} are left, and the "
                f"request may take {wanted}.",
                "tokens",
                wait_s,
                self._headers(),
            )
        return wanted

    def _leave(self, unused: int) -> None:
        self._running -= 1
        if self._tokens is not None:
            self._tokens.give(unused)

    def _headers(self) -> Headers:
        """OpenAI's names."""
        found: Headers = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                found += [
                    (b"x-ratelimit-limit-" + name, str(bucket.limit).encode()),
                    (b"x-ratelimit-remaining-" + name, str(max(0, int(bucket.level()))).encode()),
                    (b"x-ratelimit-reset-" + name, _duration(bucket.full_in_s()).encode()),
                ]
        return found


class Grant:
    """What one request has of its key's quota, from `Quota.enter` until `close`."""

    __slots__ = ("_quota", "_reserved")

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._reserved = 0

    def reserve(self, prompt: int, output: int, *, asked: bool) -> None:
        """Take tokens for prompts and answers; ``asked``: the caller said how long these may become. Raises `ApiError`
        429, or 400 for more than a whole minute's."""
        self._reserved += self._quota._take_tokens(prompt, output, asked=asked)

    def headers(self) -> Headers:
        return self._quota._headers()

    def close(self, used: int) -> None:
        """The request is over, and took so many tokens."""
        self._quota._leave(self._reserved - used)


class _Bucket:
    def __init__(self, limit: int, clock: Callable[[], int]) -> None:
        self.limit = limit
        self._level = float(limit)
        self._clock = clock
        self._at_ns = clock()

    def level(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._at_ns) / NS_PER_S * self.limit / _MINUTE_S)
        self._at_ns = now
        return self._level

    def take(self, amount: int) -> float:
        """0 when it was taken, else in how many seconds it could be."""
        missing = amount - self.level()
        if missing > 0:
            return missing * _MINUTE_S / self.limit
        self._level -= amount
        return 0.0

    def give(self, amount: int) -> None:
        """Back; less than nothing is owed from now on."""
        self._level = min(self.limit, self.level() + amount)

    def full_in_s(self) -> float:
        return (self.limit - self.level()) * _MINUTE_S / self.limit


def _bucket(limit: int | None, clock: Callable[[], int]) -> _Bucket | None:
    return None if limit is None else _Bucket(limit, clock)


def _refused(message: str, what: str, wait_s: float, headers: Headers) -> ApiError:
    after = [
        (b"retry-after", str(max(1, math.ceil(wait_s))).encode()),
        (b"retry-after-ms", str(max(1, math.ceil(wait_s * 1000))).encode()),
    ]
    return ApiError(429, message, type_=what, code="rate_limit_exceeded", headers=[*after, *headers])


def _duration(seconds: float) -> str:
    """As OpenAI writes it: "6m0s", "8.64s", "20ms"."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:.2f}".rstrip("0").rstrip(".") + "s"
