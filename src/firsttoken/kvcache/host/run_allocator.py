"""Which host blocks are free: runs of neighbours, so that a shard is one copy on the host's side. Torch-free."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple


class Run(NamedTuple):
    """``length`` blocks from ``first`` on."""

    first: int
    length: int


class RunAllocator:
    """Gives out runs of blocks by best fit: the shortest free run that is long enough, so that long ones stay.

    No run crosses a multiple of ``segment`` blocks, since no copy in one piece may. Blocks are added by `grow`. Each
    operation costs O(blocks moved + log different lengths); a run that is given back joins its free neighbours.
    """

    def __init__(self, segment: int) -> None:
        if segment < 1:
            raise ValueError(f"a segment needs at least one block, got {segment}")
        self._segment = segment
        self._used = bytearray()  # a byte a block: 1 when it is given out
        self._count_at: dict[int, int] = {}  # first block of a free run -> its length
        self._first_before: dict[int, int] = {}  # the block behind a free run -> its first block
        self._firsts: dict[int, dict[int, None]] = {}  # length -> firsts of free runs, the oldest first
        self._lengths: list[int] = []  # keys of _firsts, sorted
        self._free = 0

    @property
    def num_blocks(self) -> int:
        return len(self._used)

    @property
    def num_free(self) -> int:
        return self._free

    @property
    def largest(self) -> int:
        """Length of the longest free run."""
        return self._lengths[-1] if self._lengths else 0

    @property
    def num_runs(self) -> int:
        return len(self._count_at)

    def grow(self, num_blocks: int) -> None:
        """Have ``num_blocks`` in all; fewer than there are changes nothing."""
        begin = len(self._used)
        if num_blocks > begin:
            self._used.extend(bytes(num_blocks - begin))
            self._release(begin, num_blocks - begin)

    def take(self, count: int) -> list[Run] | None:
        """``count`` blocks in as few runs as there are, or None with nothing changed when fewer are free."""
        if count < 1:
            raise ValueError(f"at least one block must be taken, got {count}")
        if count > self._free:
            return None
        taken: list[Run] = []
        while count:
            at = bisect_left(self._lengths, count)
            # The longest ones whole until what is left fits into one.
            length = self._lengths[at] if at < len(self._lengths) else self._lengths[-1]
            first = next(iter(self._firsts[length]))
            part = min(count, length)
            self._remove(first)
            if part < length:
                self._insert(first + part, length - part)
            self._used[first : first + part] = b"\x01" * part
            self._free -= part
            taken.append(Run(first, part))
            count -= part
        return taken

    def give(self, run: Run) -> None:
        """Give blocks back: a run as it was taken, or any part of it. Raises `ValueError` when one is not in use."""
        first, count = run
        if first < 0 or count < 1 or first + count > len(self._used):
            raise ValueError(f"blocks {first} to {first + count - 1} are outside the pool of {len(self._used)}")
        if self._used.count(1, first, first + count) != count:
            raise ValueError(f"blocks {first} to {first + count - 1} are not all in use: given back twice?")
        self._used[first : first + count] = bytes(count)
        self._release(first, count)

    def check(self) -> None:
        """Raise `AssertionError` unless free runs are exactly the unused blocks and none could be longer. O(blocks)."""
        covered = bytearray(len(self._used))
        for first, count in self._count_at.items():
            assert count > 0
            assert first // self._segment == (first + count - 1) // self._segment, "a run crosses a segment"
            assert not any(covered[first : first + count]), "free runs overlap"
            covered[first : first + count] = b"\x01" * count
            assert self._first_before[first + count] == first
            assert first in self._firsts[count]
            joins = (first + count) % self._segment and first + count in self._count_at
            assert not joins, "two free runs lie side by side"
        assert all(a != b for a, b in zip(covered, self._used, strict=True)), "a block is neither free nor in use"
        assert self._free == sum(covered) == sum(self._count_at.values())
        assert len(self._first_before) == len(self._count_at) == sum(map(len, self._firsts.values()))
        assert self._lengths == sorted(length for length, firsts in self._firsts.items() if firsts)

    # ------------------------------------------------------------------ inside

    def _release(self, first: int, count: int) -> None:
        self._free += count
        for begin, length in _within(self._segment, first, count):
            self._insert(*self._joined(begin, length))

    def _joined(self, first: int, count: int) -> tuple[int, int]:
        """The run with its free neighbours, which leave the lists."""
        end = first + count
        if first % self._segment and (before := self._first_before.get(first)) is not None:
            self._remove(before)
            first = before
        if end % self._segment and (behind := self._count_at.get(end)) is not None:
            self._remove(end)
            end += behind
        return first, end - first

    def _insert(self, first: int, count: int) -> None:
        self._count_at[first] = count
        self._first_before[first + count] = first
        if count not in self._firsts:
            self._firsts[count] = {}
            insort(self._lengths, count)
        self._firsts[count][first] = None

    def _remove(self, first: int) -> None:
        count = self._count_at.pop(first)
        del self._first_before[first + count]
        firsts = self._firsts[count]
        del firsts[first]
        if not firsts:
            del self._firsts[count]
            del self._lengths[bisect_left(self._lengths, count)]


def _within(segment: int, first: int, count: int) -> Iterable[tuple[int, int]]:
    """Parts of a range of blocks that lie in one segment each."""
    end = first + count
    while first < end:
        part = min(end, first - first % segment + segment) - first
        yield first, part
        first += part
