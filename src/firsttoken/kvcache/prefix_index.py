"""Finding cached KV by the tokens that it was computed from.

Blocks are keyed by a chained SHA-256 (`hash_block`), whose chain starts at the identity's root. The hash only finds
a candidate: a hit also needs equal tokens and the very parent that was hit before it, so that no collision, made or
met, can serve the KV of other tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator

BlockHash = Callable[[bytes, bytes], bytes]
"""``(parent hash, token bytes of the block) -> hash``."""


def hash_block(parent: bytes, tokens: bytes) -> bytes:
    """SHA-256 over the parent's 32 bytes and the block's token ids (uint32, little-endian)."""
    digest = hashlib.sha256(parent)
    digest.update(tokens)
    return digest.digest()


class CachedBlock:
    """A node of the index: a full block, what it holds, and what it continues.

    ``parent`` is None only for the node at the root of an identity, which stands for no block (``block`` is -1).
    Once not ``live`` a node never becomes live again, and its descendants are not live either.
    ``child`` is the youngest of those that continue it, each of which knows the one before and after it: hardly any
    has more than one, and a dict in each would be half of the index.
    """

    __slots__ = ("block", "child", "hash", "live", "older", "parent", "tokens", "younger")

    def __init__(self, block: int, parent: CachedBlock | None, block_hash: bytes, tokens: bytes) -> None:
        self.block = block
        self.parent = parent
        self.hash = block_hash
        self.tokens = tokens
        self.live = True
        self.child: CachedBlock | None = None
        self.older: CachedBlock | None = None
        self.younger: CachedBlock | None = None


class PrefixIndex:
    """Which full blocks are findable. Owns no references: the pool and its callers decide about those."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._roots: dict[bytes, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    @property
    def blocks(self) -> Collection[int]:
        """Those that are findable, as they are at any time."""
        return self._by_block

    def node(self, block: int) -> CachedBlock | None:
        """The node that a block is registered as."""
        return self._by_block.get(block)

    def find(
        self, root: bytes, parent: CachedBlock | None, block_hash: bytes, tokens: bytes | memoryview
    ) -> CachedBlock | None:
        """The node of ``tokens`` (bytes of one block) right after ``parent`` (None: at ``root``), if registered."""
        node = self._nodes.get(block_hash)
        if node is None or node.tokens != tokens:
            return None
        return node if node.parent is (parent or self._roots.get(root)) else None

    def insert(
        self, root: bytes, parent: CachedBlock | None, block_hash: bytes, tokens: bytes, block: int
    ) -> CachedBlock | None:
        """Register ``block`` as the continuation of ``parent`` (None: the first block after ``root``).

        Returns the node that now stands for these tokens: a new one, or an older one with another block when the
        same tokens were registered before. None when a *different* prefix has the same hash: then nothing is
        registered. ``parent`` must be live.
        """
        above = parent or self._roots.get(root)
        existing = self._nodes.get(block_hash)
        if existing is not None:
            return existing if existing.parent is above and existing.tokens == tokens else None
        if above is None:
            above = self._roots[root] = CachedBlock(-1, None, root, b"")
        node = CachedBlock(block, above, block_hash, tokens)
        older = above.child
        if older is not None:
            older.younger = node
            node.older = older
        above.child = node
        self._nodes[block_hash] = node
        self._by_block[block] = node
        return node

    def remove(self, block: int) -> list[int]:
        """Forget a block and everything that continues it (which could never be hit again); children come first.

        Returns the blocks forgotten. Each node is removed once, so the cost is O(1) for every `insert`.
        """
        top = self._by_block[block]
        above, older, younger = top.parent, top.older, top.younger
        assert above is not None
        if older is not None:
            older.younger = younger
        if younger is not None:
            younger.older = older
        else:
            above.child = older
        gone = self._unlink(top)
        if above.parent is None and above.child is None:
            above.live = False
            del self._roots[above.hash]
        return gone

    def _unlink(self, top: CachedBlock) -> list[int]:
        # Parents before children, then reversed: an explicit stack, because chains are longer than Python's.
        order = [top]
        for node in order:
            order.extend(_children(node))
        gone: list[int] = []
        for node in reversed(order):
            node.live = False
            node.child = node.older = node.younger = None
            del self._nodes[node.hash]
            del self._by_block[node.block]
            gone.append(node.block)
        return gone

    def check(self) -> None:
        """Raise `AssertionError` unless every node is reachable from a root and its blocks are unique. O(nodes)."""
        assert len(self._nodes) == len(self._by_block), "a block is registered twice"
        reached = 0
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert node.live, f"block {node.block} is dead but reachable"
            for child in _children(node):
                assert child.parent is node
                assert child.older is None or child.older.younger is child
                assert self._nodes[child.hash] is child
                assert self._by_block[child.block] is child
                reached += 1
                stack.append(child)
        assert reached == len(self._nodes), f"{len(self._nodes) - reached} registered blocks cannot be reached"


def _children(node: CachedBlock) -> Iterator[CachedBlock]:
    child = node.child
    while child is not None:
        yield child
        child = child.older
