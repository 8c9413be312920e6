"""Why the rest of a prompt was not found, and how often for which reason."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from firsttoken.core.cache_miss import Miss, MissReason
from firsttoken.core.clock import NS_PER_S
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction.config import EvictionConfig, ghosts_of
from firsttoken.kvcache.prefix_index import Match
from firsttoken.kvcache.shards import TOKEN_BYTES, CachedShard

# Continuations that a prompt is compared with: a common beginning may have thousands.
MAX_COMPARED = 8
_KEEP_NS = EvictionConfig().keep_ns

_TOKEN_BITS = 8 * TOKEN_BYTES


class _Ghost(NamedTuple):
    evicted_ns: int
    by: ServiceClass


class Missed(NamedTuple):
    """A prompt whose beginning was found up to ``match``; ``tokens`` and ``hash`` are those of its next block, which
    is full. ``elsewhere``: a chain of another salt begins with that block."""

    match: Match
    root: CachedShard | None
    position: int
    tokens: bytes
    hash: bytes
    elsewhere: bool


class MissLog:
    """Remembers what was evicted, by the hash of each shard's first block, and counts misses by reason.

    A hash begins at the identity, salt included, so what others lost is not found. That the same tokens are known
    under another salt is counted here only (``other_salt``) and never told to the caller: it would tell what others
    send. For the same reason the count is no one's to read who may send prompts.

    It counts evictions too, by the class of what went and of whom it made room for (``evictions``); ``early`` those, by
    class, that went within ``keep_ns`` of their last use, which the default policy spares while it can, and ``kept``
    those that a caller's wish still held.
    """

    def __init__(self, num_blocks: int, keep_ns: tuple[int, int, int] = _KEEP_NS) -> None:
        self.most_ghosts = ghosts_of(num_blocks)
        self.counts = dict.fromkeys(MissReason, 0)
        self.other_salt = 0  # of those never seen
        self._ghosts: OrderedDict[bytes, _Ghost] = OrderedDict()
        self._keep_ns = keep_ns
        self.evictions = [[0] * len(ServiceClass) for _ in ServiceClass]
        self.early = [0] * len(ServiceClass)
        self.kept = 0

    def evicted(self, shard: CachedShard, by: ServiceClass, now_ns: int, *, kept_below: bool = False) -> None:
        """It had to make room for a request of a class. ``kept_below``: a lower tier keeps it instead."""
        self.evictions[shard.service][by] += 1
        self.early[shard.service] += now_ns - shard.used_ns < self._keep_ns[shard.service]
        self.kept += shard.keep_until_ns > now_ns and not kept_below
        first = shard.hashes[0]
        self._ghosts[first] = _Ghost(now_ns, by)
        self._ghosts.move_to_end(first)
        if len(self._ghosts) > self.most_ghosts:
            self._ghosts.popitem(last=False)

    def take_back(self, miss: Miss) -> None:
        """A lower tier had it."""
        self.counts[miss.reason] -= 1

    def count(self, miss: Miss) -> Miss:
        self.counts[miss.reason] += 1
        return miss

    def explain(self, missed: Missed, now_ns: int) -> Miss:
        """Why it was missed; counts it."""
        miss = self.count(self._explain(missed, now_ns))
        if miss.reason is MissReason.NEVER_SEEN and missed.elsewhere:
            self.other_salt += 1
        return miss

    def _explain(self, missed: Missed, now_ns: int) -> Miss:
        ghost = self._ghosts.get(missed.hash)
        if ghost is not None:
            age_s = (now_ns - ghost.evicted_ns) / NS_PER_S
            return Miss(missed.position, MissReason.EVICTED, age_s, ghost.by)
        continuations = _continuations(missed.match, missed.root, len(missed.tokens))
        if not continuations:
            return Miss(missed.position, MissReason.NEVER_SEEN)
        common = max(common_tokens(missed.tokens, each) for each in continuations)
        if not common and not missed.position:
            return Miss(0, MissReason.NEVER_SEEN)  # all prompts begin at the root: nothing has gone on with it
        return Miss(missed.position + common, MissReason.DIVERGED)


def _continuations(match: Match, root: CachedShard | None, size: int) -> list[bytes]:
    """The token bytes of blocks that are cached behind what was found, the youngest ones."""
    if match.part is not None:
        return [match.part.data[match.part_blocks * size :][:size]]
    last = match.last or root
    return list(islice(reversed(last.children), MAX_COMPARED)) if last is not None else []


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two blocks have in common from their beginning on; their byte strings are of equal length."""
    different = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    if not different:
        return len(one) // TOKEN_BYTES
    return ((different & -different).bit_length() - 1) // _TOKEN_BITS
