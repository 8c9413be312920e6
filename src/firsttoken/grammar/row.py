"""One answer that is held to a grammar: which tokens may come next, and that its end stays within reach.

Invariant after each token that was taken: some way to the end of the grammar fits into the tokens that are left.
``_way`` is one that was found and holds, or None while only a bound on its length is known (``_bound``), which has then
used up half of the room beside the last known way (of ``_anchor`` tokens) at most, or no better one was found. In
tokens, the end token with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from firsttoken.core.errors import ConstraintFailed
from firsttoken.grammar.compiled import Compiled
from firsttoken.grammar.pieces import OUTSIDE
from firsttoken.grammar.ways import Ways, longest

Mask = NDArray[np.int32]


class GrammarRow:
    """``output`` are the tokens that it has already (it was preempted), ``max_tokens`` all that it may have. Until it
    has ``min_tokens`` none of ``stop_ids`` may come where anything else may. Used by one thread at a time."""

    def __init__(
        self, compiled: Compiled, output: Sequence[int], max_tokens: int, min_tokens: int, stop_ids: Sequence[int]
    ) -> None:
        table = compiled.table
        self._compiled = compiled
        self._end = table.end_ids
        self._left = max_tokens
        self._early = min_tokens
        self._forbidden = _words(
            [token for token in (*stop_ids, *self._end) if token < table.vocab_size], table.mask_words
        )
        self._matcher: LLMatcher = compiled.token_matcher()
        self._ways = Ways(compiled)
        self._way: list[int] | None = compiled.shortest
        self._bound = self._anchor = compiled.needed
        self._longest = longest(compiled, compiled.shortest)
        self._vain = False  # the last look for a way has found none
        self._in_run = False  # since `_way` was known, and what such a run may add is part of `_bound`
        self._place = self._place_before = OUTSIDE  # of strings, now and before the last token
        self._ended = False
        self._error = ""
        for token in output:
            self._follow(token)
        if output:
            self._way, self._bound = None, 0
        self._mask: Mask | None = None

    # ------------------------------------------------------------ for the sampler

    def mask(self) -> Mask:
        """The tokens that may come next, a bit each (int32 [ceil(V / 32)], the lowest bit first). Not to be changed.
        Made when it is first asked for. Raises `ConstraintFailed` where there is none."""
        if self._error:
            raise ConstraintFailed(self._error)
        if self._mask is None:
            self._mask = self._make_mask()
        return self._mask

    def prepare(self) -> None:
        """Make the next mask now, when nobody waits for it. What fails does so when it is asked for."""
        if self._ended:
            return
        with suppress(ConstraintFailed):
            self.mask()

    def take(self, token: int) -> bool:
        """The answer goes on with ``token``, which the mask allows. False when its end would be out of reach: then
        another must be taken."""
        if self._ended or token in self._end:
            self._ended = True
            self._left -= 1
            return True
        left = self._left - 1
        growth = self._growth(token)
        bound = 0 if growth is None or not self._bound else self._bound + growth
        if bound and 2 * bound <= left + self._anchor:
            self._follow(token)
            if self._way and self._way[0] == token:
                self._go_on()
            else:
                self._drift(token, bound)
        elif not self._take_if_fitting(token, left, bound):
            return False
        self._mask = None
        return True

    @property
    def may_refuse(self) -> bool:
        """Whether `take` may return False for the next token."""
        growth, longer = self._compiled.growth, self._compiled.table.pieces.longer[self._place]
        if self._ended or (self._way is not None and len(self._way) + 1 >= self._left):
            return False  # the mask leaves the one token
        if growth is None or not self._bound:
            return True
        # A token of so many pieces is taken whether a way is found or not.
        room = (self._left - 1 - self._bound - self._longest) // growth
        return room < len(longer) and (room < 0 or bool((self.mask() & longer[room]).any()))

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
        # What a run may add that goes on has been counted.
        known = int(self._in_run and pieces.begins_in_run[self._place, token])
        return growth * (int(pieces.count[self._place, token]) - known) + self._longest

    def _take_if_fitting(self, token: int, left: int, bound: int) -> bool:
        """``bound`` is the way's, once it has gone on with ``token``; 0 where it cannot be told."""
        if self._way is None and not self._bound:
            self._known_way()
        if self._way and self._way[0] == token:
            self._follow(token)
            self._go_on()
            return True
        if not self._matcher.consume_token(token):
            raise ConstraintFailed(self._matcher.get_error() or _IMPOSSIBLE)
        way = self._ways.find(left - 1, self._compiled.table.bytes[token])
        if way is None and not 0 < bound <= left:
            self._matcher.rollback(1)
            return False
        self._took(token)
        if way is None:
            self._drift(token, bound)  # there is one, though it was not found
        else:
            self._set_way(way)
        return True

    def _looks_next(self) -> bool:
        """Whether a way should be looked for now because the next token, of one piece, would have to. Most masks are
        made when nobody waits for them, and a token is taken while others wait."""
        growth = self._compiled.growth
        if growth is None or self._vain:
            return False
        added = growth + self._longest
        looks = 2 * (self._bound + added) > self._left - 1 + self._anchor
        return looks and 2 * (self._anchor + added) <= self._left - 1 + self._anchor  # else it would all the same

    def _known_way(self) -> list[int] | None:
        """One from where the answer stands that fits into what is left."""
        if self._way is None:
            way = self._ways.find(self._left - 1)
            if way is not None:
                self._set_way(way)
        return self._way

    def _set_way(self, way: list[int]) -> None:
        self._way, self._in_run, self._vain = way, False, False
        self._bound = self._anchor = len(way) + 1
        self._longest = longest(self._compiled, way)
        self._ways.know(way)

    def _go_on(self) -> None:
        """Along the way, by its first token."""
        assert self._way
        self._way, self._in_run = self._way[1:], False
        self._bound = self._anchor = len(self._way) + 1
        self._ways.know(self._way)

    def _drift(self, token: int, bound: int) -> None:
        """Off the way, by ``token``."""
        self._way, self._bound = None, bound
        self._in_run = bool(self._compiled.table.pieces.ends_in_run[self._place_before, token])

    def _follow(self, token: int) -> None:
        """Go on with a token that fits."""
        if token in self._end:
            self._ended = True
        elif not self._matcher.consume_token(token):
            self._error = self._matcher.get_error() or _IMPOSSIBLE
        self._took(token)

    def _took(self, token: int) -> None:
        self._left -= 1
        self._early -= 1
        if not self._ended:
            self._ways.follow(token)
            self._place_before = self._place
            self._place = int(self._compiled.table.pieces.after[self._place, token])

    def _make_mask(self) -> Mask:
        words = np.zeros(self._compiled.table.mask_words, dtype=np.int32)
        # How far its end is was not kept of one that was preempted.
        if self._way is None and (not self._bound or self._looks_next()):
            self._vain = self._known_way() is None
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


_IMPOSSIBLE = "the grammar allows no token here"
_TOO_LONG = "the answer's grammar cannot be brought to its end within max_tokens"


def _words(tokens: Sequence[int], count: int) -> Mask:
    """A mask of these tokens."""
    words = np.zeros(count, dtype=np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words.view(np.int32)
