"""Prompts of a wanted length: random token ids, or random words where a server takes text only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from firsttoken.bench.arrivals import TRACE_BLOCK_TOKENS, Arrival
from firsttoken.bench.http.dialect import Prompt

# Short, common words: a token each, with the space before it, in nearly every vocabulary.
_TEXT = (
    "the of and to in is was for that on as with by at from it an be are this which or had not but were his her their "
    "has one been first also who when more other time two into most may some such only over new can these after well "
    "would about than there so out up no between many all during years where then three part made world used being "
    "through both under several work each same life while water small large high long old city name house school "
    "state day way place number group home game second four line end early great found point against during country "
    "family book white left north south east west public land side best king river church music film park team field"
)
WORDS = _TEXT.split()


@dataclass(frozen=True)
class Words:
    """How many tokens a text of random words is: ``fixed`` (a chat template's own) and ``each`` a word."""

    fixed: float = 0.0
    each: float = 1.0

    def count(self, tokens: int) -> int:
        """Words whose prompt is nearest to ``tokens``, one at least."""
        return max(1, round((tokens - self.fixed) / self.each))


class Prompts:
    """Of one load: the same ``seed`` gives the same prompts, of which no two share a beginning unless their arrivals'
    blocks say so."""

    def __init__(self, vocab: int | None, words: Words, seed: str) -> None:
        self._vocab = vocab
        self._words = words
        self._seed = list(seed.encode())
        self._rng = np.random.default_rng(self._seed)

    def make(self, arrival: Arrival) -> Prompt:
        if self._vocab is not None:
            ids: list[int] = self._draw(arrival, self._vocab, arrival.input, TRACE_BLOCK_TOKENS).tolist()
            return ids
        block_words = max(1, round(TRACE_BLOCK_TOKENS / self._words.each))
        drawn = self._draw(arrival, len(WORDS), self._words.count(arrival.input), block_words)
        return " ".join([WORDS[number] for number in drawn.tolist()])

    def _draw(self, arrival: Arrival, below: int, count: int, per_block: int) -> npt.NDArray[np.int64]:
        if not arrival.blocks:
            return self._rng.integers(below, size=count)
        blocks = [
            np.random.default_rng([*self._seed, block]).integers(below, size=per_block) for block in arrival.blocks
        ]
        found = np.concatenate(blocks)[:count]
        # Rounded to whole words, a block may be a little short of its tokens.
        missing = count - len(found)
        return np.concatenate([found, self._rng.integers(below, size=missing)]) if missing > 0 else found
