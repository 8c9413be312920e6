"""How near one model's predictions are to another's: what rounding weights or KV changed, in three figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

# Of what others count as no probability at all, a sum of logarithms can still hold many.
LEAST_LOGPROB = -100.0


class Guess(msgspec.Struct, frozen=True, array_like=True):
    """What a model thought of one position: the log-probability of the token that follows, and its likeliest tokens
    with theirs, the best first."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...]


class SelfCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How near a started engine is to the reference in its model's folder, over ``tokens`` positions; see `compare`."""

    tokens: int
    top1_agreement: float
    kl: float
    perplexity: float
    reference_perplexity: float


def compare(guessed: Sequence[Guess], reference: Sequence[Guess]) -> dict[str, float]:
    """``top1_agreement``: the share of positions with the same likeliest token. ``kl``: the mean divergence from the
    reference, in nats, over its likeliest tokens and all others as one; a token that is not among the other's
    likeliest counts as likely as the last of these, so it is a lower bound."""
    same = sum(a.likeliest[0][0] == b.likeliest[0][0] for a, b in zip(guessed, reference, strict=True))
    divergence = math.fsum(_divergence(b, a) for a, b in zip(guessed, reference, strict=True))
    return {"top1_agreement": same / len(guessed), "kl": divergence / len(guessed)}


def perplexity(guessed: Sequence[Guess]) -> float:
    return math.exp(-math.fsum(guess.logprob for guess in guessed) / len(guessed))


def _divergence(reference: Guess, other: Guess) -> float:
    """Of two distributions known at the likeliest tokens of each."""
    theirs = dict(other.likeliest)
    least = other.likeliest[-1][1]
    total = left = left_theirs = 0.0
    for token, logprob in reference.likeliest:
        log_q = theirs.get(token, least)
        total += math.exp(logprob) * (logprob - log_q)
        left += math.exp(logprob)
        left_theirs += math.exp(log_q)
    p, q = max(1 - left, 1e-9), max(1 - left_theirs, 1e-9)
    return max(total + p * math.log(p / q), 0.0)
