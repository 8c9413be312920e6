"""The rows of one step that are held to grammars, from their masks to the tokens that were chosen.

A token is known to the host when its step has ended, and the mask after it is made while the device computes the next
step's hidden states: only that step's choice waits for it, and is launched when all that is known was told
(`GraphExecutor.settle`). Where a row may refuse what its mask allows, which is near the end of its budget, its step's
tokens are looked at before they go on to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from firsttoken.core.clock import now_ns
from firsttoken.core.errors import ConstraintFailed
from firsttoken.core.plan import HeldTimes, RowSample, RowStart
from firsttoken.executor.graphs.choice import Chooser, Launched
from firsttoken.grammar.grammars import Grammars, row_beside_of
from firsttoken.sampling.constraint import MOST_REFUSALS, Constraint

Masks = NDArray[np.int32]


class Holds:
    """What the rows of each slot are held to, by ``grammars``."""

    def __init__(self) -> None:
        self.grammars: Grammars | None = None
        self._rows: dict[int, Constraint] = {}

    def start(self, row: RowStart) -> bool:
        """A row starts; whether it is held to something."""
        constraint = row_beside_of(self.grammars, row)
        if constraint is None:
            return False
        self._rows[row.slot] = constraint
        self.begin()
        return True

    def begin(self) -> None:
        """The masks after the tokens that were taken are to be made."""
        if self.grammars is not None:
            self.grammars.begin_masks()

    def retire(self, slot: int) -> None:
        self._rows.pop(slot, None)

    def of(self, slots: Sequence[int]) -> HeldRows | None:
        """Those of a step in which these choose a token; None when none is held."""
        if not self._rows:
            return None
        rows = [(index, self._rows[slot]) for index, slot in enumerate(slots) if slot in self._rows]
        return HeldRows(rows, self.begin) if rows else None


class HeldRows:
    """``rows``: the index of each in the step's samples, and what it is held to. ``begin`` has the masks made that come
    after tokens which they took."""

    def __init__(self, rows: Sequence[tuple[int, Constraint]], begin: Callable[[], None]) -> None:
        self._rows = dict(rows)
        self._begin = begin
        self._errors: dict[int, str] = {}
        self._open = set(self._rows)  # that have not taken the step's token
        self._masks: Masks | None = None
        self._mask_ns = self._upload_ns = self._launch_ns = 0

    def choose(self, chooser: Chooser, step: Launched) -> None:
        """Launch the step's choice, again and again where tokens are looked at. The tokens of the steps before must
        have been taken; waits for masks that are still being made."""
        rows, began = 1 + max(self._rows), now_ns()
        masks = self._make_masks(rows, -(-chooser.vocab_size // 32))
        careful = any(self._rows[index].may_refuse for index in self._open)
        made = now_ns()
        self._mask_ns = made - began
        chooser.set_masks(masks)
        uploaded = now_ns()
        self._upload_ns = uploaded - made
        if careful:
            self._choose_carefully(chooser, step, rows, masks)
        else:
            chooser.choose_apart(step)
        self._launch_ns = now_ns() - uploaded

    def _choose_carefully(self, chooser: Chooser, step: Launched, rows: int, masks: Masks) -> None:
        for round_ in range(MOST_REFUSALS + 2):
            if round_:
                chooser.set_masks(masks)
            tokens, errors = chooser.try_choice(step, rows)
            if not self._settle(tokens, errors, round_):
                break
        self._begin()
        chooser.end(step)

    def _make_masks(self, count: int, words: int) -> Masks:
        """int32 [``count``, ``words``] for the first of the step's samples; waits for those that are being made.
        Nothing is forbidden to a row that cannot go on: what it gets is dropped."""
        self._masks = np.full((count, words), -1, dtype=np.int32)
        for index, row in self._rows.items():
            try:
                self._masks[index] = row.mask()
            except ConstraintFailed as error:
                self._fail(index, error)
        return self._masks

    def _settle(self, tokens: Sequence[int], errors: Sequence[int], round_: int) -> bool:
        """Have the rows take what was chosen, in the given round (from 0). True when some must choose again, by new
        masks and the same random numbers; all others then choose again what they have taken."""
        assert self._masks is not None
        again = False
        for index in sorted(self._open):
            if errors[index]:
                self._open.discard(index)  # it has ended
                continue
            token = tokens[index]
            try:
                if self._rows[index].take(token):
                    self._only(index, token)
                    self._open.discard(index)
                    continue
                again = True
                self._masks[index, token >> 5] &= ~np.uint32(1 << (token & 31)).view(np.int32)
                if round_ >= MOST_REFUSALS or not self._masks[index].any():
                    self._only(index, self._rows[index].take_way_out())
                    self._open.discard(index)
            except ConstraintFailed as error:
                self._fail(index, error)
        return again

    def finish(self, samples: list[RowSample], hear_ns: int) -> HeldTimes:
        """The step's results were read, so long after the device had them: the rows take their tokens, and the samples
        of those that failed say so."""
        now = now_ns()
        for index in sorted(self._open):
            if samples[index].error is None:
                try:
                    if not self._rows[index].take(samples[index].token):
                        raise ConstraintFailed(
                            "a token was chosen after which the answer's grammar has no end in reach"
                        )
                except ConstraintFailed as error:
                    self._fail(index, error)
        self._open.clear()
        self._begin()
        for index, error_text in self._errors.items():
            samples[index] = msgspec.structs.replace(
                samples[index], token=0, logprobs=None, error=error_text, code=ConstraintFailed.code
            )
        return HeldTimes(self._mask_ns, self._upload_ns, self._launch_ns, hear_ns, now_ns() - now)

    def _only(self, index: int, token: int) -> None:
        assert self._masks is not None
        self._masks[index] = 0
        self._masks[index, token >> 5] = np.uint32(1 << (token & 31)).view(np.int32)

    def _fail(self, index: int, error: ConstraintFailed) -> None:
        self._errors[index] = str(error)
        self._open.discard(index)
