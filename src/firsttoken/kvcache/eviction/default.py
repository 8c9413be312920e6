"""The engine's policy: what is least worth its place by learned times of return goes first, classes are protected.

A shard's score is the Gittins index of its kind and age (`returns`), the returns a second that holding it is worth,
times its class's weight, times what a byte of it costs to recompute. Its kind says how often it was used, ghosts
included, whether its last return was slow, and whether it is shorter than others (the end of a prompt, which hardly
ever comes back).

Before any score: a shard of p0 is kept for its time after the last use, then p1's; one that is pinned
(``keep_until_ns``) before all of them. When only kept ones are left, the worst class goes first, by score,
then p0 oldest first, and what is pinned last: ``early`` counts those that went before their time.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import log2

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.cohorts import SLOT_NS, Cohort, Kind, Rank, RankedCohorts
from firsttoken.kvcache.eviction.config import EvictionConfig
from firsttoken.kvcache.eviction.ghosts import Ghosts
from firsttoken.kvcache.eviction.interface import Shard
from firsttoken.kvcache.eviction.offered import OfferedHeap
from firsttoken.kvcache.eviction.returns import BINS, EDGES_NS, ReturnTimes, bin_of

_MOST_USES = 12
_MAX_COST = 4
_MANY_GHOSTS, _GHOST_PARTS = 4096, 64
# How many cohorts one call moves on, so that none takes long after idle time; the rest follows in the next calls.
_MOVES_A_CALL = 32


class Memory:
    """What the policy knows of a key, resident or not."""

    __slots__ = ("cohort", "offered", "used_ns", "uses")

    def __init__(self, cohort: Cohort, uses: int, used_ns: int) -> None:
        self.cohort = cohort
        self.uses = uses
        self.used_ns = used_ns
        self.offered = False


class LearnedPolicy:
    """``shard.state`` is its `Memory`. ``early``: evicted shards that were to be kept longer, by class."""

    def __init__(self, config: EvictionConfig) -> None:
        self._weights = config.weights
        self._keep_ns = config.keep_ns
        self._attention_tokens = config.attention_tokens
        self._slow_ns = round(config.slow_return_s * NS_PER_S)
        # Kinds by uses, slow or not, short or not: see `_kind`.
        levels = tuple(float(1 + kind // 4) for kind in range(4 * _MOST_USES))
        self._returns = ReturnTimes(levels, config.memory_s)
        self._ghosts: Ghosts[Memory] = Ghosts(config.ghosts, _GHOST_PARTS if config.ghosts >= _MANY_GHOSTS else 1)
        self._slot = -1
        self._current: dict[Kind, Cohort] = {}
        self._ranked = RankedCohorts()
        self._due: list[tuple[int, int, Cohort]] = []
        self._number = 0
        self._pinned = OfferedHeap()
        self._longest = 0
        self._usual_density = 0.0
        self.early = [0, 0, 0]

    def used(self, shard: Shard, service: ServiceClass, now_ns: int) -> None:
        self._move_on(now_ns)
        self._trim(now_ns)
        memory: Memory | None = shard.state
        if memory is None:
            memory = self._ghosts.take(shard.key)
        uses, slow = shard.uses, False
        if memory is not None:
            uses = memory.uses + 1
            slow = now_ns - memory.used_ns >= self._slow_ns
            self._unwatch(memory, now_ns, returned=True)
        cohort = self._cohort(self._kind(shard, uses, slow), now_ns)
        cohort.watched += 1
        self._returns.enters(cohort.kind.returns, cohort.age_bin, 1, cohort.weight)
        shard.state = Memory(cohort, uses, now_ns)

    def offer(self, shard: Shard, now_ns: int) -> None:
        memory: Memory = shard.state
        memory.offered = True
        if shard.keep_until_ns > now_ns:
            self._pinned.add(shard, shard.keep_until_ns)
        else:
            self._offer(shard, memory.cohort, now_ns)

    def withdraw(self, shard: Shard) -> None:
        memory: Memory = shard.state
        memory.offered = False
        self._remove(shard, memory.cohort)

    def victim(self, now_ns: int) -> Shard | None:
        if self._due and self._due[0][0] <= now_ns:
            self._move_on(now_ns)
        if self._pinned.entries:
            for shard in self._pinned.below(now_ns):
                self._offer(shard, shard.state.cohort, now_ns)
        cohort = self._ranked.first()
        if cohort is not None:
            return next(iter(cohort.offered))
        return self._pinned.first()

    def left(self, shard: Shard, now_ns: int, *, evicted: bool) -> None:
        memory: Memory = shard.state
        cohort = memory.cohort
        if shard in cohort.offered:  # written out as `_remove`: a request may wait for thousands of these
            del cohort.offered[shard]
        elif memory.offered:
            self._pinned.remove(shard)
        shard.state = None
        if not evicted:
            self._unwatch(memory, now_ns, returned=False)
            return
        if now_ns < cohort.kept_until_ns or now_ns < shard.keep_until_ns:
            self.early[cohort.kind.service] += 1
        self._ghosts.add(shard.key, memory)

    # ------------------------------------------------------------------ kinds and scores

    def _kind(self, shard: Shard, uses: int, slow: bool) -> Kind:
        self._longest = max(self._longest, shard.tokens)
        short = shard.tokens < self._longest
        returns = 4 * (min(uses, _MOST_USES) - 1) + 2 * slow + short
        return Kind(max(0, returns), shard.service, self._cost(shard))

    def _cost(self, shard: Shard) -> int:
        density = max(1, shard.tokens) / max(1, shard.nbytes)
        self._usual_density = self._usual_density or density
        relative = density / self._usual_density
        if self._attention_tokens:
            relative *= 1 + shard.start / self._attention_tokens
        return max(-_MAX_COST, min(_MAX_COST, round(log2(relative))))

    def _rank(self, cohort: Cohort, now_ns: int) -> Rank:
        kind = cohort.kind
        level = 0
        if now_ns < cohort.kept_until_ns:
            level = 3 - kind.service
            if kind.service == ServiceClass.P0:
                return level, float(cohort.used_ns)
        index = self._returns.index(kind.returns, cohort.age_bin, now_ns)
        return level, float(index * self._weights[kind.service] * 2.0**kind.cost)

    def _offer(self, shard: Shard, cohort: Cohort, now_ns: int) -> None:
        cohort.offered[shard] = None
        if not cohort.entry:
            self._ranked.put(cohort, self._rank(cohort, now_ns))

    def _remove(self, shard: Shard, cohort: Cohort) -> None:
        if shard in cohort.offered:
            del cohort.offered[shard]
        else:
            self._pinned.remove(shard)

    # ------------------------------------------------------------------ cohorts as time goes on

    def _cohort(self, kind: Kind, now_ns: int) -> Cohort:
        slot = now_ns // SLOT_NS
        if slot != self._slot:
            self._slot = slot
            self._current = {}
        cohort = self._current.get(kind)
        if cohort is None:
            kept_until_ns = now_ns + SLOT_NS + self._keep_ns[kind.service] if self._keep_ns[kind.service] else 0
            cohort = Cohort(kind, now_ns, kept_until_ns, self._returns.weight(now_ns))
            self._current[kind] = cohort
            self._schedule(cohort)
        return cohort

    def _schedule(self, cohort: Cohort) -> None:
        """Look at it again when its age enters the next bin, or its time to be kept ends."""
        at_ns = cohort.used_ns + EDGES_NS[cohort.age_bin + 1] if cohort.age_bin < BINS - 1 else 0
        kept = cohort.kept_until_ns
        if kept and (not at_ns or kept < at_ns) and kept > cohort.due_ns:
            at_ns = kept
        cohort.due_ns = at_ns
        if at_ns:
            self._number += 1
            heappush(self._due, (at_ns, self._number, cohort))

    def _move_on(self, now_ns: int) -> None:
        due = self._due
        for _ in range(_MOVES_A_CALL):
            if not due or due[0][0] > now_ns:
                return
            _, _, cohort = heappop(due)
            if not cohort.watched and not cohort.offered:
                continue
            self._age(cohort, now_ns)
            if cohort.offered:
                self._ranked.put(cohort, self._rank(cohort, now_ns))
            else:
                cohort.entry = 0  # its rank is of an age that is over
            self._schedule(cohort)

    def _age(self, cohort: Cohort, now_ns: int) -> None:
        age_bin = bin_of(now_ns - cohort.used_ns)
        if age_bin == cohort.age_bin:
            return
        cohort.weight = self._returns.weight(now_ns)
        for entered in range(cohort.age_bin + 1, age_bin + 1):
            self._returns.enters(cohort.kind.returns, entered, cohort.watched, cohort.weight)
        cohort.age_bin = age_bin

    def _trim(self, now_ns: int) -> None:
        """Forget ghosts that are too many: two for each use, since no more shards leave than come. It is not done as
        they leave, for evictions are what a request waits for."""
        for _ in range(2):
            forgotten = self._ghosts.trim()
            if forgotten is not None:
                self._unwatch(forgotten, now_ns, returned=False)

    def _unwatch(self, memory: Memory, now_ns: int, *, returned: bool) -> None:
        cohort = memory.cohort
        self._age(cohort, now_ns)
        cohort.watched -= 1
        kind = cohort.kind.returns
        self._returns.leaves(kind, cohort.age_bin, now_ns - cohort.used_ns, cohort.weight)
        if returned:
            self._returns.returned(kind, cohort.age_bin, self._returns.weight(now_ns))
