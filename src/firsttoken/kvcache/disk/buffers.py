"""Memory that files are read into and written from: aligned for O_DIRECT where the caller's is."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from firsttoken.kvcache.disk.format import PAGE

SPAN_BYTES = 4 << 20
"""Bytes of one system call. `benchmarks/kv_disk.py` tells no difference between 4 and 64 MiB that repeats; 1 MiB is
slower."""
_MAX_PIECES = 512

KVBuffer = bytes | bytearray | memoryview | mmap.mmap
"""Contiguous memory; wrap an array or a tensor's array in a `memoryview`."""


class Scratch:
    """A worker's own aligned memory: for headers, and for the last bytes of a payload that fill no page."""

    def __init__(self) -> None:
        self._header = mmap.mmap(-1, PAGE)
        self.tail = memoryview(mmap.mmap(-1, PAGE))

    def header(self, nbytes: int) -> memoryview:
        """At least one page; the contents are left over from before."""
        if len(self._header) < nbytes:
            self._header = mmap.mmap(-1, nbytes)
        return memoryview(self._header)[:nbytes]


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeroed memory that begins at a page, for callers without a pinned slab of their own. The first transfer into
    it also has to make its pages, large ones where the system has them."""
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:nbytes]


def byte_views(buffers: KVBuffer | Sequence[KVBuffer], *, writable: bool) -> list[memoryview]:
    """The bytes of one buffer, or of several one after the other (the blocks of a shard need not lie side by side).

    Raises `ValueError` where one is not contiguous, or read-only though it is to be filled, or where there are none.
    """
    parts = [buffers] if isinstance(buffers, KVBuffer) else buffers
    views: list[memoryview] = []
    for part in parts:
        view = memoryview(part)
        if not view.c_contiguous:
            raise ValueError(f"a KV buffer must be contiguous, got shape {view.shape} with strides {view.strides}")
        if writable and view.readonly:
            raise ValueError("a KV buffer to read into must be writable")
        if view.nbytes:
            views.append(view.cast("B"))
    if not views:
        raise ValueError("a shard has at least one byte of KV, got an empty buffer")
    return views


def is_aligned(views: Sequence[memoryview]) -> bool:
    """True when O_DIRECT can use them: each begins at a page, and all but the last are whole pages."""
    if any(view.nbytes % PAGE for view in views[:-1]):
        return False
    return all(_address(view) % PAGE == 0 for view in views)


def split_tail(views: Sequence[memoryview]) -> tuple[list[memoryview], memoryview]:
    """The whole pages, and the rest of the last view (empty where it fills its pages)."""
    last = views[-1]
    whole = last.nbytes - last.nbytes % PAGE
    body = [*views[:-1], last[:whole]] if whole else list(views[:-1])
    return body, last[whole:]


def spans(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in order, in groups for one system call each."""
    group: list[memoryview] = []
    room = SPAN_BYTES
    for view in views:
        cuts = [0, *range(room, view.nbytes, SPAN_BYTES), view.nbytes]
        for begin, end in pairwise(cuts):
            group.append(view[begin:end])
            room -= end - begin
            if room <= 0 or len(group) == _MAX_PIECES:
                yield group
                group, room = [], SPAN_BYTES
    if group:
        yield group


def skip(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left after the first ``nbytes``."""
    left: list[memoryview] = []
    for view in views:
        if nbytes < view.nbytes:
            left.append(view[nbytes:])
        nbytes = max(0, nbytes - view.nbytes)
    return left


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
