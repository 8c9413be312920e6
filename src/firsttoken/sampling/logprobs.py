"""Log-probabilities of one position, of the raw logits (before bias, penalties and temperature).

Safe for JSON by construction: a token that the model calls impossible (logit -inf) is left out of the alternatives,
which are then fewer than asked for; so no -inf and no NaN is ever reported. The chosen token is never impossible.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from firsttoken.core.plan import TokenLogprobs
from firsttoken.sampling.choose import descending, largest


def token_logprobs(row: NDArray[np.float32], top: float, token: int, count: int) -> TokenLogprobs:
    """Of ``row`` (raw logits, float32 [V]) whose largest value is ``top``: the chosen ``token``, its rank and the
    ``count`` most likely tokens (most likely first, ties by id; the chosen one only if it is among them).

    The rank is 1 for the most likely token, and agrees with the order of the alternatives at ties.
    """
    mass = float(np.exp(row - np.float32(top)).sum(dtype=np.float64))
    norm = top + math.log(mass)
    value = row[token]
    above = int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token] == value))
    ids: list[int] = []
    values: list[float] = []
    if count:
        best = largest(row, min(count, len(row)))
        best = best[descending(row[best])]
        best = best[np.isfinite(row[best])]
        ids = best.tolist()
        values = (row[best].astype(np.float64) - norm).tolist()
    return TokenLogprobs(logprob=float(value) - norm, rank=above + 1, top_ids=ids, top_logprobs=values)
