"""What the KV cache counts."""

from __future__ import annotations

import msgspec


class KVStats(msgspec.Struct, frozen=True):
    """Counts of blocks (``total = used + cached + free``), and running totals.

    ``evictions`` counts blocks, ``evicted_shards`` shards. Of the tokens of all admissions, those of preempted requests
    that come again included, ``hit_tokens`` were found and ``missed_tokens`` were not. The prompts (counted once) that
    were not found to the end are told by reason: ``never_seen``, ``evicted``, ``diverged``, or ``all_positions``, where
    nothing was looked for. ``other_salt`` of the first are known under another salt, which whoever may send prompts
    must not be told. ``kept`` blocks are kept because callers asked for it: ``held_wishes`` of requests were granted
    and ``ignored_wishes`` were not.
    """

    total: int
    used: int
    cached: int
    free: int
    evictions: int
    hit_tokens: int
    evicted_shards: int
    missed_tokens: int
    never_seen: int
    evicted: int
    diverged: int
    all_positions: int
    other_salt: int
    kept: int
    held_wishes: int
    ignored_wishes: int


class EvictionCounts(msgspec.Struct, frozen=True):
    """``shards[of][by]`` of a class went for the sake of a request of class ``by``. ``early`` of each class went before
    their class's time was over, and ``kept`` of all while a caller's wish held."""

    shards: list[list[int]]
    early: list[int]
    kept: int
