"""What an eviction policy is told, and what it is asked."""

from __future__ import annotations

from typing import Any, Protocol

from firsttoken.core.service import ServiceClass


class Shard:
    """A run of cached tokens of one prefix chain: what policies rank, and what leaves a tier as a whole.

    ``key`` names its content in any tier and for good: the chained hash of its last block. ``start`` tokens come before
    it in its chain, ``tokens`` are its own, in ``nbytes``. ``service`` is the best class of those who used it and
    ``used_ns`` the last use; nobody may evict it before ``keep_until_ns`` while anything else can go. ``state`` is the
    policy's own.
    """

    __slots__ = ("keep_until_ns", "key", "nbytes", "service", "start", "state", "tokens", "used_ns", "uses")

    def __init__(self, key: bytes, start: int, tokens: int, nbytes: int) -> None:
        self.key = key
        self.start = start
        self.tokens = tokens
        self.nbytes = nbytes
        self.service = ServiceClass.P2
        self.uses = 0
        self.used_ns = 0
        self.keep_until_ns = 0
        self.state: Any = None


class EvictionPolicy(Protocol):
    """Ranks the shards of one tier. Not thread-safe; time is the caller's, in ns, and never goes back.

    A shard is *offered* while it may go: nobody holds it and nothing in the tier continues it. So whatever a policy
    chooses, leaves go first. Each call costs O(log shards) or less, amortised.
    """

    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        """A request of a class uses a shard: it was just made, or hit. The first use of a key that was not there
        before is its arrival. ``shard.uses``, ``used_ns`` and ``service`` are up to date already."""
        ...

    def offer(self, shard: Shard, now_ns: int) -> None:
        """It may go from now on."""
        ...

    def withdraw(self, shard: Shard) -> None:
        """It may not go any more: somebody holds it, or something continues it."""
        ...

    def victim(self, now_ns: int) -> Shard | None:
        """The offered shard that should go next, None when none is offered. It stays offered until `left`."""
        ...

    def left(self, shard: Shard, now_ns: int, *, evicted: bool) -> None:
        """It is not in the tier any more: ``evicted`` to make room, or else because its content is no longer wanted.
        It may be offered or not. A policy may remember its key."""
        ...
