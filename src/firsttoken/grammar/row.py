"""One answer that is held to a grammar: which tokens may come next, and that its end stays within reach.

Invariant after each token that was taken: some way to the end of the grammar fits into the tokens that are left.
``_way`` is one that was found and holds, or None while only a bound on its length is known (``_bound``), which then is
half of what is left at most. In tokens, the end token with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from firsttoken.core.errors import ConstraintFailed
from firsttoken.grammar.closing import MAX_CLOSING, find_closing
from firsttoken.grammar.compiled import Compiled

Mask = NDArray[np.int32]


class GrammarRow:
    """``output`` are the tokens that it has already (it was preempted), ``max_tokens`` all that it may have. Until it
    has ``min_tokens`` none of ``stop_ids`` may come where anything else may. Masks are made by ``workers``.

    Used by one thread; `mask` waits for the worker.
    """

    def __init__(
        self,
        compiled: Compiled,
        output: Sequence[int],
        max_tokens: int,
        min_tokens: int,
        stop_ids: Sequence[int],
        workers: Executor,
    ) -> None:
        table = compiled.table
        self._compiled = compiled
        self._end = table.end_ids
        self._left = max_tokens
        self._early = min_tokens
        self._forbidden = _words(
            [token for token in (*stop_ids, *self._end) if token < table.vocab_size], table.mask_words
        )
        self._workers = workers
        self._matcher = compiled.token_matcher()
        self._bytes: LLMatcher | None = None
        self._unread = bytearray()  # what `_bytes` has not consumed
        self._way: list[int] | None = compiled.shortest
        self._bound = compiled.needed
        self._longest = _longest(compiled, compiled.shortest)
        self._in_run = False  # since `_way` was known, and what such a run may add is part of `_bound`
        self._ended = False
        self._error = ""
        for token in output:
            self._follow(token)
        if output:
            self._way, self._bound = None, 0
        self._mask: Future[Mask] = workers.submit(self._make_mask)

    # ------------------------------------------------------------ for the sampler

    def mask(self) -> Mask:
        """The tokens that may come next, a bit each (int32 [ceil(V / 32)], the lowest bit first). Not to be changed.
        Raises `ConstraintFailed` where there is none."""
        if self._error:
            raise ConstraintFailed(self._error)
        try:
            return self._mask.result(_MASK_S)
        except TimeoutError:
            self._error = f"the grammar is too complex: its next tokens were not known after {_MASK_S} s"
            raise ConstraintFailed(self._error) from None

    def take(self, token: int) -> bool:
        """The answer goes on with ``token``, which the mask allows. False when its end would be out of reach: then
        another must be taken."""
        if self._ended or token in self._end:
            self._ended = True
            self._left -= 1
            return True
        left = self._left - 1
        growth = self._growth(token)
        if growth is not None and self._bound and 2 * (self._bound + growth) <= left:
            self._follow(token)
            if self._way and self._way[0] == token:
                self._set_way(self._way[1:])
            else:
                self._way, self._bound = None, self._bound + growth
                self._in_run = bool(self._compiled.table.pieces.ends_in_run[token])
        elif not self._take_if_fitting(token, left):
            return False
        self._mask = self._workers.submit(self._make_mask)
        return True

    @property
    def may_refuse(self) -> bool:
        """Whether `take` may return False for the next token."""
        growth, pieces = self._compiled.growth, self._compiled.table.pieces
        if self._ended or (self._way is not None and len(self._way) + 1 >= self._left):
            return False  # the mask leaves the one token
        if growth is None or not self._bound:
            return True
        room = ((self._left - 1) // 2 - self._bound - self._longest) // growth  # for so many pieces
        return room < pieces.most and room < int(pieces.count[_ids(self.mask(), len(pieces.count))].max(initial=0))

    def take_way_out(self) -> int:
        """Take the first token of a way to the end. Raises `ConstraintFailed` where there is none that fits."""
        way = self._known_way()
        if way is None or len(way) + 1 > self._left:
            raise ConstraintFailed(_TOO_LONG)
        token = way[0] if way else self._end[0]
        if not self.take(token):
            raise ConstraintFailed(_TOO_LONG)
        return token

    # --------------------------------------------------------------------- inside

    def _growth(self, token: int) -> int | None:
        """Tokens by which the way may get longer. One that was begun is spelt anew from there."""
        growth, pieces = self._compiled.growth, self._compiled.table.pieces
        if growth is None:
            return None
        known = int(self._in_run and pieces.begins_in_run[token])  # what the run may add has been counted
        return growth * (int(pieces.count[token]) - known) + self._longest

    def _take_if_fitting(self, token: int, left: int) -> bool:
        before = self._known_way() if self._way is None and not self._bound else self._way
        if not self._matcher.consume_token(token):
            raise ConstraintFailed(self._matcher.get_error() or _IMPOSSIBLE)
        way: list[int] | None = None
        if before is not None:
            if before and before[0] == token:
                way = before[1:]
            elif len(before) + 1 <= left and self._holds(before):
                way = before
        spelt = self._compiled.table.bytes[token]
        if way is None:
            way = self._find_way(spelt)
        if way is None or len(way) + 1 > left:
            self._matcher.rollback(1)
            return False
        self._unread += spelt
        self._left = left
        self._early -= 1
        self._set_way(way)
        return True

    def _holds(self, way: list[int]) -> bool:
        return self._matcher.validate_tokens([*way, self._end[0]]) == len(way) + 1

    def _known_way(self) -> list[int] | None:
        """One from where the answer stands."""
        if self._way is None:
            way = self._find_way(b"")
            if way is not None:
                self._set_way(way)
        return self._way

    def _find_way(self, more: bytes) -> list[int] | None:
        """From where the answer stands once it has gone on with ``more``."""
        if self._bytes is None:
            self._bytes = self._compiled.byte_matcher()
        if self._unread:
            self._bytes.consume_tokens(list(self._unread))
            self._unread.clear()
        matcher = self._bytes
        if more:
            matcher = matcher.deep_copy()
            matcher.consume_tokens(list(more))
        if matcher.is_error():
            return None
        most = min(MAX_CLOSING, _TOKEN_BYTES * self._left)
        made = self._compiled
        closing = find_closing(matcher, json=made.has_json, ends=made.ends, most=most, seconds=_SEARCH_S)
        return None if closing is None else self._compiled.table.spell(closing)

    def _set_way(self, way: list[int]) -> None:
        self._way, self._bound, self._in_run = way, len(way) + 1, False
        self._longest = _longest(self._compiled, way)

    def _follow(self, token: int) -> None:
        """Go on with a token that fits."""
        self._left -= 1
        self._early -= 1
        if token in self._end:
            self._ended = True
        elif not self._matcher.consume_token(token):
            self._error = self._matcher.get_error() or _IMPOSSIBLE
        else:
            self._unread += self._compiled.table.bytes[token]

    def _make_mask(self) -> Mask:
        words = np.zeros(self._compiled.table.mask_words, dtype=np.int32)
        if self._way is None and not self._bound:
            self._known_way()  # it was preempted: how far its end is was not kept
        if self._way is not None and len(self._way) + 1 >= self._left:
            only = self._way[0] if self._way else self._end[0]
            return _words([only], len(words))
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise ConstraintFailed(self._matcher.get_error())
        if self._early > 0:
            longer = words & ~self._forbidden
            words = longer if longer.any() else words
        if not words.any():
            raise ConstraintFailed(_IMPOSSIBLE)
        return words


# A way of which tokens are longer than this on average is not looked for.
_TOKEN_BYTES = 16
# All answers of a step wait for these. They take a millisecond as a rule.
_MASK_S = 0.5
_SEARCH_S = 0.1
_IMPOSSIBLE = "the grammar allows no token here"
_TOO_LONG = "the answer's grammar cannot be brought to its end within max_tokens"


def _longest(compiled: Compiled, way: list[int]) -> int:
    return max((len(compiled.table.bytes[token]) for token in way), default=1)


def _words(tokens: Sequence[int], count: int) -> Mask:
    """A mask of these tokens."""
    words = np.zeros(count, dtype=np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words.view(np.int32)


def _ids(mask: Mask, vocab_size: int) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little"))
