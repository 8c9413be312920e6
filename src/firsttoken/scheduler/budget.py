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
    """A fixed cap: ``alone`` tokens in a step that nobody's next token waits for, ``mixed`` beside decode rows."""

    alone: int
    mixed: int

    def __post_init__(self) -> None:
        for name in ("alone", "mixed"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"the cap of prefill tokens ({name}) must be 1 or more, got {value!r}")

    def prefill_tokens(self, decode_rows: int, waiting: int) -> int:
        return self.mixed if decode_rows else self.alone
