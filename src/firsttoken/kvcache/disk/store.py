"""The disk tier as the engine sees it: shards put, found, read back and dropped, without ever waiting for the disk.

Nothing here fails for the disk's sake: whatever is wrong with a file or the file system is a miss or a refusal with a
counter. A hit is right because the file is compared in full before its handle is done: identity, key, parent, position
and every token of the shard, then the checksum of the payload.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from time import perf_counter

from firsttoken.core.clock import now_ns
from firsttoken.core.identity import Identity
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.disk.buffers import KVBuffer, Scratch, byte_views
from firsttoken.kvcache.disk.config import DiskConfig
from firsttoken.kvcache.disk.folder import Folder
from firsttoken.kvcache.disk.format import Header, ShardMeta
from firsttoken.kvcache.disk.index import DiskIndex, Stored
from firsttoken.kvcache.disk.outcome import DiskHandle, Outcome
from firsttoken.kvcache.disk.shelf import Shelf
from firsttoken.kvcache.disk.start_warnings import start_warnings
from firsttoken.kvcache.disk.stats import Counters, DiskStats
from firsttoken.kvcache.disk.transfers import Transfer, Transfers
from firsttoken.kvcache.disk.workers import Job, Kind, Workers
from firsttoken.kvcache.eviction import EvictionPolicy, Shard, make_policy
from firsttoken.kvcache.pins import QUOTA

_LOOKS_A_JOB = 16


class DiskStore:
    """Shards of one identity in the files of one folder.

    ``identity`` without its salt is written into each file: a tenant's salt is in the keys already, and stays out of
    the folder. ``policy`` ranks what may go (least recently used first when None); it belongs to the store from then
    on. `put`, `get`, `contains`, `span`, `drop` and `stats` may be called from any thread and never block on the disk.
    The files of an earlier run are found one by one from the start on (`scanned` waits for it).

    Raises `ConfigError`, naming the folder, where it cannot be used. Close it, or daemon threads end with the process;
    whatever instant a process ends at, the folder is in order.
    """

    def __init__(self, config: DiskConfig, identity: Identity, policy: EvictionPolicy | None = None) -> None:
        self.config = config
        self._identity = identity.salted_root("")
        self._folder = Folder(config.folder)
        self._counters = Counters()
        self._index = DiskIndex(policy or make_policy("lru"), int(QUOTA * config.cap_bytes))
        self._shelf = Shelf(
            self._folder, self._index, self._identity, config.cap_bytes, config.margin_bytes, self._counters
        )
        self._lock = self._shelf.lock
        self._transfers = Transfers(
            self._folder,
            self._shelf,
            self._index,
            self._counters,
            self._identity,
            direct=config.direct and self._folder.direct,
            sync=config.sync,
        )
        self._writing: dict[bytes, DiskHandle] = {}
        limits = {Kind.READ: config.max_reads, Kind.WRITE: config.max_writes}
        self._workers = Workers(config.threads, limits, self._count_failure)
        self._closing = threading.Event()
        self._scanned = threading.Event()
        self._scan_s: float | None = None
        self._scanner = threading.Thread(target=self._scan, name="kv-disk-scan", daemon=True)
        self._scanner.start()

    # ------------------------------------------------------------------ what the engine calls

    @property
    def read_only(self) -> bool:
        """True when another process writes the folder."""
        return not self._folder.writable

    def start_warnings(self) -> list[str]:
        """What its user should know now of the folder: that nothing, or less than asked for, can be stored."""
        return start_warnings(self._folder, self.config, self._shelf.space)

    def contains(self, key: bytes) -> bool:
        """Whether a shard of this key is known to be stored; `get` may still miss."""
        return self.span(key) is not None

    def span(self, key: bytes) -> tuple[int, int] | None:
        """Of a stored shard: how many tokens of its chain come before it, and how many it has."""
        with self._lock:
            stored = self._index.get(key)
            return None if stored is None else (stored.shard.start, stored.shard.tokens)

    def put(
        self, meta: ShardMeta, payload: KVBuffer | Sequence[KVBuffer], service: ServiceClass = ServiceClass.P2
    ) -> DiskHandle:
        """Store a shard: ``payload`` is the bytes of its blocks, in one buffer or several in order, which must not
        change until the handle is done. One that is stored already is done at once, and counts as used.

        Refused, never waited for, where writers are behind. Raises `ValueError` for a buffer that is empty or not
        contiguous.
        """
        views = byte_views(payload, writable=False)
        shard = _shard(meta, views)
        with self._lock:
            stored = self._index.get(meta.key)
            if stored is not None and _same_range(stored.shard, meta) and stored.shard.nbytes == shard.nbytes:
                self._index.use(stored, service, now_ns())
                self._counters.already_stored += 1
                return DiskHandle(Outcome.DONE)
            if meta.key in self._writing:
                return self._writing[meta.key]
            refusal = Outcome.READ_ONLY if self.read_only else None
            if shard.nbytes > self.config.cap_bytes:
                refusal = Outcome.TOO_LARGE
            if refusal is not None:
                self._counters.refused[refusal.value] += 1
                return DiskHandle(refusal)
            handle = self._writing[meta.key] = DiskHandle()
        transfer = Transfer(meta, shard, views, service)
        job = Job(Kind.WRITE, shard.nbytes, handle, partial(self._run_put, handle, transfer))
        refusal = self._workers.submit(job)
        if refusal is not None:
            with self._lock:
                self._counters.refused[refusal.value] += 1
                if self._writing.get(meta.key) is handle:
                    del self._writing[meta.key]
            handle.resolve(refusal)
        return handle

    def get(
        self, meta: ShardMeta, into: KVBuffer | Sequence[KVBuffer], service: ServiceClass = ServiceClass.P2
    ) -> DiskHandle:
        """Fill ``into`` (one buffer or several in order, as long as the payload) with the KV of the very shard that
        ``meta`` names. Nobody else may touch the buffers until the handle is done, and unless it is ``ok`` they hold
        anything.

        Raises `ValueError` for a buffer that is empty, not contiguous or read-only.
        """
        views = byte_views(into, writable=True)
        with self._lock:
            stored = self._index.get(meta.key)
            miss = self._known_miss(stored, meta)
            if miss is not None:
                self._counters.misses[miss.value] += 1
                return DiskHandle(miss)
            if stored is not None:
                self._index.hold(stored, now_ns())
        handle = DiskHandle()
        transfer = Transfer(meta, _shard(meta, views), views, service)
        job = Job(Kind.READ, transfer.shard.nbytes, handle, partial(self._transfers.read, transfer, stored))
        refusal = self._workers.submit(job)
        if refusal is not None:
            with self._lock:
                self._counters.misses[refusal.value] += 1
                if stored is not None:
                    self._index.release(stored, now_ns())
            handle.resolve(refusal)
        return handle

    def can_keep(self, nbytes: int) -> bool:
        """Whether so many bytes more could be kept, `keep`."""
        with self._lock:
            return not self.read_only and self._index.kept.room(nbytes, now_ns())

    def keep(self, key: bytes, nbytes: int, until_ns: int, ttl_ns: int) -> bool:
        """Keep the shard of this key, and what it continues, until then, and for ``ttl_ns`` after each use, while
        anything else can go: also one that is still to be written, which takes about ``nbytes``. False where a quarter
        of the cap is kept already. A restart forgets it."""
        with self._lock:
            return not self.read_only and self._index.keep(key, nbytes, until_ns, ttl_ns, now_ns())

    def drop(self, key: bytes) -> None:
        """Forget a shard, now; its file goes soon after. A write of it that is under way ends as DROPPED, a read is not
        disturbed. The file of another process stays."""
        with self._lock:
            self._writing.pop(key, None)
            self._index.kept.left(key)
            nbytes = self._shelf.leaving(key) if not self.read_only else self._index.remove(key, now_ns())
            if self.read_only or (not nbytes and self._scanned.is_set()):
                return
        self._workers.submit(Job(Kind.HOUSEKEEPING, 0, DiskHandle(), partial(self._run_unlink, key, nbytes)))

    def stats(self) -> DiskStats:
        reads, read_bytes = self._workers.pending(Kind.READ)
        writes, write_bytes = self._workers.pending(Kind.WRITE)
        with self._lock:
            counters = self._counters
            return DiskStats(
                files=len(self._index),
                strangers=self._index.num_strangers,
                nbytes=self._index.nbytes,
                cap_bytes=self.config.cap_bytes,
                kept_bytes=self._index.kept.nbytes,
                read_only=self.read_only,
                direct=self._transfers.direct,
                scan_s=self._scan_s,
                hits=counters.hits,
                misses=dict(counters.misses),
                stored=counters.stored,
                already_stored=counters.already_stored,
                refused=dict(counters.refused),
                errors=dict(counters.errors),
                evicted=counters.evicted,
                damaged=counters.damaged,
                read_bytes=counters.read_bytes,
                read_s=counters.read_s,
                written_bytes=counters.written_bytes,
                write_s=counters.write_s,
                read_gb_s=counters.read_rate.ratio,
                write_gb_s=counters.write_rate.ratio,
                first_byte_ms=counters.first_byte.ratio,
                pending_reads=reads,
                pending_read_bytes=read_bytes,
                pending_writes=writes,
                pending_write_bytes=write_bytes,
            )

    def scanned(self, timeout_s: float | None = None) -> bool:
        """Wait until the files of earlier runs are known (or could not be listed)."""
        return self._scanned.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """End what has begun, refuse the rest as CLOSED, make names durable, and let another process write the folder.

        A thread that hangs in the disk for longer than the timeout keeps the folder locked.
        """
        self._closing.set()
        ended = self._workers.close(timeout_s)
        self._scanner.join(timeout_s)
        if not ended or self._scanner.is_alive():
            self._shelf.complaints.about("close", f"a thread hangs in {self._folder.path}; it stays locked")
            return
        if self._folder.writable and self.config.sync:
            try:
                self._folder.sync()
            except OSError as error:
                self._shelf.error(error, "syncing the folder")
        self._folder.unlock()

    def check(self) -> None:
        """Raise `AssertionError` unless the index is consistent. O(files), for tests."""
        with self._lock:
            self._index.check()

    # ------------------------------------------------------------------ inside

    def _known_miss(self, stored: Stored | None, meta: ShardMeta) -> Outcome | None:
        """Under the lock: why not to look at the disk at all."""
        if self.read_only:
            return None  # only the writer knows
        if stored is None:
            return Outcome.ABSENT if self._scanned.is_set() else None
        return None if _same_range(stored.shard, meta) else Outcome.TOKENS

    def _run_put(self, handle: DiskHandle, transfer: Transfer, scratch: Scratch) -> Outcome:
        key = transfer.shard.key
        outcome = Outcome.IO_ERROR
        try:
            outcome = self._transfers.write(transfer, lambda: self._writing.get(key) is handle, scratch)
        finally:
            with self._lock:
                if self._writing.get(key) is handle:
                    del self._writing[key]
                if outcome is not Outcome.DONE:
                    self._counters.refused[outcome.value] += 1
        return outcome

    def _run_unlink(self, key: bytes, nbytes: int, scratch: Scratch) -> Outcome:
        self._shelf.unlink(key, nbytes)
        return Outcome.DONE

    def _scan(self) -> None:
        """Look through the folder at the start, and beside a writer again and again."""
        began = perf_counter()
        try:
            self._shelf.scan(self._look, self._closing.is_set)
        finally:
            with self._lock:
                self._scan_s = perf_counter() - began
            self._scanned.set()
        while self.read_only and not self._closing.wait(self.config.refresh_s):
            self._shelf.scan(self._look, self._closing.is_set)

    def _look(self, keys: Sequence[bytes]) -> list[Header | Outcome]:
        """By all workers, since what a cold header costs is waiting; in small jobs, so that reads get their turn."""
        headers: list[Header | Outcome] = [Outcome.ABSENT] * len(keys)

        def look(begin: int, scratch: Scratch) -> Outcome:
            for place, key in enumerate(keys[begin : begin + _LOOKS_A_JOB], begin):
                headers[place] = self._shelf.look(key, scratch)
            return Outcome.DONE

        handles = []
        for begin in range(0, len(keys), _LOOKS_A_JOB):
            handle = DiskHandle()
            handles.append(handle)
            refusal = self._workers.submit(Job(Kind.HOUSEKEEPING, 0, handle, partial(look, begin)))
            if refusal is not None:
                handle.resolve(refusal)
        for handle in handles:
            handle.wait()
        return headers

    def _count_failure(self) -> None:
        with self._lock:
            self._counters.errors["unforeseen"] += 1


def _shard(meta: ShardMeta, views: Sequence[memoryview]) -> Shard:
    return Shard(meta.key, meta.start, meta.num_tokens, meta.header_bytes + sum(view.nbytes for view in views))


def _same_range(shard: Shard, meta: ShardMeta) -> bool:
    """One key may end shards of different lengths: when the size of shards is changed."""
    return (shard.start, shard.tokens) == (meta.start, meta.num_tokens)
