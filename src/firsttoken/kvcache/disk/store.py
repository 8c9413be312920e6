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

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.identity import Identity
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.disk.buffers import KVBuffer, Scratch, byte_views
from firsttoken.kvcache.disk.config import DiskConfig
from firsttoken.kvcache.disk.folder import Folder
from firsttoken.kvcache.disk.format import ShardMeta
from firsttoken.kvcache.disk.index import DiskIndex, Stored
from firsttoken.kvcache.disk.lru import LruPolicy
from firsttoken.kvcache.disk.outcome import DiskHandle, Outcome
from firsttoken.kvcache.disk.shelf import Shelf
from firsttoken.kvcache.disk.stats import Counters, DiskStats
from firsttoken.kvcache.disk.transfers import Transfer, Transfers
from firsttoken.kvcache.disk.workers import Job, Kind, Workers
from firsttoken.kvcache.eviction.interface import EvictionPolicy, Shard


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
        self._index = DiskIndex(policy or LruPolicy())
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
        self._scanned_ns = 0
        self._scanner = threading.Thread(target=self._first_scan, name="kv-disk-scan", daemon=True)
        self._scanner.start()

    # ------------------------------------------------------------------ what the engine calls

    @property
    def read_only(self) -> bool:
        """True when another process writes the folder."""
        return not self._folder.writable

    def contains(self, key: bytes) -> bool:
        """Whether a shard of this key is known to be stored; `get` may still miss."""
        return self.span(key) is not None

    def span(self, key: bytes) -> tuple[int, int] | None:
        """Of a stored shard: how many tokens of its chain come before it, and how many it has."""
        self._refresh()
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
        self._refresh()
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

    def drop(self, key: bytes) -> None:
        """Forget a shard, now; its file goes soon after. A write of it that is under way ends as DROPPED, a read is not
        disturbed. The file of another process stays."""
        with self._lock:
            self._writing.pop(key, None)
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
        if stored is None:
            # While files are still being found, and beside a writer, only the disk knows.
            return Outcome.ABSENT if self._scanned.is_set() and not self.read_only else None
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

    def _first_scan(self) -> None:
        began = perf_counter()
        try:
            self._shelf.scan(self._closing.is_set)
        finally:
            with self._lock:
                self._scan_s = perf_counter() - began
                self._scanned_ns = now_ns()
            self._scanned.set()

    def _refresh(self) -> None:
        """Beside a writer: look for its new files now and then."""
        if not self.read_only or not self._scanned.is_set():
            return
        now = now_ns()
        with self._lock:
            if now - self._scanned_ns < self.config.refresh_s * NS_PER_S:
                return
            self._scanned_ns = now
        self._workers.submit(Job(Kind.HOUSEKEEPING, 0, DiskHandle(), self._rescan))

    def _rescan(self, scratch: Scratch) -> Outcome:
        self._shelf.scan(self._closing.is_set)
        return Outcome.DONE

    def _count_failure(self) -> None:
        with self._lock:
            self._counters.errors["unforeseen"] += 1


def _shard(meta: ShardMeta, views: Sequence[memoryview]) -> Shard:
    return Shard(meta.key, meta.start, meta.num_tokens, meta.header_bytes + sum(view.nbytes for view in views))


def _same_range(shard: Shard, meta: ShardMeta) -> bool:
    """One key may end shards of different lengths: when the size of shards is changed."""
    return (shard.start, shard.tokens) == (meta.start, meta.num_tokens)
