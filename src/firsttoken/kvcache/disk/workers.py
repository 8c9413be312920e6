"""A bounded pool of threads for blocking reads and writes, reads first."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from time import monotonic

import msgspec

from firsttoken.kvcache.disk.buffers import Scratch
from firsttoken.kvcache.disk.outcome import DiskHandle, Outcome

logger = logging.getLogger(__name__)


class Kind(IntEnum):
    """Of a job, in the order in which they are taken. Housekeeping is never refused: it is one job a call of ours."""

    READ = 0
    HOUSEKEEPING = 1
    WRITE = 2


class Job(msgspec.Struct, frozen=True):
    """What ``run`` returns is the handle's outcome."""

    kind: Kind
    nbytes: int
    handle: DiskHandle
    run: Callable[[Scratch], Outcome]


class Workers:
    """``threads`` daemon threads. ``limits`` bounds the jobs in hand (queued and running) of a kind.

    All threads but one may write at a time (one, where there is only one): a read then waits for reads alone.
    """

    def __init__(self, threads: int, limits: dict[Kind, int], on_failure: Callable[[], None]) -> None:
        self._ready = threading.Condition()
        self._queues: dict[Kind, deque[Job]] = {kind: deque() for kind in Kind}
        self._in_hand = dict.fromkeys(Kind, 0)
        self._bytes = dict.fromkeys(Kind, 0)
        self._limits = limits
        self._writing = 0
        self._max_writing = max(1, threads - 1)
        self._closed = False
        self._on_failure = on_failure
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-disk-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Outcome | None:
        """Take a job; or say why not: QUEUE_FULL or CLOSED."""
        with self._ready:
            if self._closed:
                return Outcome.CLOSED
            if self._in_hand[job.kind] >= self._limits.get(job.kind, self._in_hand[job.kind] + 1):
                return Outcome.QUEUE_FULL
            self._in_hand[job.kind] += 1
            self._bytes[job.kind] += job.nbytes
            self._queues[job.kind].append(job)
            self._ready.notify()
        return None

    def pending(self, kind: Kind) -> tuple[int, int]:
        """Jobs and bytes in hand."""
        with self._ready:
            return self._in_hand[kind], self._bytes[kind]

    def close(self, timeout_s: float) -> bool:
        """Take no more; reads and writes that have not begun end as CLOSED, but what was dropped is still removed. True
        when all threads ended within the timeout."""
        with self._ready:
            self._closed = True
            left = [job for kind in (Kind.READ, Kind.WRITE) for job in self._queues[kind]]
            self._queues[Kind.READ].clear()
            self._queues[Kind.WRITE].clear()
            self._ready.notify_all()
        for job in left:
            self._end(job, Outcome.CLOSED)
        until = monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        scratch = Scratch()
        while (job := self._take()) is not None:
            try:
                outcome = job.run(scratch)
            except Exception:
                # A job answers for errors of the disk; this one is ours, and must not cost a thread or leave a waiter.
                logger.exception("a %s of the disk tier failed in an unforeseen way", job.kind.name.lower())
                self._on_failure()
                outcome = Outcome.IO_ERROR
            with self._ready:
                self._writing -= job.kind is Kind.WRITE
            self._end(job, outcome)

    def _take(self) -> Job | None:
        with self._ready:
            while True:
                for kind, queue in self._queues.items():
                    if queue and (kind is not Kind.WRITE or self._writing < self._max_writing):
                        self._writing += kind is Kind.WRITE
                        return queue.popleft()
                if self._closed:
                    return None
                self._ready.wait()

    def _end(self, job: Job, outcome: Outcome) -> None:
        with self._ready:
            self._in_hand[job.kind] -= 1
            self._bytes[job.kind] -= job.nbytes
        job.handle.resolve(outcome)
