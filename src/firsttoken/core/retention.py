"""A caller's wish that the KV of a request should stay, as the engine gets it."""

from __future__ import annotations

import msgspec


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """What the request used is kept for ``ttl_ns`` after its last use (0: no
    wish), with ``once`` only until a request goes on behind its prompt. Policies score it by the class ``service``,
    None for the request's own."""

    ttl_ns: int = 0
    service: int | None = None
    once: bool = False
