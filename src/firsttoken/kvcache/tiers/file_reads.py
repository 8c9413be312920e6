"""Files that are read for requests: which continue a prompt, whether they are worth it, and into which blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from firsttoken.core.clock import now_ns
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.copy import CopyEngine
from firsttoken.kvcache.disk import DiskStore, ShardMeta
from firsttoken.kvcache.prefix_index import BlockHash
from firsttoken.kvcache.shards import TOKEN_BYTES
from firsttoken.kvcache.tiers.cost import RestoreCost
from firsttoken.kvcache.tiers.host_tier import HostTier
from firsttoken.kvcache.tiers.restore import FileRead, Load
from firsttoken.kvcache.tiers.stats import TierStats

# A file's shard ends within so many blocks, mostly at a multiple of as many as shards have by default.
LONGEST, USUAL = 32, 16
# What files are read into beside the host tier's own shards: at most this part of its blocks.
STAGING_PART = 0.5
# Before anything was read, disks are thought to give so much, after so long.
PRIOR_GB_S, PRIOR_MS = 1.0, 1.0


class FileReads:
    """All calls from the engine's thread; the reading is done by the disk's own. Who wants a file that is being read,
    or whose blocks somebody is still copying, shares them."""

    def __init__(
        self,
        disk: DiskStore,
        host: HostTier,
        copies: CopyEngine,
        cost: RestoreCost,
        *,
        block_tokens: int,
        block_hash: BlockHash,
        stats: TierStats,
    ) -> None:
        self._disk = disk
        self._host = host
        self._copies = copies
        self._cost = cost
        self._block_tokens = block_tokens
        self._block_hash = block_hash
        self._stats = stats
        self._most_staged = int(STAGING_PART * host.pool.memory.capacity)
        self.staged = 0
        self.was_full = False  # the last time that `begin` was asked, more could have been read with more room
        self._reads: dict[tuple[bytes, int], FileRead] = {}
        self._unwanted: list[FileRead] = []

    def begin(
        self, root: bytes, data: bytes, found: int, limit: int, parent: bytes, service: ServiceClass
    ) -> deque[Load]:
        """Read what continues the first ``found`` blocks of a prompt (token bytes ``data``, from ``root`` on), which
        end with the hash ``parent``, up to ``limit`` blocks, if that is sooner than to compute it."""
        loads: deque[Load] = deque()
        self.was_full = False
        metas = self._files(root, data, found, limit, parent)
        if not metas:
            return loads
        start, end = found * self._block_tokens, metas[-1].start + metas[-1].num_tokens
        total = (end - metas[0].start) // self._block_tokens
        new = [meta for meta in metas if self._shared(meta) is None]
        blocks = sum(meta.num_tokens for meta in new) // self._block_tokens
        seconds = self.seconds(blocks, max(1, len(new))) + self._copies.seconds("host", "device", total)
        # Where a read has not come for long, the disk hangs.
        if any(read.late and not read.handle.done() for read in self._reads.values()) or not self._cost.is_worth(
            seconds, start, end
        ):
            self._stats.declined_tokens += end - start
            return loads
        at = found
        for meta in metas:
            read = self._shared(meta) or self._read(meta, service)
            if read is None:
                self.was_full = True
                break
            if not read.users and read in self._unwanted:
                self._unwanted.remove(read)
            read.users += 1
            load = Load(at, read, skip=at - meta.start // self._block_tokens)
            loads.append(load)
            at = load.end
        return loads

    def seconds(self, blocks: int, files: int) -> float:
        """In how many seconds so many blocks of so many files would be read, behind what is pending."""
        stats = self._disk.stats()
        nbytes = blocks * self._copies.block_bytes + stats.pending_read_bytes
        gb_s = PRIOR_GB_S if stats.read_gb_s is None else stats.read_gb_s * min(self._disk.config.threads, files)
        return (stats.first_byte_ms or PRIOR_MS) / 1e3 + nbytes / 1e9 / gb_s

    def drop(self, loads: Iterable[Load], *, late: bool = False) -> None:
        """A user has copied them, or does not want them any more (or longer: they are ``late``). Where none does, their
        blocks come free when they have been read."""
        for load in loads:
            read = load.read
            read.users -= 1
            read.late = read.late or late
            if not read.users:
                self._unwanted.append(read)
                self._free(read)

    @property
    def busy(self) -> bool:
        return bool(self._unwanted)

    def advance(self) -> None:
        for read in list(self._unwanted):
            self._free(read)

    # ------------------------------------------------------------------ inside

    def _shared(self, meta: ShardMeta) -> FileRead | None:
        read = self._reads.get((meta.key, meta.start))
        return None if read is None or (read.handle.done() and not read.handle.ok) else read

    def _read(self, meta: ShardMeta, service: ServiceClass) -> FileRead | None:
        count = meta.num_tokens // self._block_tokens
        blocks = None
        if self.staged + count <= self._most_staged:
            blocks = self._host.take(count, now_ns())
        if blocks is None:
            return None
        self.staged += count
        key = (meta.key, meta.start)
        read = self._reads[key] = FileRead(key, blocks, self._disk.get(meta, self._host.views(blocks), service))
        return read

    def _free(self, read: FileRead) -> None:
        """Give the blocks of a read back that nobody wants, once nothing is written there."""
        if not read.handle.done():
            return
        self._unwanted.remove(read)
        if self._reads.get(read.key) is read:
            del self._reads[read.key]
        self.staged -= len(read.blocks)
        self._host.give(read.blocks)

    def _files(self, root: bytes, data: bytes, at: int, limit: int, parent: bytes) -> list[ShardMeta]:
        """The stored shards that lie one behind the other and hold what goes on from block ``at``. The first may begin
        before it: it was written when nothing else had the same beginning."""
        found: list[ShardMeta] = []
        bt, size = self._block_tokens, self._block_tokens * TOKEN_BYTES
        known = len(data) // size  # the last file may go beyond what is wanted of it
        while at < limit:
            hashes: list[bytes] = []
            usual = min(USUAL - at % USUAL, known - at)
            place = self._ends_at(data, at, [usual], parent, hashes)
            place = place or self._ends_at(data, at, range(min(LONGEST, known - at), 0, -1), parent, hashes)
            if place is None:
                break
            start, end = place
            key = hashes[end - at - 1]
            before = parent if start == at else self._hash_at(root, data, start)
            found.append(ShardMeta(key=key, parent=before, start=start * bt, tokens=data[start * size : end * size]))
            at, parent = end, key
        return found

    def _ends_at(
        self, data: bytes, at: int, counts: Iterable[int], parent: bytes, hashes: list[bytes]
    ) -> tuple[int, int] | None:
        """Where a shard begins, and ends, that has so many blocks from ``at`` on, by the first of ``counts`` of which
        there is one. ``hashes`` are those of the blocks, made as they are needed."""
        bt, size = self._block_tokens, self._block_tokens * TOKEN_BYTES
        for count in counts:
            while len(hashes) < count:
                begin = (at + len(hashes)) * size
                hashes.append(self._block_hash(hashes[-1] if hashes else parent, data[begin : begin + size]))
            span = self._disk.span(hashes[count - 1])
            if span is None:
                continue
            start, tokens = span
            if start <= at * bt and start + tokens == (at + count) * bt and not start % bt:
                return start // bt, at + count
        return None

    def _hash_at(self, root: bytes, data: bytes, end: int) -> bytes:
        """The chained hash up to the chain's block ``end``."""
        size, parent = self._block_tokens * TOKEN_BYTES, root
        for begin in range(0, end * size, size):
            parent = self._block_hash(parent, data[begin : begin + size])
        return parent
