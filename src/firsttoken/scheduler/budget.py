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
        ...

    @property
    def most(self) -> int:
        """No step gets more prompt tokens than this."""
        ...

    def limited(self, alone: int | None, mixed: int | None) -> Budget:
        """The same with the caller's own caps: ``alone`` of a step without decode rows, ``mixed`` of one with some,
        which is then kept as it is. Raises `ConfigError` for caps below 1."""
        ...


class TokenCap(msgspec.Struct, frozen=True):
    """A cap by the kind of step: ``alone`` tokens where nobody's next token waits for it; beside decode rows ``mixed``
    and more, up to ``alone``: ``per_row`` for each row after the first (a step with more rows is longer anyway, so it
    bears more prompt tokens at the same stretch of every gap)."""

    alone: int
    mixed: int
    per_row: int = 0

    def __post_init__(self) -> None:
        if self.per_row < 0:
            raise ConfigError(f"the prefill tokens for each further decode row must be 0 or more, got {self.per_row!r}")
        for name in ("alone", "mixed"):
            _check_cap(name, getattr(self, name))

    def prefill_tokens(self, decode_rows: int, waiting: int) -> int:
        if not decode_rows:
            return self.alone
        return max(self.mixed, min(self.mixed + self.per_row * (decode_rows - 1), self.alone))

    @property
    def most(self) -> int:
        return max(self.alone, self.mixed)

    def limited(self, alone: int | None, mixed: int | None) -> TokenCap:
        alone = self.alone if alone is None else alone
        return TokenCap(alone, self.mixed, self.per_row) if mixed is None else TokenCap(alone, mixed)


class StepTotal(msgspec.Struct, frozen=True):
    """For a device whose steps come in few sizes, and which computes some of them far better than their neighbours:
    decode rows, padded to the next of ``row_profiles``, and prompt tokens fill a step of ``mixed`` token rows, or of
    ``crowded`` ones while more than one request waits (a longer gap for all who decode, but a queue that drains
    sooner). Prompts get at least half. Without decode rows a step has ``alone`` tokens."""

    alone: int
    mixed: int
    crowded: int
    row_profiles: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("alone", "mixed", "crowded"):
            _check_cap(name, getattr(self, name))

    def prefill_tokens(self, decode_rows: int, waiting: int) -> int:
        if not decode_rows:
            return self.alone
        total = self.crowded if waiting > 1 else self.mixed
        padded = next((rows for rows in self.row_profiles if rows >= decode_rows), decode_rows)
        return max(total - padded, total // 2)

    @property
    def most(self) -> int:
        return max(self.alone, self.mixed, self.crowded)

    def limited(self, alone: int | None, mixed: int | None) -> Budget:
        alone = self.alone if alone is None else alone
        return msgspec.structs.replace(self, alone=alone) if mixed is None else TokenCap(alone, mixed)


def _check_cap(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"the cap of prefill tokens ({name}) must be 1 or more, got {value!r}")
