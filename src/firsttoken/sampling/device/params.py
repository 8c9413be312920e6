"""What a request's parameters need of the kernels, and the words that the kernels read."""

from __future__ import annotations

import math
from enum import IntFlag
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kernels.sample import state as words

Kind = Literal["greedy", "random", "rich"]
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
_WORD = 0xFFFFFFFF


class Needs(IntFlag):
    """Parts of the sampling segment beyond the greedy choice, which every step makes."""

    NOTHING = 0
    RANDOM = 1
    SEARCH = 2  # top_k or top_p
    EDITS = 4  # bias, minimum length, penalties, tokens that are allowed or not
    LOGPROBS = 8
    MASKS = 16


# What the segment of a kind must hold.
KIND_NEEDS: dict[Kind, Needs] = {
    "greedy": Needs.NOTHING,
    "random": Needs.RANDOM | Needs.SEARCH,
    "rich": Needs.RANDOM | Needs.SEARCH | Needs.EDITS | Needs.LOGPROBS | Needs.MASKS,
}


# Which flags need what. Numbers, since a flag's own operators take a microsecond each.
_NEEDED_BY = (
    (words.RANDOM, Needs.RANDOM.value),
    (words.HAS_TOP_K | words.HAS_TOP_P, Needs.SEARCH.value),
    (
        words.HAS_BIAS | words.HAS_MIN_TOKENS | words.HAS_PENALTIES | words.HAS_ALLOWED | words.HAS_BAD,
        Needs.EDITS.value,
    ),
    (words.HAS_LOGPROBS, Needs.LOGPROBS.value),
    (words.HAS_MASK, Needs.MASKS.value),
)


def needs_of(flags: int) -> int:
    """The value of the `Needs` of a request whose state has these flags."""
    needs = 0
    for some, need in _NEEDED_BY:
        if flags & some:
            needs |= need
    return needs


def state_row(
    params: SamplingParams, seed: int, num_prompt: int, num_stops: int, vocab_size: int, *, masked: bool = False
) -> NDArray[np.float64]:
    """The state of a slot (float64 [WORDS]); ``num_stops`` ids follow the bias in the slot's list. A ``masked`` one
    gets a mask with each step."""
    row = [0.0] * words.WORDS  # as a list, for NumPy takes several times as long to set one word
    row[words.FLAGS] = _flags(params, vocab_size, has_stops=num_stops > 0) | (words.HAS_MASK if masked else 0)
    # Never 0 in float32: an impossible token's distance, infinite, would turn into NaN.
    row[words.INVERSE_TEMPERATURE] = 1.0 if params.greedy else max(1.0 / params.temperature, _SMALLEST_SCALE)
    row[words.FARTHEST] = -math.log(params.min_p) if params.min_p > 0 else math.inf
    row[words.TOP_K] = params.top_k
    row[words.TOP_P] = params.top_p
    row[words.PRESENCE] = params.presence_penalty
    row[words.FREQUENCY] = params.frequency_penalty
    row[words.REPETITION] = params.repetition_penalty
    row[words.SEED_LOW] = seed & _WORD
    row[words.SEED_HIGH] = (seed >> 32) & _WORD
    row[words.NUM_PROMPT] = num_prompt
    row[words.MIN_TOKENS] = params.min_tokens
    row[words.NUM_LOGPROBS] = params.logprobs or 0
    row[words.NUM_BIAS] = len(params.logit_bias or ())
    row[words.NUM_STOPS] = num_stops
    row[words.NUM_BAD] = len(params.bad_words_token_ids or ())
    return np.array(row, dtype=np.float64)


def _flags(params: SamplingParams, vocab_size: int, *, has_stops: bool) -> int:
    flags = 0
    if not params.greedy:
        flags |= words.RANDOM
        flags |= words.HAS_TOP_K if 0 < params.top_k < vocab_size else 0
        flags |= words.HAS_TOP_P if params.top_p < 1 else 0
    flags |= words.HAS_BIAS if params.logit_bias else 0
    flags |= words.HAS_MIN_TOKENS if params.min_tokens > 0 and has_stops else 0
    flags |= words.HAS_PENALTIES if params.has_penalties else 0
    flags |= words.HAS_ALLOWED if params.allowed_token_ids is not None else 0
    flags |= words.HAS_BAD if params.bad_words_token_ids else 0
    flags |= words.HAS_LOGPROBS if params.logprobs is not None else 0
    return flags
