"""What the engine tells of its KV cache, several times a second at most: running totals, but for what is in use now.

Nothing in it depends on whether other callers sent the same: who may send prompts may read it.
"""

from __future__ import annotations

import msgspec

TIERS = ("device", "host", "disk")


class PromptTokens(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens of one service class, by position: ``[i]`` counts those from `KVReport.edges`\\ ``[i]`` to before
    the next edge. Of each tier those that were found there, and those that were not found at all."""

    device: list[int]
    host: list[int]
    disk: list[int]
    missed: list[int]


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """From lower tiers to the device; the fields as in `kvcache.tiers.TierStats`."""

    restores: int
    cancelled: int
    restore_s: float
    disk_restores: int
    disk_restore_s: float
    host_tokens: int
    disk_tokens: int
    declined_tokens: int
    failed_tokens: int
    spilled_blocks: int
    unspilled_shards: int
    full_shards: int
    host_evicted_blocks: int
    host_blocks: int
    host_capacity: int
    host_kept_blocks: int


class DiskReport(msgspec.Struct, frozen=True, kw_only=True):
    """The disk tier. ``reads`` and ``writes`` are counted by how they ended (`kvcache.disk.Outcome`; writes of what was
    there already as "already_stored"), ``errors`` by the system's name (ENOSPC, EIO, ..). Rates in GB/s, None before
    the first transfer."""

    files: int
    nbytes: int
    cap_bytes: int
    kept_bytes: int
    read_only: bool
    reads: dict[str, int]
    writes: dict[str, int]
    errors: dict[str, int]
    evicted: int
    damaged: int
    read_gb_s: float | None
    write_gb_s: float | None


class KVReport(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens`` of each class, in the order of `ServiceClass`, count each prompt once, when its first token is there.
    ``misses`` counts prompts that were not found to the end, by `core.cache_miss.MissReason`.

    ``evictions[of][by]`` shards of a class made room for a request of class ``by``, ``evicted_blocks`` in all;
    ``evicted_early`` of each class before its class's time was over, ``evicted_kept`` while a caller's hint held
    (from the device where no lower tier keeps them instead, and from those).
    ``hints_kept`` were granted, ``hints_ignored`` not; ``kept_blocks`` are kept by them now. ``restores`` and ``disk``
    are None where there are no such tiers.
    """

    edges: list[int]
    tokens: list[PromptTokens]
    misses: dict[str, int]
    evictions: list[list[int]]
    evicted_blocks: int
    evicted_early: list[int]
    evicted_kept: int
    hints_kept: int
    hints_ignored: int
    kept_blocks: int
    restores: RestoreReport | None = None
    disk: DiskReport | None = None
