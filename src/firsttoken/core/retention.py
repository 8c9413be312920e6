"""A caller's wish that the KV of a request should stay, as the engine gets it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """What the request used is kept for ``ttl_ns`` after its last use (0: no
    wish), with ``once`` only until a request goes on behind its prompt. Policies score it by the class ``service``,
    None for the request's own."""

    ttl_ns: int = 0
    service: int | None = None
    once: bool = False


class NotKept(StrEnum):
    """Why a wish was not granted: nothing is ever cached, nothing of this prompt is (less than a block), the quota of
    the device has no room and no tier below it is on, or none of the tiers has."""

    CACHING_OFF = "caching_off"
    TOO_SHORT = "too_short"
    QUOTA = "quota"
    ALL_QUOTAS = "quotas_of_all_tiers"
