"""What a caller may say about how long the KV of a request should stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.retention import Retention
from firsttoken.core.service import CLASS_NAMES, ServiceClass, class_named

MAX_TTL_S = 3600.0
# How long a conversation is kept for the result of a tool whose caller does not say how long it may take.
TOOL_TTL_S = 60.0
TOOL_RESULT = "tool_result"


class CacheHint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``cache_hint`` as callers write it, not checked yet.

    ``ttl_s`` (seconds, more than 0, an hour at most): keep prompt and answer for so long after their last use.
    ``until``: "tool_result" keeps them until the next request that continues the prompt, for ``ttl_s`` at most (60 s
    where it is left out). ``priority``: "p0", "p1" or "p2", the class by which eviction scores them.
    """

    ttl_s: int | float | None = None
    priority: str | None = None
    until: str | None = None

    def retention(self) -> Retention:
        """The same, checked. Raises `InvalidRequest` that names the field."""
        ttl_s = self.ttl_s
        if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
            raise InvalidRequest(
                f"cache_hint.ttl_s must be more than 0 and at most {MAX_TTL_S:g} seconds, got {ttl_s!r:.80}",
                param="cache_hint.ttl_s",
            )
        if self.until not in (None, TOOL_RESULT):
            raise InvalidRequest(
                f"cache_hint.until must be {TOOL_RESULT!r} or left out, got {self.until!r:.80}",
                param="cache_hint.until",
            )
        once = self.until == TOOL_RESULT
        if ttl_s is None:
            ttl_s = TOOL_TTL_S if once else 0
        return Retention(round(ttl_s * NS_PER_S), self._service(), once)

    def _service(self) -> ServiceClass | None:
        if self.priority is None:
            return None
        try:
            return class_named(self.priority)
        except InvalidRequest:
            known = ", ".join(CLASS_NAMES)
            raise InvalidRequest(
                f"cache_hint.priority must be one of {known}, got {self.priority!r:.80}", param="cache_hint.priority"
            ) from None


def retention_of(hint: CacheHint | Mapping[str, Any] | None) -> Retention | None:
    """What the Python API is given. Raises `InvalidRequest` that names what is wrong, unknown keys too."""
    if hint is None:
        return None
    if isinstance(hint, CacheHint):
        return hint.retention()
    try:
        found = msgspec.convert(dict(hint), CacheHint)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise InvalidRequest(f"cache_hint is not accepted: {error}", param="cache_hint") from None
    return found.retention()
