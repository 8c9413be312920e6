"""How many prompt tokens a step may compute beside its decode rows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

import msgspec

from firsttoken.core.errors import ConfigError
from firsttoken.core.step_sizes import StepSizes, next_size
from firsttoken.scheduler.step_time import StepLoad, StepTime

EXPLORE_EVERY = 512
# Where there are no sizes, this part of what was predicted to fit is added.
EXPLORE_PART = 4
# Token rows of a step where there are no sizes are a multiple of this, but for the shortest and the longest: libraries
# prepare each number of rows anew, and keep what they prepared.
GRAIN = 8
CROWD = 16
ONE_ROW = StepLoad(1, 1, 0, 0)


class Budget(Protocol):
    """Decides the prefill work of each step."""

    def prefill_tokens(self, load: StepLoad, waiting: int, gap_ms: float | None = None) -> int:
        """Prompt tokens for a step while ``waiting`` requests wait, and ``gap_ms`` is what the strictest of those who
        decode were promised for their next token, None when nothing was.

        ``load`` is the step as far as it is known: its decode rows, no chunks yet, and as ``prefill_reach`` how many
        tokens the running prefill that is furthest along has behind it, which its next chunk attends to. A step
        without decode rows computes at least one token, whatever this says.
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

    def prefill_tokens(self, load: StepLoad, waiting: int, gap_ms: float | None = None) -> int:
        if not load.decode_rows:
            return self.alone
        return max(self.mixed, min(self.mixed + self.per_row * (load.decode_rows - 1), self.alone))

    @property
    def most(self) -> int:
        return max(self.alone, self.mixed)

    def limited(self, alone: int | None, mixed: int | None) -> TokenCap:
        alone = self.alone if alone is None else alone
        return TokenCap(alone, self.mixed, self.per_row) if mixed is None else TokenCap(alone, mixed)


Levels = tuple[tuple[int, int], ...]
"""Pairs of (waiting requests, token rows): from so many on, a step has so many. The first pair begins with 0."""


class TimeBudget(msgspec.Struct):
    """As many prompt tokens beside decode rows as keep the step, by ``time``, within what those who decode are promised
    for their next token. Without a promise a step may take ``stretch`` times as long as its decode rows would alone,
    but add no more than ``added`` times what a step of a single row takes: the more rows, the less each is to be
    stretched. It may take ``crowded`` times as long while at least `CROWD` requests wait, and more than decode: longer
    gaps for those few, and a queue that drains sooner for all others.
    Of the ``sizes`` that the device pads to and that fit, the one is filled that computes most tokens in a
    millisecond: mostly the largest.

    A size with room for ``least`` tokens is always filled, though the gap be longer then: a prompt goes on whatever
    decodes, and a step whose decode rows alone take all the time is hardly longer for so few. Without decode rows a
    step has as many tokens as ``alone`` says, and beside some never more.

    All tokens are taken to attend to as many as the prefill furthest along does, which others do not reach; what a
    request admitted in this very step finds in the prefix cache is not known yet.

    One step in `EXPLORE_EVERY` is given the next size, whatever it is predicted to take: a model that has come to
    think too much of large steps would never see one again. So few do not show at the 99th percentile of gaps.
    """

    time: StepTime
    stretch: float
    added: float
    crowded: float
    alone: Levels
    sizes: StepSizes
    least: int = 32
    answered: int = 0

    def __post_init__(self) -> None:
        _check_levels("alone", self.alone)
        _check_cap("least", self.least)
        if not 1 < self.stretch <= self.crowded:
            raise ConfigError(
                "a step with prompts takes more than its decode rows alone, and in a crowd no less: stretch "
                f"{self.stretch}, crowded {self.crowded}"
            )
        if not self.added > 0:
            raise ConfigError(f"prompts must be allowed to add some time to a step, got {self.added!r}")

    def prefill_tokens(self, load: StepLoad, waiting: int, gap_ms: float | None = None) -> int:
        if not load.decode_rows:
            return _level(self.alone, waiting)
        if gap_ms is None:
            gap_ms = self._usual_gap(load, waiting)
        padded = next_size(self.sizes.mixed_rows, load.decode_rows)
        most = _level(self.alone, waiting)
        self.answered += 1
        explore = self.answered % EXPLORE_EVERY == 0
        if self.sizes.mixed_totals:
            return min(max(self._sized(load, padded, gap_ms, most, explore), self.least), most)
        # Any number of tokens: `least` is taken unasked, so the search begins behind it.
        tokens = bisect_right(range(most), gap_ms, lo=min(self.least, most), key=lambda more: self._ms(load, more + 1))
        tokens += (tokens // EXPLORE_PART + GRAIN) * explore
        return most if tokens >= most else max(tokens - (padded + tokens) % GRAIN, min(self.least, most))

    def _usual_gap(self, load: StepLoad, waiting: int) -> float:
        alone = self.time.ms(load._replace(prefill_reach=0))
        if waiting >= max(CROWD, load.decode_rows + 1):
            return self.crowded * alone
        return min(self.stretch * alone, alone + self.added * self.time.ms(ONE_ROW))

    def _sized(self, load: StepLoad, padded: int, gap_ms: float, most: int, explore: bool) -> int:
        """The tokens of a size, up to ``most``: of those that fit, of the one that computes most in a millisecond."""
        totals = self.sizes.mixed_totals
        best = first = min(bisect_left(totals, padded + self.least), len(totals) - 1)
        rate = 0.0
        for place in range(first, len(totals)):
            tokens = totals[place] - padded
            if place > first and tokens > most:
                break  # part of it would be padding
            ms = self._ms(load, tokens)
            if place > first and ms > gap_ms:
                break
            if tokens / ms > rate:
                best, rate = place, tokens / ms
        return totals[min(best + explore, len(totals) - 1)] - padded

    def _ms(self, load: StepLoad, tokens: int) -> float:
        return self.time.ms(load.with_chunk(load.prefill_reach, tokens))

    @property
    def most(self) -> int:
        return max(tokens for _, tokens in self.alone)

    def stretched(self, by: float) -> TimeBudget:
        """The same for weights with which decode rows take less time and prompts do not, so that gaps beside prompts
        last what they would last without."""
        return msgspec.structs.replace(
            self, stretch=self.stretch * by, added=self.added * by, crowded=self.crowded * by
        )

    def limited(self, alone: int | None, mixed: int | None) -> Budget:
        if mixed is not None:
            return TokenCap(_level(self.alone, 0) if alone is None else alone, mixed)
        return self if alone is None else msgspec.structs.replace(self, alone=((0, alone),))


def _level(levels: Levels, waiting: int) -> int:
    return next(tokens for least, tokens in reversed(levels) if waiting >= least)


def _check_levels(name: str, levels: Levels) -> None:
    if not levels or levels[0][0] != 0 or [waiting for waiting, _ in levels] != sorted({w for w, _ in levels}):
        raise ConfigError(f"the levels of {name} must begin with 0 waiting requests and rise, got {levels}")
    for _, tokens in levels:
        _check_cap(name, tokens)


def _check_cap(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"the cap of prefill tokens ({name}) must be 1 or more, got {value!r}")
