"""The interface of the copy engine: moving KV blocks between pools (device, host) without knowing what they are.

A *pool* is a named store of equal blocks, each one contiguous slab of bytes: what is in them is nobody's business here.
Copies are ordered in two ways only: a copy starts after all work that was given to the device's compute queue before
`CopyEngine.submit` (unless ``beside_compute``), and after the copies named in ``after``; compute waits for a copy only
when `CopyHandle.gate_compute` says so. Two copies are not ordered with each other otherwise.

So a block is used again safely when either its next user's copy names this one in ``after``, or compute is gated, or
the handle is done. Nothing of this makes the host wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from firsttoken.core.clock import NS_PER_S

# A submit of more would hold what is behind it for more than about a millisecond on a PCIe 5 link.
MAX_SUBMIT_BYTES = 64 << 20


class Moved:
    """What was seen to arrive from one pool in another since the start: ``nbytes``, for which its stream took ``ns`` by
    the device's clock (within host memory the copying thread, by the host's). One thread adds, any may read."""

    __slots__ = ("nbytes", "ns")

    def __init__(self) -> None:
        self.nbytes = 0
        self.ns = 0

    def add(self, nbytes: int, seconds: float) -> None:
        self.nbytes += nbytes
        self.ns += round(seconds * NS_PER_S)


class CopyHandle(Protocol):
    """One submitted copy, or a point in the compute queue (`CopyEngine.mark`)."""

    def done(self) -> bool:
        """True when all blocks have arrived. Never blocks."""

    def wait(self) -> None:
        """Block the calling thread until all blocks have arrived. Raises what the copy raised."""

    def gate_compute(self) -> None:
        """Make compute work that is submitted from now on start after this copy. Does not block the caller."""


class CopyEngine(Protocol):
    """Copies whole blocks between and within pools. All calls come from one thread, the one that submits steps."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def max_blocks(self) -> int:
        """The most blocks of one submit: what is larger is cut (`cut`), so that others come in between."""
        ...

    def num_blocks(self, pool: str) -> int:
        """Blocks of a pool that can be used now. Raises `KeyError` when there is no pool of that name."""

    def mark(self) -> CopyHandle:
        """A handle that is done when all compute work submitted so far is."""
        ...

    def submit(
        self,
        source: str,
        target: str,
        pairs: Sequence[tuple[int, int]],
        *,
        after: Sequence[CopyHandle] = (),
        beside_compute: bool = False,
    ) -> CopyHandle:
        """Copy block ``a`` of pool ``source`` to block ``b`` of pool ``target`` for each ``(a, b)`` of ``pairs``.

        The caller keeps the sources unchanged and the targets unused until the handle is done or gates what follows.
        With ``beside_compute`` the copy need not wait for steps in flight: the caller knows that those which touch
        these blocks are done, or names a `mark` behind them in ``after``. A restore into blocks that were free for a
        while starts a step or two sooner so.
        Raises `KeyError` for an unknown pool, `RuntimeError` after `close`, and `ValueError` when there are more than
        `max_blocks` pairs, a block is outside its pool, a target is named twice, or a block is both source and target
        (the outcome would depend on the order).
        """

    def pending_bytes(self, source: str, target: str) -> int:
        """Bytes that were submitted in this direction and have not been seen to arrive."""
        ...

    def seconds(self, source: str, target: str, blocks: int) -> float:
        """In how many seconds blocks that are submitted now will have arrived, by what was measured: behind all that
        is pending in this direction. Steps that the copy must wait for are not in it."""
        ...

    def gigabytes_per_s(self, source: str, target: str) -> float:
        """The bandwidth that `seconds` reckons with, fixed costs apart (1 GB = 10^9 bytes)."""
        ...

    def moved(self, source: str, target: str) -> Moved:
        """The running total of this direction, always the same object. A copy is counted when somebody sees that it
        has arrived: a step late, and without waiting for it. Raises `KeyError` for an unknown pool."""
        ...

    def close(self) -> None:
        """Wait for what was submitted. Memory of the pools may be given back only afterwards. Idempotent."""
        ...


class BlockMemory(Protocol):
    """Where a pool's blocks lie: block ``i`` begins at ``address + i * stride``."""

    @property
    def address(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        """How many can be used now; grows, never shrinks."""
        ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def stride(self) -> int:
        """Bytes from a block to the next, at least ``block_bytes``."""
        ...

    @property
    def segment_blocks(self) -> int:
        """No copy in one piece crosses a multiple of so many blocks: memory is pinned in pieces of that size."""
        ...

    @property
    def on_device(self) -> bool: ...


class Piece(NamedTuple):
    """``nbytes`` from one address to another."""

    source: int
    target: int
    nbytes: int


def check_pairs(pairs: Sequence[tuple[int, int]], num_source: int, num_target: int, *, same_pool: bool) -> None:
    """Raise `ValueError` as `CopyEngine.submit` promises."""
    for source, target in pairs:
        if not 0 <= source < num_source:
            raise ValueError(f"source block {source} is outside its pool of {num_source} blocks")
        if not 0 <= target < num_target:
            raise ValueError(f"target block {target} is outside its pool of {num_target} blocks")
    targets = {target for _, target in pairs}
    if len(targets) != len(pairs):
        raise ValueError(f"a target block is named twice in {list(pairs)}; give each its own copy")
    if same_pool and any(source in targets for source, _ in pairs):
        raise ValueError(f"a block is both source and target in {list(pairs)}; use two copies, one after the other")


def runs(
    pairs: Sequence[tuple[int, int]], source_segment: int = 0, target_segment: int = 0
) -> list[tuple[int, int, int]]:
    """Join neighbours: ``(source, target, count)`` of the longest runs that advance in both pools, in order, and begin
    anew at multiples of a segment (in blocks; 0 for none).

    A shard's blocks often lie side by side, and one large copy is much cheaper than many small ones.
    """
    joined: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if joined and not (_begins(source, source_segment) or _begins(target, target_segment)):
            first_source, first_target, count = joined[-1]
            if (source, target) == (first_source + count, first_target + count):
                joined[-1] = (first_source, first_target, count + 1)
                continue
        joined.append((source, target, 1))
    return joined


def _begins(block: int, segment: int) -> bool:
    return segment > 0 and block % segment == 0


def pieces(pairs: Sequence[tuple[int, int]], source: BlockMemory, target: BlockMemory) -> list[Piece]:
    """The fewest copies of plain bytes that move ``pairs``."""
    nbytes, here, there = source.block_bytes, source.address, target.address
    if source.stride != nbytes or target.stride != nbytes:  # a gap follows each block, in one of the two
        found = [(a, b, 1) for a, b in pairs]
    else:
        found = runs(pairs, source.segment_blocks, target.segment_blocks)
    step, other_step = source.stride, target.stride
    return [Piece(here + a * step, there + b * other_step, count * nbytes) for a, b, count in found]


def cut(pairs: Sequence[tuple[int, int]], most: int) -> list[Sequence[tuple[int, int]]]:
    """Parts of at most ``most`` pairs, in order, for one submit each."""
    return [pairs[first : first + most] for first in range(0, len(pairs), most)]
