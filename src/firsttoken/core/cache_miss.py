"""Why a request's prompt was not found in the KV cache beyond some position."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from firsttoken.core.service import ServiceClass


class MissReason(StrEnum):
    """What a caller may be told. Nothing here depends on what other salts' callers have sent."""

    NEVER_SEEN = "never_seen"  # nobody has sent it, or so long ago that it is not remembered
    EVICTED = "evicted"  # it was there, and had to make room
    ALL_POSITIONS = "all_positions"  # the request wants something of every position, which the cache does not hold
    DIVERGED = "diverged"  # what is cached goes on with other tokens from ``position`` on


class Miss(msgspec.Struct, frozen=True):
    """``position`` is that of the first token that was not found. ``age_s`` and ``by`` are for `EVICTED`: how many
    seconds ago, and the class of the request that took the room."""

    position: int
    reason: MissReason
    age_s: float = 0.0
    by: ServiceClass | None = None
