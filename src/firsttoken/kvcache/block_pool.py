"""Who holds which KV block: a fixed number of blocks, each free, cached or in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class BlockPool:
    """Reference counts, a free list and an LRU of blocks that are cached but that nobody references.

    A block is in exactly one state: *free* (content worthless), *cached* (no reference, content findable by prefix)
    or *in use* (one reference or more). All operations but `take` and `check` are O(1). The pool does not know what a
    block contains.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # A stack: a block that was just given back is the likeliest to be in the CPU's cache. Low ids come first.
        self._free = list(range(num_blocks - 1, -1, -1))
        # OrderedDict and not dict: taking the oldest key of a dict slows down with the keys deleted before it.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be had now: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        """True when the block is findable but unreferenced, so that it may be evicted."""
        return block in self._cached

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

    def share(self, block: int) -> None:
        """Add a reference to a block that is cached or in use."""
        if self._references[block] == 0:
            del self._cached[block]  # KeyError: a free block has no content to share
        self._references[block] += 1

    def drop(self, block: int, *, keep: bool) -> None:
        """Give one reference back. The last one makes the block cached (``keep``, as the youngest) or free."""
        left = self._references[block] - 1
        if left < 0:
            raise RuntimeError(f"KV block {block} was released twice")
        self._references[block] = left
        if not left:
            if keep:
                self._cached[block] = None
            else:
                self._free.append(block)

    def oldest(self) -> int:
        """The cached block that was unreferenced for longest. Raises `StopIteration` when none is cached."""
        return next(iter(self._cached))

    def touch(self, block: int) -> None:
        """Make a block the youngest of the cached ones; nothing happens when it is not cached."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def forget(self, block: int) -> None:
        """The content of a block is no longer findable: a cached block becomes free, one in use stays in use."""
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check(self, owners: Mapping[int, int]) -> None:
        """Raise `AssertionError` unless the states partition the pool and references equal ``owners`` (block ->
        number of holders). O(blocks)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & self._cached.keys(), "a block is both free and cached"
        for block, count in enumerate(self._references):
            assert count == owners.get(block, 0), (
                f"block {block} has {count} references but {owners.get(block, 0)} owners"
            )
            idle = block in free or block in self._cached
            assert idle == (count == 0), f"block {block} with {count} references is {'idle' if idle else 'lost'}"
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks
