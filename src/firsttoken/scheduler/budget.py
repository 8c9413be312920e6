"""How many prompt tokens a step may compute beside its decode rows."""

from __future__ import annotations

from typing import Protocol

import msgspec

from firsttoken.core.errors import ConfigError


class Budget(Protocol):
    """Decides the prefill work of each step."""

    def prefill_tokens(self, decode_rows: int, waiting: int) -> int:
        """Prompt tokens for a step with ``decode_rows`` decode rows while ``waiting`` requests wait.

        A step without decode rows computes at least one token, whatever this says.
        """


class TokenCap(msgspec.Struct, frozen=True):
    """A cap by the kind of step: ``alone`` tokens where nobody's next token waits for it; beside decode rows ``mixed``
    and more, up to ``alone``: ``per_row`` for each row after the first (a step with more rows is longer anyway, so it
    bears more prompt tokens at the same stretch of every gap) and ``per_waiting`` for each request that waits (in a
    burst many first tokens are late, and a larger chunk costs less for each of its tokens)."""

    alone: int
    mixed: int
    per_row: int = 0
    per_waiting: int = 0

    def __post_init__(self) -> None:
        for name, what in (("per_row", "further decode row"), ("per_waiting", "waiting request")):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"the prefill tokens for each {what} must be 0 or more, got {value!r}")
        for name in ("alone", "mixed"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"the cap of prefill tokens ({name}) must be 1 or more, got {value!r}")

    def prefill_tokens(self, decode_rows: int, waiting: int) -> int:
        if not decode_rows:
            return self.alone
        more = self.per_row * (decode_rows - 1) + self.per_waiting * waiting
        return max(self.mixed, min(self.mixed + more, self.alone))
