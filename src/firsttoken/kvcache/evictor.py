"""What the eviction policy is told, and what goes when it has chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.interface import EvictionPolicy
from firsttoken.kvcache.pins import Pins, Wish
from firsttoken.kvcache.prefix_index import PrefixIndex
from firsttoken.kvcache.shards import CachedShard

OnIdle = Callable[[CachedShard], None]
"""Is told of a shard that may be evicted from now on."""
OnEvict = Callable[[CachedShard], None]
"""Is told of a shard before its blocks become free, for a lower tier to copy them: what it needs is ``key``,
``parent_key``, ``start``, ``data`` and ``blocks``. A copy reads them in plan order, before any later step writes."""


class User(Protocol):
    """Whoever uses a shard: what a request says of itself."""

    @property
    def kv_class(self) -> int: ...


class Evictor:
    """Keeps the policy's view of the index: who used what, and which shards may go.

    A shard may go when nobody holds it and nothing continues it. Since who holds a shard holds all before it, what
    continues an idle shard is idle, so all idle shards can go, leaves first.

    Splits and merges keep what the policy knows by key: in both the later part stays the shard that it was, and the
    front is a new one with the same uses, or one that left.
    """

    def __init__(self, index: PrefixIndex, policy: EvictionPolicy, pins: Pins) -> None:
        self._index = index
        self._policy = policy
        self.pins = pins
        self._offered = 0
        self.on_idle: OnIdle | None = None

    def made(self, shard: CachedShard, request: User, now_ns: int) -> None:
        """A request has made it, holds it, and may let it grow: the policy is told once its key is settled."""
        shard.holders = 1
        shard.uses = 1
        shard.used_ns = now_ns
        shard.service = ServiceClass(request.kv_class)

    def settle(self, shard: CachedShard, now_ns: int) -> None:
        """It does not grow any more."""
        self._tell(shard, now_ns)

    def hold(self, shard: CachedShard, request: User, now_ns: int) -> None:
        """Another request uses it, and holds it from now on."""
        self._tell(shard, now_ns)
        self._withdraw(shard)
        shard.holders += 1
        shard.uses += 1
        shard.used_ns = now_ns
        service = ServiceClass(request.kv_class)
        shard.service = min(shard.service, service)
        self._policy.used(shard, service, now_ns)

    def borrow(self, shard: CachedShard) -> None:
        """Hold it without using it, for a copy of it to be made."""
        self._withdraw(shard)
        shard.holders += 1

    def let_go(self, shard: CachedShard, now_ns: int) -> None:
        """A request holds it no more, nor any that continues it. What it leaves idle is put together with what alone
        continues it."""
        shard.holders -= 1
        if not shard.holders:
            self._idle(shard, now_ns)

    def split(self, shard: CachedShard, count: int, now_ns: int) -> CachedShard:
        """Cut the first ``count`` blocks off, for somebody who holds those alone. Returns the new front."""
        was_offered = shard.offered
        self._withdraw(shard)
        front = self._index.split(shard, count)
        front.uses, front.used_ns, front.service = shard.uses, shard.used_ns, shard.service
        self.pins.split(shard, front)
        self._tell(front, now_ns)
        if was_offered:
            self._offer(shard, now_ns)
        return front

    def keep(self, shards: Sequence[CachedShard], wish: Wish, now_ns: int) -> bool:
        """Keep shards that somebody may hold or not. False, with nothing changed, where the quota has no room."""
        with self._ranked_anew(shards, now_ns):
            return self.pins.hold(shards, wish, now_ns)

    def renew(self, shards: Sequence[CachedShard], now_ns: int) -> None:
        """They were used until now: what is kept of them is kept for longer."""
        with self._ranked_anew(shards, now_ns):
            self.pins.renew(shards, now_ns)

    def continued(self, tail: CachedShard, found: int, num_tokens: int, now_ns: int) -> None:
        """A request of ``num_tokens`` tokens, the first ``found`` blocks of which end with or inside ``tail``, goes on
        from there: what was kept until then is kept no more, the answers that it does not go on with included.
        O(shards of the chain, and those)."""
        block = tail.tokens // len(tail.blocks)

        def is_over(shard: CachedShard) -> bool:
            beyond = self.pins.beyond(shard)
            return beyond is not None and beyond // block <= found and beyond < num_tokens

        ended = dict.fromkeys(shard for shard in tail.up() if is_over(shard))
        others = [child for shard in (tail, *ended) for child in shard.children.values()]
        while others:
            shard = others.pop()
            if shard not in ended and is_over(shard):
                ended[shard] = None
                others += shard.children.values()
        with self._ranked_anew(ended, now_ns):
            for shard in ended:
                self.pins.left(shard)

    def next_victim(self, now_ns: int) -> CachedShard | None:
        """The shard that the policy lets go, None when none is offered."""
        return self.victim(now_ns) if self._offered else None

    def victim(self, now_ns: int) -> CachedShard:
        """The shard that the policy lets go. Raises `RuntimeError` when it names none, or one that was not offered."""
        shard = self._policy.victim(now_ns)
        if not isinstance(shard, CachedShard) or not shard.offered:
            raise RuntimeError(
                f"the eviction policy {type(self._policy).__name__} chose {shard}, which it was not offered"
            )
        return shard

    def evict(self, shard: CachedShard, now_ns: int) -> None:
        """Out of the index with it; its parent may go next."""
        above = shard.parent
        self._index.remove(shard)
        self._left(shard, now_ns, evicted=True)
        if above is not None and above.parent is not None and not above.holders:
            self._idle(above, now_ns)

    def forget(self, top: CachedShard, now_ns: int) -> list[CachedShard]:
        """Its content is not wanted any more, nor what continues it, whoever holds it; returns them, children first.
        There must be nothing before it."""
        gone = self._index.remove(top)
        for shard in gone:
            self._left(shard, now_ns, evicted=False)
        return gone

    # ------------------------------------------------------------------ inside

    def _tell(self, shard: CachedShard, now_ns: int) -> None:
        if not shard.told:
            shard.told = True
            self._policy.used(shard, shard.service, now_ns)

    def _idle(self, shard: CachedShard, now_ns: int) -> None:
        """Nobody holds it, and a holder or a child has just left it."""
        if not shard.children:
            self._offer(shard, now_ns)
        elif len(shard.children) == 1:
            [child] = shard.children.values()
            if shard.end == child.end and self.pins.alike(shard, child):
                self._merge(child, now_ns)

    def _merge(self, shard: CachedShard, now_ns: int) -> None:
        was_offered = shard.offered
        self._withdraw(shard)
        front = self._index.merge(shard)
        shard.uses = max(shard.uses, front.uses)
        shard.used_ns = max(shard.used_ns, front.used_ns)
        shard.service = min(shard.service, front.service)
        self.pins.merged(front)
        if front.told:
            self._policy.left(front, now_ns, evicted=False)
        if was_offered:
            self._offer(shard, now_ns)

    @contextmanager
    def _ranked_anew(self, shards: Iterable[CachedShard], now_ns: int) -> Iterator[None]:
        """Until when some shards are kept may change: the policy is offered them again."""
        offered = [shard for shard in shards if shard.offered]
        for shard in offered:
            self._withdraw(shard)
        yield
        for shard in offered:
            self._offer(shard, now_ns)

    def _offer(self, shard: CachedShard, now_ns: int) -> None:
        self._tell(shard, now_ns)
        shard.offered = True
        self._offered += 1
        self._policy.offer(shard, now_ns)
        if self.on_idle is not None:
            self.on_idle(shard)

    def _withdraw(self, shard: CachedShard) -> None:
        if shard.offered:
            shard.offered = False
            self._offered -= 1
            self._policy.withdraw(shard)

    def _left(self, shard: CachedShard, now_ns: int, *, evicted: bool) -> None:
        self.pins.left(shard)
        if shard.told:
            self._policy.left(shard, now_ns, evicted=evicted)
        self._offered -= shard.offered
        shard.offered = False
