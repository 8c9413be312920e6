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


Levels = tuple[tuple[int, int], ...]
"""Pairs of (waiting requests, token rows): from so many on, a step has so many. The first pair begins with 0."""


class StepTotal(msgspec.Struct, frozen=True):
    """For a device whose steps come in few sizes, and which computes some of them far better than their neighbours:
    decode rows, padded to the next of ``row_profiles``, and prompt tokens together fill a step of as many token rows
    as ``mixed`` says; prompts get at least half. The more wait, the larger: longer gaps for all who decode, but a queue
    that drains sooner. Without decode rows a step has as many tokens as ``alone`` says."""

    alone: Levels
    mixed: Levels
    row_profiles: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("alone", "mixed"):
            levels: Levels = getattr(self, name)
            if not levels or levels[0][0] != 0 or [waiting for waiting, _ in levels] != sorted({w for w, _ in levels}):
                raise ConfigError(f"the levels of {name} must begin with 0 waiting requests and rise, got {levels}")
            for _, tokens in levels:
                _check_cap(name, tokens)

    def prefill_tokens(self, decode_rows: int, waiting: int) -> int:
        if not decode_rows:
            return _level(self.alone, waiting)
        total = _level(self.mixed, waiting)
        padded = next((rows for rows in self.row_profiles if rows >= decode_rows), decode_rows)
        return max(total - padded, total // 2)

    @property
    def most(self) -> int:
        return max(tokens for levels in (self.alone, self.mixed) for _, tokens in levels)

    def limited(self, alone: int | None, mixed: int | None) -> Budget:
        if mixed is not None:
            return TokenCap(_level(self.alone, 0) if alone is None else alone, mixed)
        return self if alone is None else msgspec.structs.replace(self, alone=((0, alone),))


def _level(levels: Levels, waiting: int) -> int:
    return next(tokens for least, tokens in reversed(levels) if waiting >= least)


def _check_cap(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"the cap of prefill tokens ({name}) must be 1 or more, got {value!r}")
