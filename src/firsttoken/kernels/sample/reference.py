"""The random choice on the device as it is defined: one row, float64, everything sorted.

Only the random bits are those of the kernel, so that its tokens can be foretold but for ties by rounding. The edits and
the log-probabilities are those of `firsttoken.sampling.reference`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firsttoken.core.random import random_word
from firsttoken.core.sampling_params import SamplingParams

_MASK = (1 << 32) - 1


def order(logits: Tensor) -> Tensor:
    """Ids by logit descending, equal ones by id."""
    return torch.sort(logits, descending=True, stable=True).indices


def kept(logits: Tensor, params: SamplingParams) -> Tensor:
    """Which tokens (bool [V]) min_p, top_k and top_p leave of finite or -inf ``logits`` [V]; each works on what the one
    before left, and top_p keeps the shortest prefix, in `order`, whose share of the mass is at least p."""
    z = (logits.double() - logits.double().max()) / params.temperature
    mask = logits > -math.inf
    if params.min_p > 0:
        mask &= z >= math.log(params.min_p)
    ids = order(logits)
    if 0 < params.top_k < len(logits):
        mask[ids[torch.cumsum(mask[ids], 0) > params.top_k]] = False
    if params.top_p < 1:
        weights = torch.where(mask, z.exp(), 0.0)[ids]
        before = torch.cumsum(weights, 0) - weights
        mask[ids[before >= params.top_p * weights.sum()]] = False
    return mask


def random_bits(seed: int, position: int, vocab_size: int) -> Tensor:
    """32 random bits (int64 [V]) of each token: two rounds of lowbias32 (Wellons, hash-prospector), each keyed with a
    word of ``core.random.random_word(seed, position)``."""
    word = random_word(seed, position)
    ids = torch.arange(vocab_size, dtype=torch.int64)
    return _mix32((_mix32(ids ^ (word & _MASK)) + (word >> 32)) & _MASK)


def _mix32(word: Tensor) -> Tensor:
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _MASK
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _MASK  # the product's low 32 bits survive int64's wrapping
    return word ^ (word >> 16)


def gumbel(seed: int, position: int, vocab_size: int) -> Tensor:
    """Gumbel noise float64 [V] of each token at ``position`` of the request with ``seed``."""
    v = (random_bits(seed, position, vocab_size).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v))


def scores(logits: Tensor, params: SamplingParams, seed: int, position: int) -> Tensor:
    """What each token [V] is compared by (float64): -inf where it is not kept. The largest is chosen."""
    z = (logits.double() - logits.double().max()) / params.temperature
    return torch.where(kept(logits, params), z + gumbel(seed, position, len(logits)), -math.inf)
