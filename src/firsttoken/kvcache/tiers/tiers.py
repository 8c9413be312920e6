"""The tiers below the device, as the cache sees them.

A request that starts may have blocks whose KV lies in host memory or in files. `begin` says whether to restore them is
sooner than to compute them; the request then holds its slot and its blocks, and is in no step until `poll` says that
all has arrived. Files are read from the moment that the request comes (`prefetch`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import sleep

import msgspec

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.copy import CopyEngine
from firsttoken.kvcache.disk import DiskStore
from firsttoken.kvcache.eviction.interface import EvictionPolicy
from firsttoken.kvcache.host import HostPool
from firsttoken.kvcache.pins import Wish
from firsttoken.kvcache.prefix_index import BlockHash, Match, hash_block
from firsttoken.kvcache.shards import TOKEN_BYTES, CachedShard
from firsttoken.kvcache.tiers.cost import RecomputeCost, RestoreCost
from firsttoken.kvcache.tiers.file_reads import FileReads
from firsttoken.kvcache.tiers.host_tier import HostTier, Use
from firsttoken.kvcache.tiers.restore import Load, Restore, Restored
from firsttoken.kvcache.tiers.spill import DeviceShards, Spilling
from firsttoken.kvcache.tiers.stats import TierStats

# How long an engine that ends goes on writing, and how often it looks meanwhile.
FLUSH_S, FLUSH_POLL_S = 10.0, 0.001


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks for: the bytes of its tokens, of which ``limit`` full blocks may be found, and ``root``,
    where its chain begins."""

    root: bytes
    data: bytes
    limit: int


class Tiers:
    """``recompute`` tells what computing would take instead. All calls from the engine's thread; none waits.
    ``moved_in`` and ``moved_out`` are the running totals of copies to the device and from it."""

    def __init__(
        self,
        pool: HostPool,
        copies: CopyEngine,
        recompute: RecomputeCost,
        *,
        block_tokens: int,
        policy: EvictionPolicy,
        disk: DiskStore | None = None,
        block_hash: BlockHash = hash_block,
    ) -> None:
        self.host = HostTier(pool, block_tokens, copies.block_bytes, policy)
        self.host.on_kept = self._falls
        self.disk = disk
        self._copies = copies
        self.moved_in = copies.moved("host", "device")
        self.moved_out = copies.moved("device", "host")
        self._cost = RestoreCost(recompute)
        self._block_tokens = block_tokens
        self._block_hash = block_hash
        self._stats = TierStats()
        self._files: FileReads | None = None
        if disk is not None:
            self._files = FileReads(
                disk,
                self.host,
                copies,
                self._cost,
                block_tokens=block_tokens,
                block_hash=block_hash,
                stats=self._stats,
            )
        self._spilling: Spilling | None = None
        self._prefetched: dict[int, deque[Load]] = {}
        self._lacking: set[int] = set()  # requests whose files there was no room for
        self._restores: dict[int, Restore] = {}
        self._leaving: list[Restore] = []  # cancelled, with copies or reads under way

    def attach(self, device: DeviceShards) -> None:
        """Say whose shards are spilled. Before anything else."""
        self._spilling = Spilling(device, self.host, self._copies, self.disk, self._stats)

    @property
    def busy(self) -> bool:
        """True while `advance` should be called soon."""
        files = self._files is not None and self._files.busy
        return files or bool(self._leaving) or self._spill.busy or self._spill.writing

    def advance(self) -> None:
        """Take in what has arrived, begin what is next."""
        self._spill.advance()
        if self._files is not None and self._files.busy:
            self._files.advance()
        if self._leaving:
            left = [restore for restore in self._leaving if self._has_come(restore)]
            for restore in left:
                self._leaving.remove(restore)
                self._give_up(restore)

    # ------------------------------------------------------------------ from the device

    def idle(self, shard: CachedShard) -> None:
        """A shard of the device may be evicted from now on."""
        self._spill.idle(shard)

    def evicting(self, shard: CachedShard) -> bool:
        """Its blocks will be free when this returns. True where it is kept for a caller, and will be here."""
        return self._spill.evicting(shard)

    def can_keep(self, chain: Sequence[CachedShard], prompt: Prompt, passing: int) -> bool:
        """Whether quotas have room to keep a chain (the last shard first) of which ``prompt`` has the tokens, beside
        ``passing`` blocks that are on their way."""
        now, blocks = now_ns(), chain[0].next_block
        kept = [shard for shard in self.host.find(prompt.root, prompt.data, blocks).path if self.host.pins.wish(shard)]
        more = passing + blocks - sum([len(shard.blocks) for shard in kept])
        if self.host.pins.room(more, now):
            return True
        return self.disk is not None and self.disk.can_keep(more * self._copies.block_bytes)

    def kept_below(self, tail: CachedShard) -> None:
        """What the device's pins pass on of a chain comes next."""
        self._spill.kept_below(tail)

    @property
    def conditional(self) -> bool:
        """True while something may be kept until a request goes on."""
        return self.host.pins.conditional

    def continued(self, prompt: Prompt, num_tokens: int) -> None:
        """A request of so many tokens starts: what was kept until it goes on is kept no more."""
        match = self.host.find(prompt.root, prompt.data, prompt.limit)
        self.host.continued(match, num_tokens, now_ns())

    def reclaim(self) -> bool:
        """The cache wants the blocks back that are being copied: they are its own again, and what is computed next
        waits for the copies. False where none was borrowed."""
        return self._spill.reclaim()

    def forget(self, prompt: Prompt) -> None:
        """The KV of a request is suspect: nobody may find any of its prefix here, nor what continues it."""
        size = self._block_tokens * TOKEN_BYTES
        hashes = self.host.forget(prompt.root, prompt.data[:size], now_ns())
        if self.disk is None:
            return
        parent = prompt.root
        for at in range(0, prompt.limit * size, size):
            parent = self._block_hash(parent, prompt.data[at : at + size])
            hashes.append(parent)
        for key in hashes:
            self.disk.drop(key)

    # ------------------------------------------------------------------ to the device

    def prefetch(self, request: Request, prompt: Prompt, on_device: Match) -> None:
        """A request has come, of which so much is on the device: begin to read the files that continue it."""
        if self._files is None or request.request_id in self._prefetched:
            return
        found = self.host.find(prompt.root, prompt.data, prompt.limit)
        if on_device.num_blocks > found.num_blocks:
            found = on_device
        parent = found.end_hash or prompt.root
        service = ServiceClass(request.service)
        loads = self._files.begin(prompt.root, prompt.data, found.num_blocks, prompt.limit, parent, service)
        if loads:
            self._prefetched[request.request_id] = loads
        elif self._files.was_full:
            self._lacking.add(request.request_id)

    def begin(self, request: Request, prompt: Prompt, blocks: list[int], found: int, end_hash: bytes) -> bool:
        """A request starts with ``blocks``, of which the first ``found`` hold their KV; ``end_hash`` is their chained
        hash. True when more are being restored; until `poll` says that they have arrived, it must not be computed."""
        now, use = now_ns(), Use(request.service)
        match = self.host.find(prompt.root, prompt.data, prompt.limit)
        host_end = max(found, match.num_blocks)
        loads = self._prefetched.pop(request.request_id, deque())
        if host_end < prompt.limit:
            loads = self._loads_behind(host_end, loads)
        else:
            self._drop(loads)
            loads = deque()
        lacks = request.request_id in self._lacking or request.preemptions > 0
        self._lacking.discard(request.request_id)
        lease = None
        if host_end > found:
            if not self._is_worth(found, host_end):
                self._drop(loads)
                return False
            end_hash = match.end_hash or end_hash
            lease = self.host.lease(match, use, now)  # before files take room there
        if lacks and not loads and self._files is not None and host_end < prompt.limit:
            service = ServiceClass(request.service)
            loads = self._files.begin(prompt.root, prompt.data, host_end, prompt.limit, end_hash, service)
        end = min(loads[-1].end, prompt.limit) if loads else host_end
        if end == found:
            return False
        seconds = self._copies.seconds("host", "device", end - found)
        if loads and self._files is not None:
            seconds += self._files.seconds(end - host_end, len(loads))
        computing_s = self._cost.computing_s(found * self._block_tokens, end * self._block_tokens)
        restore = Restore(found, host_end, blocks[found:end], lease, loads, now, seconds, computing_s)
        self._restores[request.request_id] = restore
        self._stats.restores += 1
        self._has_come(restore)
        return True

    def poll(self, request: Request) -> Restored | None:
        """What was restored for a request, once all has arrived; then it is over."""
        restore = self._restores[request.request_id]
        if restore.is_late(now_ns()):
            self._drop(restore.loads, late=True)
            restore.loads = deque()
            self._stats.late += 1
        if not self._has_come(restore):
            return None
        del self._restores[request.request_id]
        restored = restore.restored(self._block_tokens)
        stats = self._stats
        stats.host_tokens += restored.host
        stats.disk_tokens += restored.disk
        stats.failed_tokens += len(restore.targets) * self._block_tokens - restored.tokens
        seconds = (now_ns() - restore.began_ns) / NS_PER_S
        stats.restore_s += seconds
        if restored.disk:
            stats.disk_restores += 1
            stats.disk_restore_s += seconds
        self._cost.took(restore.predicted_s, seconds)
        self._give_up(restore)
        return restored

    def cancel(self, request: Request) -> None:
        """A request is preempted, or has ended. Nothing happens for one that waits for nothing."""
        self._drop(self._prefetched.pop(request.request_id, ()))
        self._lacking.discard(request.request_id)
        restore = self._restores.pop(request.request_id, None)
        if restore is not None:
            restore.cancel()
            self._stats.cancelled += 1
            self._leaving.append(restore)

    def flush(self, limit_s: float = FLUSH_S) -> None:
        """Have what waits for its turn written to disk, for whoever starts next with that folder. Waits."""
        began = now_ns()
        while self.disk is not None and (self._spill.busy or self._spill.writing):
            if now_ns() - began > limit_s * NS_PER_S:
                return
            self.advance()
            sleep(FLUSH_POLL_S)

    def close(self) -> None:
        """End the disk's work and give host memory back; all copies have ended."""
        if self.disk is not None:
            self.disk.close()
        self.host.pool.close()

    def stats(self) -> TierStats:
        pool = self.host.pool.stats()
        return msgspec.structs.replace(
            self._stats,
            host_evicted_blocks=self.host.evicted_blocks,
            host_blocks=pool.used,
            host_capacity=pool.capacity,
            host_kept_blocks=self.host.pins.blocks,
        )

    def check(self) -> None:
        """Raise `AssertionError` unless every host block is free, a shard's, or read into. O(blocks), for tests."""
        self.host.check()
        staged = self._files.staged if self._files is not None else 0
        used = self.host.pool.stats().used
        assert used == len(self.host.index) + self.host.orphans + staged, (
            f"{used} host blocks are in use, {staged} of them for files"
        )

    # ------------------------------------------------------------------ inside

    @property
    def _spill(self) -> Spilling:
        assert self._spilling is not None, "tiers are attached to a cache first"
        return self._spilling

    def _falls(self, shard: CachedShard, wish: Wish) -> None:
        """Host memory needs the room of a shard that it keeps: its file is kept for as long."""
        nbytes = len(shard.blocks) * self._copies.block_bytes
        if (
            self.disk is None
            or not self.disk.contains(shard.key)
            or not self.disk.keep(shard.key, nbytes, wish.until_ns, wish.ttl_ns)
        ):
            self._stats.lost_kept_shards += 1

    def _has_come(self, restore: Restore) -> bool:
        return restore.advance(self.host, self._copies, self._spill.reading())

    def _loads_behind(self, end: int, loads: deque[Load]) -> deque[Load]:
        """Those of ``loads`` that go on from block ``end``: by now others may reach further, or no longer as far."""
        while loads and loads[0].end <= end:
            self._drop((loads.popleft(),))
        if loads and loads[0].first < end:
            loads[0].begin_at(end)
        if loads and loads[0].first != end:
            self._drop(loads)
            return deque()
        return loads

    def _is_worth(self, first: int, end: int) -> bool:
        seconds = self._copies.seconds("host", "device", end - first)
        if self._cost.is_worth(seconds, first * self._block_tokens, end * self._block_tokens):
            return True
        self._stats.declined_tokens += (end - first) * self._block_tokens
        return False

    def _drop(self, loads: Collection[Load], *, late: bool = False) -> None:
        if loads and self._files is not None:
            self._files.drop(loads, late=late)

    def _give_up(self, restore: Restore) -> None:
        if restore.lease is not None:
            self.host.release(restore.lease, now_ns())
        if restore.staged and self._files is not None:
            self._files.drop(restore.staged)
