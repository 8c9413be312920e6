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
    """A cap by the kind of step: ``alone`` tokens where nobody's next token waits for it; ``mixed`` beside one decode
    row and ``per_row`` more for each further row, up to ``alone`` (a step with more rows is longer anyway, so it bears
    more prompt tokens at the same stretch of every gap)."""

    alone: int
    mixed: int
    per_row: int = 0

    def __post_init__(self) -> None:
        if self.per_row < 0:
            raise ConfigError(f"the prefill tokens for each further decode row must be 0 or more, got {self.per_row!r}")
        for name in ("alone", "mixed"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"the cap of prefill tokens ({name}) must be 1 or more, got {value!r}")

    def prefill_tokens(self, decode_rows: int, waiting: int) -> int:
        if not decode_rows:
            return self.alone
        return max(self.mixed, min(self.mixed + self.per_row * (decode_rows - 1), self.alone))
