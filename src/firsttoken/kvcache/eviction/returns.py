"""When shards come back: rates by kind and age, learned from uses, and what holding a shard is worth by them.

A shard used at some time comes back at a rate (of returns a second) that depends on its *age*, the time since that
use, and on its kind. Conversations come back at the pace of people: hardly ever at once, mostly after a minute, hardly
ever after ten. So neither the youngest nor the oldest shard is the best one to hold.

What holding one is worth is its *index*: the best ratio, over all times until which it might be held, of the chance
that it comes back by then to the time that it is expected to take a place (J. Gittins, "Bandit processes and dynamic
allocation indices", 1979; per byte and learned from hits, as in N. Beckmann et al., "LHD: Improving cache hit rate by
maximizing hit density", NSDI 2018). Unlike the rate itself it sees a return that is still ahead.
"""

from __future__ import annotations

from bisect import bisect_right
from math import exp

from firsttoken.core.clock import NS_PER_S

# Ages at which bins begin, in s. The last bin has no end: what is so old is not expected any more.
EDGES_S = (0, 5, 10, 15, 20, 30, 40, 50, 60, 75, 90, 105, 120, 150, 180, 240, 300, 400, 500, 600, 800, 1000, 1400, 2000)
BINS = len(EDGES_S)
EDGES_NS = tuple(edge * NS_PER_S for edge in EDGES_S)
_LAST_END_S = 3000
_WIDTHS_S = tuple(float(end - begin) for begin, end in zip(EDGES_S, (*EDGES_S[1:], _LAST_END_S), strict=True))
# Before anything is known: older is less likely, as LRU has it.
_PRIOR_RATES = tuple(0.3 / (60 + begin + width / 2) for begin, width in zip(EDGES_S, _WIDTHS_S, strict=True))
# How many returns a belief counts for: all kinds' in a bin, a kind's in a bin, and a kind's level.
_PRIOR_RETURNS, _POOL_RETURNS, _LEVEL_RETURNS = 50.0, 5.0, 20.0
_REFRESH_NS = 10 * NS_PER_S
# Weights grow with time, so that old counts need not be made smaller; above this exponent all are.
_MAX_EXPONENT = 200.0


def bin_of(age_ns: int) -> int:
    """The bin of an age; that of 0 for one below."""
    return max(0, bisect_right(EDGES_NS, age_ns) - 1)


class Rates:
    """Returns, and seconds under watch, by bin of age."""

    __slots__ = ("index", "learned_ns", "returns", "seconds")

    def __init__(self) -> None:
        self.returns = [0.0] * BINS
        self.seconds = [0.0] * BINS
        self.index: list[float] = []
        self.learned_ns = 0


class ReturnTimes:
    """Learns from what is entered; a count is worth 1/e after ``memory_s``. ``kinds``: expected level of each, 1 for
    the common rate; kinds with few returns are thought to follow the rates of all, times their own level."""

    def __init__(self, levels: tuple[float, ...], memory_s: float) -> None:
        self._levels = levels
        self._kinds = [Rates() for _ in levels]
        self._all = Rates()
        self._memory_ns = memory_s * NS_PER_S
        self._began_ns = 0

    def weight(self, now_ns: int) -> float:
        """What a count of now is worth beside others."""
        exponent = (now_ns - self._began_ns) / self._memory_ns
        if exponent > _MAX_EXPONENT:
            self._began_ns = now_ns
            for rates in (*self._kinds, self._all):
                rates.returns = [count * exp(-exponent) for count in rates.returns]
                rates.seconds = [count * exp(-exponent) for count in rates.seconds]
            return 1.0
        return exp(exponent)

    def enters(self, kind: int, age_bin: int, count: int, weight: float) -> None:
        """``count`` shards are watched through a whole bin."""
        if age_bin < BINS - 1:
            seconds = count * weight * _WIDTHS_S[age_bin]
            self._kinds[kind].seconds[age_bin] += seconds
            self._all.seconds[age_bin] += seconds

    def leaves(self, kind: int, age_bin: int, age_ns: int, weight: float) -> None:
        """One of them is not watched any more since ``age_ns``, which takes back the rest of the bin."""
        if age_bin < BINS - 1:
            rest = weight * min(_WIDTHS_S[age_bin], max(0.0, (EDGES_NS[age_bin + 1] - age_ns) / NS_PER_S))
            self._kinds[kind].seconds[age_bin] -= rest
            self._all.seconds[age_bin] -= rest

    def returned(self, kind: int, age_bin: int, weight: float) -> None:
        """One was used again."""
        if age_bin < BINS - 1:
            self._kinds[kind].returns[age_bin] += weight
            self._all.returns[age_bin] += weight

    def index(self, kind: int, age_bin: int, now_ns: int) -> float:
        """Returns a second for which a shard of that kind and age is worth holding. Learns at most every 10 s."""
        rates = self._kinds[kind]
        if not rates.index or now_ns - rates.learned_ns >= _REFRESH_NS:
            self._learn(rates, self._levels[kind], now_ns)
        return rates.index[age_bin]

    def _learn(self, rates: Rates, level: float, now_ns: int) -> None:
        weight = self.weight(now_ns)
        common = self._common(weight)
        belief = _LEVEL_RETURNS * weight
        expected = sum(max(0.0, seconds) * rate for seconds, rate in zip(rates.seconds, common, strict=True))
        level = (sum(rates.returns) + belief * level) / (expected + belief)
        belief = _POOL_RETURNS * weight
        rates.index = gittins_index(
            [
                (returns + belief) / (max(0.0, seconds) + belief / (level * rate))
                for returns, seconds, rate in zip(rates.returns, rates.seconds, common, strict=True)
            ]
        )
        rates.learned_ns = now_ns

    def _common(self, weight: float) -> list[float]:
        belief = _PRIOR_RETURNS * weight
        return [
            (returns + belief) / (max(0.0, seconds) + belief / rate)
            for returns, seconds, rate in zip(self._all.returns, self._all.seconds, _PRIOR_RATES, strict=True)
        ]


def gittins_index(rates: list[float]) -> list[float]:
    """For each bin of age, the best ratio of the chance to return to the time held (per s), over the ends of bins."""
    stays = [exp(-rate * width) for rate, width in zip(rates, _WIDTHS_S, strict=True)]
    index: list[float] = []
    for first in range(BINS):
        survival, chance, held, best = 1.0, 0.0, 0.0, 0.0
        for age_bin in range(first, BINS):
            returns = survival * (1 - stays[age_bin])
            chance += returns
            held += returns / rates[age_bin]
            survival *= stays[age_bin]
            best = max(best, chance / held)
        index.append(best)
    return index
