"""The log-probabilities of an answer that is told as a whole, kept until it is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from firsttoken.core.plan import TokenLogprobs
from firsttoken.server.encode import Told


class KeptLogprobs:
    """Those of an answer's tokens, in their order, each with its ``top`` most likely ones at most.

    A long answer has a million of them: here one takes 12 bytes, and made into what JSON is made of, some hundred.
    """

    __slots__ = ("_counts", "_ids", "_tokens", "_top", "_values")

    def __init__(self, top: int) -> None:
        self._top = top
        self._tokens = array("i")
        self._counts = array("B")  # of the most likely ones
        self._values = array("d")  # for each token its own and those of the most likely ones
        self._ids = array("i")  # for each token its rank and their ids

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, told: Iterable[Told]) -> None:
        """More tokens, each with what is told of it."""
        for token, one in told:
            top = one.top_ids[: self._top]
            self._tokens.append(token)
            self._counts.append(len(top))
            self._values.append(one.logprob)
            self._values.extend(one.top_logprobs[: len(top)])
            self._ids.append(one.rank)
            self._ids.extend(top)

    def __iter__(self) -> Iterator[Told]:
        """All of them."""
        at = 0
        for token, count in zip(self._tokens, self._counts, strict=True):
            first, end = at + 1, at + 1 + count
            values, ids = self._values, self._ids
            yield token, TokenLogprobs(values[at], ids[at], ids[first:end].tolist(), values[first:end].tolist())
            at = end
