"""Copies between the device and what is not this machine's memory: an interface, without an implementation here.

GPUDirect Storage (`torch.cuda.gds`: device memory to a file on NVMe) and NIXL (device memory to another machine's, by
RDMA) would both stand behind it. Neither has been run by this project: it had no machine with either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from firsttoken.kvcache.copy import BlockMemory, CopyHandle


class RemoteCopies(Protocol):
    """Moves whole shards past host memory. The remote side names them by `eviction.interface.Shard.key`."""

    def register(self, pool: BlockMemory) -> None:
        """Make a pool's memory known to the transport, once and before any copy: NIXL exchanges descriptions of it,
        GPUDirect Storage pins it. Raises `OSError` when the transport is not there."""

    def read(self, key: bytes, blocks: Sequence[int]) -> CopyHandle:
        """Fill ``blocks`` of the pool, in order. `CopyHandle.wait` raises `KeyError` for a shard that is not there (any
        more) and `OSError` for one that cannot be read: the caller computes the tokens then. What a handle brought
        counts only after the caller has compared the shard's tokens."""
        ...

    def write(self, key: bytes, blocks: Sequence[int]) -> CopyHandle:
        """Keep ``blocks`` under a name. The caller leaves them unchanged until the handle is done."""
        ...

    def seconds(self, nbytes: int) -> float:
        """What a read of so many bytes would take, by what was measured."""
        ...
