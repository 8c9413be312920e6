"""What copies take, learned from those that were measured: a fixed cost, and a bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

# Of each new copy all older ones lose so much weight: about the last 64 count.
_FORGET = 1 / 64
# Below this part of their mean square, sizes vary too little to tell a fixed cost from the bytes'.
_LEAST_SPREAD = 0.05


@dataclass(frozen=True, slots=True)
class CopyCost:
    """A copy of n bytes takes ``fixed_s + n * s_per_byte`` seconds."""

    fixed_s: float
    s_per_byte: float

    def seconds(self, nbytes: int) -> float:
        return self.fixed_s + nbytes * self.s_per_byte if nbytes else 0.0


class CopyMeter:
    """Least squares of *relative* errors, forgetting exponentially: a copy that is off by a tenth counts alike,
    whatever its size. Begins at ``prior``, whose fixed cost is kept until sizes differ. Errors are relative to the
    prior's time for that size: to the measured one, a link that has become slower would weigh little, and be noticed
    late.

    One thread observes; any may read `cost`, which is replaced as a whole.
    """

    def __init__(self, prior: CopyCost) -> None:
        self._prior = prior
        self._sums = _Sums()
        self.cost = prior
        self.observed = 0

    def observe(self, nbytes: int, seconds: float) -> None:
        """A copy of ``nbytes`` took ``seconds``. What is empty or took no time by its clock teaches nothing."""
        if nbytes <= 0 or seconds <= 0:
            return
        self._sums.add(float(nbytes), seconds, 1 / self._prior.seconds(nbytes) ** 2)
        self.observed += 1
        self.cost = self._sums.line(self.cost.fixed_s)


class _Sums:
    """Weighted sums over the copies: of 1, of n (bytes), n^2, t (seconds) and n * t."""

    __slots__ = ("n", "nn", "nt", "one", "t")

    def __init__(self) -> None:
        self.one = self.n = self.nn = self.t = self.nt = 0.0

    def add(self, n: float, t: float, weight: float) -> None:
        kept = 1 - _FORGET
        self.one = kept * self.one + weight
        self.n = kept * self.n + weight * n
        self.nn = kept * self.nn + weight * n * n
        self.t = kept * self.t + weight * t
        self.nt = kept * self.nt + weight * n * t

    def line(self, known_fixed_s: float) -> CopyCost:
        """The best line without negative costs; with the known fixed cost while sizes do not tell it."""
        spread = self.one * self.nn - self.n**2
        if spread < _LEAST_SPREAD * self.one * self.nn:
            fixed = known_fixed_s
        else:
            fixed = max(0.0, (self.t * self.nn - self.n * self.nt) / spread)
        slope = (self.nt - fixed * self.n) / self.nn
        # Where the fixed cost explains more than all, the bytes' is told alone.
        return CopyCost(fixed, slope) if slope > 0 else CopyCost(0.0, self.nt / self.nn)
