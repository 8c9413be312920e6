"""Stateless random numbers: a draw is a function of (seed, position) and of nothing else.

No generator object is kept anywhere, so a draw cannot depend on the row a request sits in, on its neighbours, on
preemption or on the process; and it can be repeated by anyone who knows the seed.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014, with the constants of Stafford's variant 13): a bijection of 64-bit words. The draws of one
seed are SplitMix64's own sequence, started at a scrambled seed. Not for secrets.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
_CHILD = 0xD1342543DE82EF95  # odd, unrelated to _GAMMA: children and draws never share a sequence
_UNIT = 2.0**-53


def mix64(word: int) -> int:
    """A bijective scramble of a word of 64 bits; other bits are ignored."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def random_word(seed: int, position: int) -> int:
    """64 random bits for ``position`` (>= 0) under ``seed`` (any int; taken modulo 2**64)."""
    return mix64(mix64(seed ^ _GAMMA) + (position + 1) * _GAMMA)


def uniform(seed: int, position: int) -> float:
    """A float64 uniform in [0, 1), a multiple of 2**-53: the one draw that chooses the token at ``position``."""
    return (random_word(seed, position) >> 11) * _UNIT


def derive_seed(seed: int, index: int) -> int:
    """The seed of the ``index``-th (>= 0) of a request's ``n`` answers, in [0, 2**63).

    Distinct for distinct indices of one seed up to chance (2**-63), and answer 0 of ``n`` equals the only answer of
    ``n=1`` under the same seed. Raises ValueError for a negative index.
    """
    if index < 0:
        raise ValueError(f"index of an answer must be 0 or more, got {index}")
    return mix64(mix64(seed) + index * _CHILD) >> 1
