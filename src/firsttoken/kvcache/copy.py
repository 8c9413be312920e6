"""The interface of the copy engine: moving KV blocks between pools (device, host) without knowing what they are.

A *pool* is a named store of equal blocks, each one contiguous slab. Copies are ordered in two ways only: a copy
starts after all work that was given to the device's compute queue before `CopyEngine.submit`, and after the copies
named in ``after``; compute waits for a copy only when `CopyHandle.gate_compute` says so. Two copies are not ordered
with each other otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class CopyHandle(Protocol):
    """One submitted copy."""

    def done(self) -> bool:
        """True when all blocks have arrived. Never blocks."""

    def wait(self) -> None:
        """Block the calling thread until all blocks have arrived."""

    def gate_compute(self) -> None:
        """Make compute work that is submitted from now on start after this copy. Does not block the caller."""


class CopyEngine(Protocol):
    """Copies whole blocks between and within pools."""

    def num_blocks(self, pool: str) -> int:
        """Size of a pool. Raises `KeyError` when there is no pool of that name."""

    def submit(
        self, source: str, target: str, pairs: Sequence[tuple[int, int]], *, after: Sequence[CopyHandle] = ()
    ) -> CopyHandle:
        """Copy block ``a`` of pool ``source`` to block ``b`` of pool ``target`` for each ``(a, b)`` of ``pairs``.

        The caller keeps the sources unchanged and the targets unused until the handle is done or gates what follows.
        Raises `KeyError` for an unknown pool, and `ValueError` when a block is outside its pool, a target is named
        twice, or a block is both source and target (the outcome would depend on the order).
        """


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


def runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbours: ``(source, target, count)`` of the longest runs that advance in both pools, in order.

    A shard's blocks often lie side by side, and one large copy is much cheaper than many small ones.
    """
    joined: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if joined:
            first_source, first_target, count = joined[-1]
            if (source, target) == (first_source + count, first_target + count):
                joined[-1] = (first_source, first_target, count + 1)
                continue
        joined.append((source, target, 1))
    return joined
