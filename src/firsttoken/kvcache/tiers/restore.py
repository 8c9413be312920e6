"""From host memory and disk to the device, for one request: which blocks, and how far it has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from firsttoken.core.clock import NS_PER_S
from firsttoken.kvcache.copy import CopyEngine, CopyHandle
from firsttoken.kvcache.disk import DiskHandle
from firsttoken.kvcache.tiers.host_tier import HostTier, Lease

# Files that have not come after this many times the predicted time, and so many seconds, are not waited for, unless
# that is a small part of what computing takes.
PATIENCE, LEAST_PATIENCE_S, COMPUTING_PART = 4.0, 0.05, 0.25


class Restored(msgspec.Struct, frozen=True):
    """Tokens that came from host memory and, behind those, from disk."""

    host: int
    disk: int

    @property
    def tokens(self) -> int:
        return self.host + self.disk


@dataclass(slots=True, eq=False)
class FileRead:
    """Host blocks that are filled from a file, for ``users`` who want them."""

    key: tuple[bytes, int]
    blocks: list[int]
    handle: DiskHandle
    users: int = 0
    late: bool = False  # somebody does not wait for it any longer


@dataclass(slots=True, eq=False)
class Load:
    """A file that is read for one user: its blocks but for the first ``skip`` are the chain's from ``first`` on."""

    first: int
    read: FileRead
    skip: int = 0

    @property
    def blocks(self) -> list[int]:
        return self.read.blocks

    @property
    def handle(self) -> DiskHandle:
        return self.read.handle

    @property
    def end(self) -> int:
        return self.first + len(self.blocks) - self.skip

    def begin_at(self, block: int) -> None:
        """What is before that block is not wanted any more."""
        self.skip += block - self.first
        self.first = block


@dataclass(slots=True, eq=False)
class Restore:
    """The chain's blocks from ``first`` to before ``end`` are wanted on the device, in ``targets``: up to
    ``host_end`` from the blocks of ``lease``, and from there on from ``loads``, one after the other."""

    first: int
    host_end: int
    targets: list[int]
    lease: Lease | None
    loads: deque[Load]
    began_ns: int
    predicted_s: float
    computing_s: float  # what it would take instead
    copied: int = 0  # blocks whose copies were submitted
    failed: bool = False
    staged: list[Load] = field(default_factory=list)  # files that have been read, for their host blocks
    copies: list[CopyHandle] = field(default_factory=list)

    def advance(self, host: HostTier, engine: CopyEngine, after: Sequence[CopyHandle] = ()) -> bool:
        """Submit what can be copied, ``after`` what reads its targets yet. True when all that will come has arrived."""
        if not self.copied and self.host_end > self.first:
            assert self.lease is not None
            sources = self.lease.blocks(self.first, self.host_end)
            self._copy(engine, sources, [*after, *host.copies_to(sources)])
        while self.loads and self.loads[0].handle.done():
            load = self.loads.popleft()
            self.staged.append(load)
            self.failed = self.failed or not load.handle.ok
            if not self.failed:
                self._copy(engine, load.blocks[load.skip :], after)
        while self.copies and self.copies[0].done():
            self.copies.pop(0).wait()  # raises what went wrong
        return not self.loads and not self.copies

    def restored(self, block_tokens: int) -> Restored:
        """What has arrived, once `advance` has said so."""
        if self.lease is not None and not self.lease.tail.live:  # what it was copied from is suspect by now
            return Restored(0, 0)
        host = self.host_end - self.first
        return Restored(host * block_tokens, (self.copied - host) * block_tokens)

    def is_late(self, now_ns: int) -> bool:
        """True when files take much longer than was predicted: whoever waits should compute instead."""
        patience_s = max(PATIENCE * self.predicted_s + LEAST_PATIENCE_S, COMPUTING_PART * self.computing_s)
        return bool(self.loads) and now_ns - self.began_ns > patience_s * NS_PER_S

    def cancel(self) -> None:
        """Its device blocks are somebody else's from now on: what is computed next waits for what is under way."""
        for copy in self.copies:
            copy.gate_compute()
        self.failed = True

    def _copy(self, engine: CopyEngine, sources: Sequence[int], after: Sequence[CopyHandle]) -> None:
        # The last file may hold more than is wanted.
        pairs = list(zip(sources, self.targets[self.copied :], strict=False))
        for begin in range(0, len(pairs), engine.max_blocks):
            part = pairs[begin : begin + engine.max_blocks]
            self.copies.append(engine.submit("host", "device", part, after=after))
        self.copied += len(pairs)
