"""The host tier's blocks: memory that may still be growing, and who has which run of it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from firsttoken.kvcache.host.memory import HostMemory
from firsttoken.kvcache.host.run_allocator import Run, RunAllocator


class HostStats(msgspec.Struct, frozen=True):
    """Counts of blocks: ``capacity`` once all is pinned, ``total = used + free`` so far; ``runs`` free runs, of which
    the ``longest`` has so many blocks. ``nbytes`` is what the blocks so far take."""

    capacity: int
    total: int
    used: int
    free: int
    runs: int
    longest: int
    nbytes: int


class HostPool:
    """Gives out blocks of ``memory``, which must be open (`RuntimeError` otherwise). All calls from one thread."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._runs: RunAllocator | None = None

    def take(self, count: int) -> list[Run] | None:
        """``count`` blocks in as few runs as possible; None with nothing changed when fewer are free by now."""
        return self._grown().take(count)

    def give(self, runs: Iterable[Run]) -> None:
        """Give runs back, or parts of them. No copy may read or write them any more. Raises `ValueError` for blocks
        that are not in use."""
        allocator = self._grown()
        for run in runs:
            allocator.give(run)

    def view(self, run: Run) -> memoryview:
        """The bytes of a run, as `HostMemory.view`."""
        return self.memory.view(*run)

    @property
    def num_free(self) -> int:
        return self._grown().num_free

    def stats(self) -> HostStats:
        runs = self._grown()
        return HostStats(
            capacity=self.memory.capacity,
            total=runs.num_blocks,
            used=runs.num_blocks - runs.num_free,
            free=runs.num_free,
            runs=runs.num_runs,
            longest=runs.largest,
            nbytes=runs.num_blocks * self.memory.stride,
        )

    def check(self) -> None:
        """Raise `AssertionError` unless free + used = total, block by block. O(blocks)."""
        self._grown().check()

    def close(self) -> None:
        """As `HostMemory.close`."""
        self.memory.close()

    def _grown(self) -> RunAllocator:
        if self._runs is None:
            # Only an opened memory knows its segments.
            if not self.memory.is_open:
                raise RuntimeError("the host memory must be opened before blocks of it are given out")
            self._runs = RunAllocator(self.memory.segment_blocks)
        self._runs.grow(self.memory.num_blocks)
        return self._runs


def blocks_of(runs: Sequence[Run]) -> list[int]:
    """All blocks of some runs, in order."""
    return [block for first, count in runs for block in range(first, first + count)]
