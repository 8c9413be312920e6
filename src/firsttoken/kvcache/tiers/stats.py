"""What the tiers below the device have done."""

from __future__ import annotations

import msgspec


class TierStats(msgspec.Struct, kw_only=True):
    """Running totals. ``spilled_blocks`` were copied from the device to host memory, ``unspilled_shards`` were evicted
    from the device before that, and ``full_shards`` found no room there. ``host_evicted_blocks`` made room for others.
    ``restores`` began, of which ``cancelled`` were given up with their requests, and ``late`` no longer waited for
    files. Of prompts ``host_tokens`` and ``disk_tokens`` were restored from there, in ``restore_s`` seconds from the
    request's start to the last block; ``disk_restores`` of them waited for files, ``disk_restore_s`` in all.
    ``declined_tokens`` could have been and were sooner computed; ``failed_tokens`` were asked of files that did not
    give them. ``host_blocks`` of ``host_capacity`` are in use now, and
    ``host_kept_blocks`` are kept because callers asked for it. ``lost_kept_shards`` were, and had to go all the same.
    """

    spilled_blocks: int = 0
    unspilled_shards: int = 0
    full_shards: int = 0
    host_evicted_blocks: int = 0
    restores: int = 0
    cancelled: int = 0
    late: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    restore_s: float = 0.0
    disk_restores: int = 0
    disk_restore_s: float = 0.0
    declined_tokens: int = 0
    failed_tokens: int = 0
    host_blocks: int = 0
    host_capacity: int = 0
    host_kept_blocks: int = 0
    lost_kept_shards: int = 0
