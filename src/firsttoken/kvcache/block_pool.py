"""Who holds which KV block: a fixed number of blocks, each free, cached or in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_CACHED = -1


class BlockPool:
    """Reference counts and a free list.

    A block is in exactly one state: *free* (content worthless), *cached* (no reference, content findable by prefix)
    or *in use* (one reference or more). Each operation costs O(blocks given). The pool does not know what a block
    contains, nor which cached one should go first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks  # or _CACHED
        # A stack: a block that was just given back is the likeliest to be in the CPU's cache. Low ids come first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self._cached

    @property
    def available(self) -> int:
        """Blocks that can be had now: free ones, and cached ones after eviction."""
        return len(self._free) + self._cached

    def references(self, block: int) -> int:
        return max(self._references[block], 0)

    def is_cached(self, block: int) -> bool:
        """True when the block is findable but unreferenced, so that it may be evicted."""
        return self._references[block] == _CACHED

    def exclusive(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have one reference only."""
        references = self._references
        return sum([references[block] == 1 for block in blocks])

    def take(self, count: int) -> list[int]:
        """So many free blocks, with one reference each. Raises `IndexError`, with nothing changed, when fewer are free
        (evict first)."""
        rest = len(self._free) - count
        if rest < 0:
            raise IndexError(f"{count} KV blocks are wanted, but {len(self._free)} are free")
        blocks = self._free[rest:]
        blocks.reverse()
        del self._free[rest:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which are cached or in use. Raises `ValueError`, with nothing
        changed, when one is free: it has no content to share."""
        references = self._references
        before = [references[block] for block in blocks]
        if 0 in before:
            raise ValueError(f"KV block {blocks[before.index(0)]} is free and has no content to share")
        for block, count in zip(blocks, before, strict=True):
            references[block] = count + 1 if count > 0 else 1
        self._cached -= before.count(_CACHED)

    def drop(self, blocks: Iterable[int], *, keep: bool) -> None:
        """Give back one reference of each block. The last one makes a block cached (``keep``) or free."""
        references, free = self._references, self._free
        for block in blocks:
            left = references[block] - 1
            if left > 0:
                references[block] = left
            elif left:
                raise RuntimeError(f"KV block {block} was released twice")
            elif keep:
                references[block] = _CACHED
                self._cached += 1
            else:
                references[block] = 0
                free.append(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """The content of these blocks is no longer findable: cached ones become free, those in use stay in use."""
        for block in reversed(blocks):
            if self._references[block] == _CACHED:
                self._references[block] = 0
                self._free.append(block)
                self._cached -= 1

    def check(self, owners: Mapping[int, int]) -> None:
        """Raise `AssertionError` unless the states partition the pool and references equal ``owners`` (block ->
        number of holders). O(blocks)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        for block, count in enumerate(self._references):
            assert max(count, 0) == owners.get(block, 0), (
                f"block {block} has {count} references but {owners.get(block, 0)} owners"
            )
            assert (block in free) == (count == 0), f"block {block} with state {count} is {'free' if count else 'lost'}"
        assert self._references.count(_CACHED) == self._cached, "cached blocks are counted wrong"
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks
