"""From the device to host memory, and on to disk: copies of shards that nobody uses, made before room is needed.

A shard is queued when it becomes idle, with all before it in its chain, since a tier finds a prefix from its start.
While it is copied its blocks are borrowed, so that nobody can evict them; once it has arrived, evicting it costs
nothing. A shard that must go before its turn is copied at once where little else is being copied, and what is computed
next waits for that; else it is lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.copy import CopyEngine, CopyHandle
from firsttoken.kvcache.disk import DiskHandle, DiskStore, ShardMeta
from firsttoken.kvcache.pins import Pins, Wish
from firsttoken.kvcache.shards import TOKEN_BYTES, CachedShard
from firsttoken.kvcache.tiers.host_tier import HostTier, Lease, Use
from firsttoken.kvcache.tiers.stats import TierStats

# So much is copied at a time: the link stays busy, and a restore waits for little. Where copies take the processor's
# time a step waits for them too: they get no more than a part of the time between turns, or so many seconds.
MOST_FLYING_BYTES = 64 << 20
FLYING_PART, LEAST_FLYING_S = 0.25, 0.004
# A turn of the engine looks in vain at idle chains for so long: to look at 131,072 tokens takes half a millisecond.
LOOKING_NS = 200_000
# An idle chain is forgotten when so many others wait: they will be idle again, or were never worth it.
MOST_QUEUED = 4096


class DeviceShards(Protocol):
    """The cache that shards come from."""

    @property
    def pins(self) -> Pins: ...

    def borrow(self, tail: CachedShard) -> None:
        """Keep the blocks of a shard and of all before it until `give_back`."""

    def give_back(self, tail: CachedShard) -> None: ...


@dataclass(slots=True, eq=False)
class _Spill:
    """One shard on its way: ``blocks`` of the host are filled with ``meta``; ``borrowed`` until then."""

    copy: CopyHandle
    lease: Lease
    blocks: list[int]
    meta: ShardMeta
    use: Use
    borrowed: CachedShard | None


class Spilling:
    """All calls from the engine's thread."""

    def __init__(
        self, device: DeviceShards, host: HostTier, copies: CopyEngine, disk: DiskStore | None, stats: TierStats
    ) -> None:
        self._device = device
        self._host = host
        self._copies = copies
        self._disk = disk
        self._stats = stats
        self._queue: deque[CachedShard] = deque(maxlen=MOST_QUEUED)
        self._queued: set[int] = set()
        self._flying: deque[_Spill] = deque()
        self._turned_ns = now_ns()
        self._writing: list[tuple[list[DiskHandle], Lease]] = []

    @property
    def busy(self) -> bool:
        """True while `advance` should be called soon."""
        return bool(self._queue or self._flying)

    @property
    def writing(self) -> bool:
        return bool(self._writing)

    def idle(self, shard: CachedShard) -> None:
        """Nobody uses it now. Its turn comes when others have had theirs."""
        if id(shard) in self._queued:
            return
        if len(self._queue) == MOST_QUEUED:
            self._queued.discard(id(self._queue[0]))
        self._queue.append(shard)
        self._queued.add(id(shard))

    def kept_below(self, tail: CachedShard) -> None:
        """A chain is to be kept here, since there is no room for that on the device: its turn is next."""
        if id(tail) in self._queued:
            self._queue.remove(tail)
        elif len(self._queue) == MOST_QUEUED:
            self._queued.discard(id(self._queue.pop()))
        self._queue.appendleft(tail)
        self._queued.add(id(tail))

    def evicting(self, shard: CachedShard) -> bool:
        """Its blocks will be free when this returns. True where it is kept for a caller, and will be below."""
        now = now_ns()
        wish = self._device.pins.wish(shard)
        wish = wish if wish is not None and wish.until_ns > now else self._device.pins.passing(shard, now)
        if wish is None and id(shard) not in self._queued:
            return False
        chain, root, data = _chain(shard)
        if not self._copy_at_once(chain, root, data, all_of_it=wish is not None):
            self._stats.unspilled_shards += 1
            self._stats.lost_kept_shards += wish is not None and not shard.keep_until_ns
            return False
        if wish is None:
            return False
        kept = self._take_over(shard, wish, root, data)
        self._stats.lost_kept_shards += not kept and not shard.keep_until_ns  # what the device kept, the device counts
        return kept

    def reading(self) -> list[CopyHandle]:
        """Copies of blocks that were not borrowed: compute waits for them, and what else is copied there must too."""
        return [spill.copy for spill in self._flying if spill.borrowed is None]

    def advance(self) -> None:
        """Take in what has arrived, and start what is next."""
        while self._flying and self._flying[0].copy.done():
            self._arrived(self._flying.popleft())
        if self._writing:
            self._wrote()
        if not self._queue:
            return
        most, until = self._most_flying(), now_ns() + LOOKING_NS
        while self._queue and sum(len(spill.blocks) for spill in self._flying) < most:
            shard = self._queue[0]
            if not shard.live or self._next_of(shard):
                self._queue.popleft()
                self._queued.discard(id(shard))
                if now_ns() > until:
                    return

    def reclaim(self) -> bool:
        """Give all that is borrowed back now; what is computed next waits for the copies. False when nothing is."""
        borrowed = [spill for spill in self._flying if spill.borrowed is not None]
        for spill in borrowed:
            assert spill.borrowed is not None
            spill.copy.gate_compute()
            self._device.give_back(spill.borrowed)
            spill.borrowed = None
        return bool(borrowed)

    # ------------------------------------------------------------------ inside

    def _most_flying(self) -> int:
        """Blocks for this turn, by the bandwidth that was measured."""
        now = now_ns()
        seconds = max(FLYING_PART * (now - self._turned_ns) / NS_PER_S, LEAST_FLYING_S)
        self._turned_ns = now
        nbytes = min(seconds * 1e9 * self._copies.gigabytes_per_s("device", "host"), MOST_FLYING_BYTES)
        return max(1, int(nbytes) // self._copies.block_bytes)

    def _wrote(self) -> None:
        """Let go of what has been written, in whatever order: a write may hang."""
        left = []
        for handles, lease in self._writing:
            if all(handle.done() for handle in handles):
                self._host.release(lease, now_ns())
            else:
                left.append((handles, lease))
        self._writing = left

    def _copy_at_once(self, chain: list[CachedShard], root: bytes, data: bytes, *, all_of_it: bool) -> bool:
        """Copy the last shard of a chain, whose blocks will be free, with ``all_of_it`` also what is lacking before it.
        Compute waits for that. False where too much is being copied, or there is no room."""
        shard = chain[-1]
        room = self._copies.max_blocks - sum(len(spill.blocks) for spill in self._flying)
        while (have := self._host.find(root, data, shard.next_block).num_blocks) < shard.next_block:
            part = next(each for each in chain if each.next_block > have)
            room -= part.next_block - have
            if room < 0 or not (all_of_it or part is shard) or not self._copy(part, root, data, borrow=False):
                return False
            self._flying[-1].copy.gate_compute()
        return True

    def _take_over(self, shard: CachedShard, wish: Wish, root: bytes, data: bytes) -> bool:
        """Keep a shard of the device, which host memory has, there or else in files. False where no quota has room."""
        now = now_ns()
        match = self._host.find(root, data, shard.next_block)
        if self._host.keep(match, shard.begin, wish, now):
            return True
        nbytes = len(shard.blocks) * self._copies.block_bytes
        return self._disk is not None and self._disk.keep(shard.key, nbytes, wish.until_ns, wish.ttl_ns)

    def _next_of(self, tail: CachedShard) -> bool:
        """Copy the next part of a chain that is not in host memory yet. True when there is no more of it."""
        chain, root, data = _chain(tail)
        match = self._host.find(root, data, tail.next_block)
        have = match.num_blocks
        if have == tail.next_block:
            self._host.used(match, now_ns())
            for shard in chain:
                wish = self._device.pins.passing(shard, now_ns())
                if wish is not None:
                    self._stats.lost_kept_shards += not self._take_over(shard, wish, root, data)
                    self._device.pins.passed(shard)
            return True
        shard = next(shard for shard in chain if shard.next_block > have)
        if not self._copy(shard, root, data, borrow=True):
            self._stats.full_shards += 1
            return True
        return False

    def _copy(self, shard: CachedShard, root: bytes, data: bytes, *, borrow: bool) -> bool:
        """Copy what host memory lacks of a shard, all before which it has. False when there is no room."""
        now, size = now_ns(), len(shard.data) // len(shard.blocks)
        match = self._host.find(root, data, shard.next_block)
        first = match.num_blocks - shard.begin
        end = min(first + self._copies.max_blocks, len(shard.blocks))
        use = Use(shard.service)
        parent = match.end_hash or root
        part = shard.data[first * size : end * size]
        lease = self._host.extend(match, root, shard.end, shard.hashes[first:end], part, use, now)
        if lease is None:
            return False
        blocks = lease.tail.blocks
        if borrow:
            self._device.borrow(shard)
        copy = self._copies.submit("device", "host", list(zip(shard.blocks[first:end], blocks, strict=True)))
        self._host.arriving(blocks, copy)
        start = (shard.begin + first) * size // TOKEN_BYTES
        meta = ShardMeta(key=lease.tail.key, parent=parent, start=start, tokens=part)
        self._flying.append(_Spill(copy, lease, list(blocks), meta, use, shard if borrow else None))
        self._stats.spilled_blocks += len(blocks)
        return True

    def _arrived(self, spill: _Spill) -> None:
        spill.copy.wait()  # raises what went wrong
        self._host.arrived(spill.blocks)
        if spill.borrowed is not None:
            self._device.give_back(spill.borrowed)
        if self._disk is None or not spill.lease.tail.live:  # forgotten meanwhile: its content is suspect
            self._host.release(spill.lease, now_ns())
            return
        handle = self._disk.put(spill.meta, self._host.views(spill.blocks), ServiceClass(spill.use.service))
        self._writing.append(([handle, *self._write_before(spill, self._disk)], spill.lease))

    def _write_before(self, spill: _Spill, disk: DiskStore) -> list[DiskHandle]:
        """Write what a shard continues, where no file has it as it is by now: a beginning that was cut off when another
        prompt went on differently, or a file that had to go. A prompt is found from its start or not at all."""
        handles = []
        size = len(spill.meta.tokens) // len(spill.blocks)
        for shard in spill.lease.tail.up():
            start = shard.begin * size // TOKEN_BYTES
            if start >= spill.meta.start:
                continue
            written = disk.span(shard.key)
            # One that ends there and begins earlier holds it too, and is found as well by who comes from the start.
            # What it continues is there then, since leaves go first.
            if written is not None and written[0] <= start:
                break
            meta = ShardMeta(key=shard.key, parent=shard.parent_key, start=start, tokens=shard.data)
            handles.append(disk.put(meta, self._host.views(shard.blocks), shard.service))
        return handles


def _chain(tail: CachedShard) -> tuple[list[CachedShard], bytes, bytes]:
    """The shards up to ``tail``, the first one first; the root that they begin at, and their tokens."""
    chain = list(tail.up())
    chain.reverse()
    return chain, chain[0].parent_key, b"".join([shard.data for shard in chain])
