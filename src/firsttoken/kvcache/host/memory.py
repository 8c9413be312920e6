"""A slab of host memory for KV blocks, pinned for the GPU while the engine is at work already. Torch-free.

Pinning takes the system some tenths of a second for each GiB, and an engine must not wait for that. So addresses for
all blocks are reserved at once, which costs nothing, and a thread then touches and pins them chunk after chunk, with
pauses: blocks can be used as soon as their chunk is pinned.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
from collections.abc import Callable
from typing import Protocol

from firsttoken.core.clock import now_ns
from firsttoken.kvcache.host.size import available_memory

# Direct I/O wants buffers that begin and end at pages.
ALIGNMENT = 4096
CHUNK_BYTES = 64 << 20
# Large pages are pinned several times faster than small ones.
_LARGE_PAGE = 2 << 20
# The thread leaves the system alone for as long as it has worked, times this.
_REST = 1.0
# Growth ends where the system would have less left than this.
SPARE_BYTES = 1 << 30
_RETRY_S = 0.02

log = logging.getLogger(__name__)


class Pinning(Protocol):
    """Locks pages in memory for a device. Called by the thread that grows the memory, then by the one that closes."""

    def pin(self, address: int, nbytes: int) -> None:
        """Raises `OSError` when it cannot."""

    def unpin(self, address: int) -> None: ...


class HostMemory:
    """``num_blocks`` blocks of ``block_bytes``, as `copy.BlockMemory`; ``capacity`` is what it may grow to.

    Nothing can be used before `open`. A block begins at a multiple of `ALIGNMENT` (``stride`` is rounded up to one), so
    any run of blocks can be read and written with direct I/O. Raises `ValueError` for sizes below one, and
    `MemoryError` when the system has no such address space.
    """

    def __init__(self, capacity: int, block_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        if capacity < 1 or block_bytes < 1:
            raise ValueError(f"host memory needs at least one block of one byte, got {capacity} of {block_bytes}")
        self.capacity = capacity
        self._block_bytes = block_bytes
        self._stride = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        self._segment = max(1, chunk_bytes // self._stride)
        self._map = _reserve(capacity * self._stride)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._begin = -base % _LARGE_PAGE
        self._address = base + self._begin
        self._ready = 0
        self._pinning: Pinning | None = None
        self._pinned: list[int] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._settled = threading.Event()

    @property
    def address(self) -> int:
        return self._address

    @property
    def num_blocks(self) -> int:
        return self._ready

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def stride(self) -> int:
        return self._stride

    @property
    def segment_blocks(self) -> int:
        return self._segment if self._pinning is not None else self.capacity

    @property
    def on_device(self) -> bool:
        return False

    @property
    def is_open(self) -> bool:
        return self._ready > 0 or self._thread is not None

    def open(
        self,
        pinning: Pinning | None = None,
        *,
        may_grow: Callable[[], bool] = lambda: True,
        available: Callable[[], int] = available_memory,
    ) -> None:
        """Make blocks usable: all at once without ``pinning`` (the system gives plain memory as it is touched), else
        as a thread has pinned them. Before each chunk it asks whether it ``may_grow`` now, from its own thread, and
        whether enough memory is ``available``. Call it once; raises `RuntimeError` otherwise.
        """
        if self.is_open or self._stop.is_set():
            raise RuntimeError("host memory is opened once")
        if pinning is None:
            self._ready = self.capacity
            self._settled.set()
            return
        self._pinning = pinning
        self._thread = threading.Thread(
            target=self._grow, args=(pinning, may_grow, available), name="firsttoken-host-memory", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it grows no more; False after ``timeout`` seconds. For tests and benchmarks."""
        return self._settled.wait(timeout)

    def view(self, block: int, count: int = 1) -> memoryview:
        """The bytes of a run of usable blocks, writable; ``count * stride`` of them. Raises `ValueError` outside."""
        if block < 0 or count < 1 or block + count > self._ready:
            raise ValueError(f"host blocks {block} to {block + count - 1} are not among the {self._ready} usable ones")
        first = self._begin + block * self._stride
        return memoryview(self._map)[first : first + count * self._stride]

    def close(self) -> None:
        """Stop growing, unpin, and give the memory back once no view of it is left. Copies must have ended
        (`CopyEngine.close`). Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._settled.set()
        self._ready = 0
        while self._pinned and self._pinning is not None:
            address = self._pinned.pop()
            try:
                self._pinning.unpin(address)
            except OSError as error:  # the process ends all the same, and with it the pinning
                log.warning("%s", error)
        with contextlib.suppress(BufferError):  # somebody has a view: it goes with the last one
            self._map.close()

    # ------------------------------------------------------------------ the thread that grows it

    def _grow(self, pinning: Pinning, may_grow: Callable[[], bool], available: Callable[[], int]) -> None:
        began = now_ns()
        try:
            while self._ready < self.capacity and self._grow_once(pinning, may_grow, available):
                pass
        finally:
            size = self._ready * self._stride
            log.info("%.1f GiB of host memory are pinned for KV after %.1f s", size / 2**30, (now_ns() - began) / 1e9)
            self._settled.set()

    def _grow_once(self, pinning: Pinning, may_grow: Callable[[], bool], available: Callable[[], int]) -> bool:
        """Pin one chunk more. False when there will be none."""
        while not may_grow():
            if self._stop.wait(_RETRY_S):
                return False
        count = min(self._segment, self.capacity - self._ready)
        nbytes = count * self._stride
        left = available()
        if left < nbytes + SPARE_BYTES:
            log.warning("host memory for KV grows no more: only %.1f GiB are free", left / 2**30)
            return False
        address = self._address + self._ready * self._stride
        began = now_ns()
        # Touched here, where no lock of the driver's is held: a step's launch would wait for one.
        ctypes.memset(address, 0, nbytes)
        if self._stop.is_set():
            return False
        try:
            pinning.pin(address, nbytes)
        except OSError as error:
            log.warning("host memory for KV grows no more: %s", error)
            return False
        self._pinned.append(address)
        self._ready += count
        return not self._stop.wait((now_ns() - began) / 1e9 * _REST)


def _reserve(nbytes: int) -> mmap.mmap:
    """Private anonymous memory with room to begin at a large page."""
    try:
        reserved = mmap.mmap(-1, nbytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes of host memory for KV cannot be had: {error}") from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a fork would copy what is pinned
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without large pages
                reserved.madvise(getattr(mmap, advice))
    return reserved
