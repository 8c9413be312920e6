"""Eviction policies on the prompts of a load: what each finds again in a cache of so many blocks.

A block is a shard of `TRACE_BLOCK_TOKENS` tokens. A request finds those of its blocks before which all are cached, then
makes the others; while it does, its own may not go. What would not fit beside them is not cached. Answers are not
cached, since the traces do not say what they hold, and a prompt takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction import EvictionPolicy, Shard
from firsttoken.simulate.workload import TRACE_BLOCK_TOKENS, Job


class Block(Shard):
    """A cached block; ``children`` counts the cached blocks that continue it."""

    __slots__ = ("children", "held", "parent")

    def __init__(self, key: bytes, start: int, tokens: int, parent: Block | None) -> None:
        super().__init__(key, start, tokens, TRACE_BLOCK_TOKENS)
        self.parent = parent
        self.children = 0
        self.held = True


@dataclass
class HitCount:
    """Blocks of prompts: all, and those that were found."""

    blocks: int = 0
    hits: int = 0

    @property
    def ratio(self) -> float:
        """Hits a block; 0 where there was none."""
        return self.hits / self.blocks if self.blocks else 0.0


@dataclass
class CacheOutcome:
    """Counts of all requests and of each class; evicted blocks; those of each class that went before their class's
    time to be kept, None where the policy keeps none."""

    all: HitCount = field(default_factory=HitCount)
    classes: dict[ServiceClass, HitCount] = field(default_factory=dict)
    evictions: int = 0
    early: tuple[int, int, int] | None = None


def run_cache(jobs: Sequence[Job], policy: EvictionPolicy, num_blocks: int) -> CacheOutcome:
    """Send the prompts in order of arrival. A block's id stands for all before it too, as in the traces."""
    cache = _Cache(policy, num_blocks)
    outcome = CacheOutcome()
    now_ns = 0
    for job in jobs:
        now_ns = max(job.at_ns, now_ns + 1)  # no two at the same time, or their order would be lost
        hits = cache.serve(job, now_ns)
        for count in (outcome.all, outcome.classes.setdefault(job.service, HitCount())):
            count.blocks += len(job.blocks)
            count.hits += hits
    outcome.evictions = cache.evictions
    early: list[int] | None = getattr(policy, "early", None)
    if early is not None:
        outcome.early = (early[0], early[1], early[2])
    return outcome


class _Cache:
    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        self._policy = policy
        self._num_blocks = num_blocks
        self._blocks: dict[int, Block] = {}
        self.evictions = 0

    def serve(self, job: Job, now_ns: int) -> int:
        """How many of the blocks were found."""
        chain = self._find(job)
        hits = len(chain)
        if chain and not chain[-1].children:
            self._policy.withdraw(chain[-1])
        for block in chain:
            block.held = True
            self._use(block, job.service, now_ns)
        for place in range(hits, len(job.blocks)):
            if not self._has_room(now_ns):
                break
            chain.append(self._make(job, place, chain[-1] if chain else None))
            self._use(chain[-1], job.service, now_ns)
        for block in chain:
            block.held = False
        if chain and not chain[-1].children:
            self._policy.offer(chain[-1], now_ns)
        return hits

    def _find(self, job: Job) -> list[Block]:
        chain: list[Block] = []
        for number in job.blocks:
            block = self._blocks.get(number)
            if block is None:
                break
            chain.append(block)
        return chain

    def _use(self, block: Block, service: ServiceClass, now_ns: int) -> None:
        block.uses += 1
        block.used_ns = now_ns
        block.service = min(block.service, service)
        self._policy.used(block, service, now_ns)

    def _make(self, job: Job, place: int, parent: Block | None) -> Block:
        start = place * TRACE_BLOCK_TOKENS
        number = job.blocks[place]
        block = Block(key_of(number), start, min(TRACE_BLOCK_TOKENS, job.input - start), parent)
        if parent is not None:
            parent.children += 1
        self._blocks[number] = block
        return block

    def _has_room(self, now_ns: int) -> bool:
        while len(self._blocks) >= self._num_blocks:
            block = self._policy.victim(now_ns)
            if block is None:
                return False
            assert isinstance(block, Block), "a policy chose what it was not given"
            self._evict(block, now_ns)
        return True

    def _evict(self, block: Block, now_ns: int) -> None:
        del self._blocks[number_of(block.key)]
        self.evictions += 1
        self._policy.left(block, now_ns, evicted=True)
        parent = block.parent
        if parent is not None:
            parent.children -= 1
            if not parent.children and not parent.held:
                self._policy.offer(parent, now_ns)


def key_of(number: int) -> bytes:
    """The key of the shard that a block's number stands for."""
    return number.to_bytes(8, "little")


def number_of(key: bytes) -> int:
    """The inverse of `key_of`."""
    return int.from_bytes(key, "little")
