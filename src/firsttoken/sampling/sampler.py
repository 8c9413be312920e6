"""The sampler: per-slot state and one call a step that chooses a token for each row.

Order of the pipeline (that of vLLM V1): log-probabilities of the raw logits; guard against non-finite rows;
a constraint's mask; logit bias; minimum length; penalties; greedy rows stop here with an argmax; temperature; min_p;
top_k, top_p; choice. A choice that the constraint refuses is struck out, and another made with the same random number.

All greedy rows without extras share one argmax over the batch. Each other row is worked on alone, by the same
code whatever the batch holds, so its token is bitwise independent of its neighbours and of its place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firsttoken.core.errors import ConstraintFailed
from firsttoken.core.plan import TokenLogprobs
from firsttoken.core.random import uniform
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.sampling.choose import choose
from firsttoken.sampling.constraint import MOST_REFUSALS, LazyConstraint, Masker, allows
from firsttoken.sampling.logprobs import token_logprobs
from firsttoken.sampling.processors import RowProcessor

NON_FINITE = "non-finite logits"
ALL_MASKED = (
    "no token can be chosen here: what the request allows and forbids (allowed_token_ids, bad_words, min_tokens, a "
    "grammar) leaves none"
)
_IMPOSSIBLE = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """One entry a row, in the order of the rows.

    ``tokens`` int64 [R]. Where ``errors`` has a message the token is a placeholder (0, so that a step already in
    flight may look up its embedding) that must not reach the caller, and its ``codes`` have a word where none was
    possible. ``logprobs`` is None where not asked for.
    """

    tokens: Tensor
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]

    @property
    def codes(self) -> list[str | None]:
        """Of the errors."""
        return [None if error in (None, NON_FINITE) else ConstraintFailed.code for error in self.errors]


@dataclass(slots=True)
class _Row:
    params: SamplingParams
    seed: int
    num_prompt: int
    processor: RowProcessor | None
    plain: bool  # greedy, raw logits, no log-probabilities: the batch's argmax is the whole answer
    constraint: LazyConstraint | None


class Sampler:
    """Chooses tokens for up to ``max_rows`` slots over a vocabulary of ``vocab_size``.

    Works on the host: logits on another device are copied to it, and tokens come back on ``device``.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._rows: list[_Row | None] = [None] * max_rows
        self._masker: Masker | None = None
        self._unprepared: list[LazyConstraint] = []  # that have taken a token in the last `sample`

    def start(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        tokens: array[int] | Tensor | NDArray[np.integer],
        num_prompt: int,
        stop_ids: Sequence[int] = (),
        constraint: LazyConstraint | None = None,
    ) -> None:
        """A request takes ``slot`` (again, after preemption). ``tokens`` are all its known ones, the prompt first.

        ``stop_ids`` are the tokens that ``min_tokens`` forbids; ids outside the vocabulary cannot be sampled and are
        passed over. With a ``constraint`` its mask decides about them. Raises `InvalidRequest` for a ``logit_bias``
        outside the vocabulary, ValueError for tokens that are.
        """
        processor = None
        if constraint is not None:
            stop_ids = ()
        if RowProcessor.needed(params):
            params.check_vocabulary(self.vocab_size)
            known = np.asarray(tokens).astype(np.int64)
            if len(known) and not 0 <= int(known.min()) <= int(known.max()) < self.vocab_size:
                raise ValueError(
                    f"slot {slot}: token ids must be in 0 to {self.vocab_size - 1}, "
                    f"got {int(known.min())} to {int(known.max())}"
                )
            stops = np.array([i for i in stop_ids if 0 <= i < self.vocab_size], dtype=np.int64)
            processor = RowProcessor(params, stops, known[:num_prompt], known[num_prompt:].tolist())
        plain = params.greedy and params.logprobs is None and processor is None and constraint is None
        self._rows[slot] = _Row(params, seed, num_prompt, processor, plain, constraint)

    def retire(self, slot: int) -> None:
        """Give the slot back; a slot that is free already is left as it is."""
        self._rows[slot] = None

    def prepare(self) -> None:
        """Do what can be done for the next `sample` of rows with a constraint, when nobody waits for it."""
        for constraint in self._unprepared:
            constraint.prepare()
        self._unprepared.clear()

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> SampleBatch:
        """Choose one token a row and count it for the row's penalties.

        ``logits`` float32 [R, V] are left unchanged; row i belongs to ``slots[i]``, and ``positions[i]`` is the
        index, in its request, of the token being chosen (prompt tokens count from 0), which keys its random number.
        Raises ValueError for a wrong shape or dtype, or a slot that was not started.
        """
        if logits.dtype != torch.float32 or logits.shape != (len(slots), self.vocab_size):
            raise ValueError(
                f"logits must be float32 [{len(slots)}, {self.vocab_size}], got {logits.dtype} {list(logits.shape)}"
            )
        values: NDArray[np.float32] = logits.detach().to("cpu").contiguous().numpy()
        count = len(slots)
        # numpy's argmax gives the first of equal values and, if there is a NaN, the NaN: the maxima are the guard.
        best = values.argmax(axis=1) if count else np.zeros(0, dtype=np.int64)
        maxima = values[np.arange(count), best]
        errors: list[str | None] = [None] * count
        if not np.isfinite(maxima).all():
            for index in np.flatnonzero(~np.isfinite(maxima)).tolist():
                errors[index] = NON_FINITE
                best[index] = 0
        logprobs: list[TokenLogprobs | None] = [None] * count
        with np.errstate(over="ignore", under="ignore"):  # masked tokens are meant to become -inf and exp(-x) 0
            for index, slot in enumerate(slots):
                row = self._rows[slot]
                if row is None:
                    raise ValueError(f"slot {slot} was not started: its request must be admitted first")
                if row.plain or errors[index] is not None:
                    continue
                try:
                    token = self._choose(row, values[index], int(best[index]), float(maxima[index]), positions[index])
                except ConstraintFailed as error:
                    errors[index], best[index] = str(error), 0
                    continue
                best[index] = token
                if row.params.logprobs is not None:
                    logprobs[index] = token_logprobs(values[index], float(maxima[index]), token, row.params.logprobs)
        return SampleBatch(torch.from_numpy(best).to(self.device), logprobs, errors)

    def _choose(self, row: _Row, raw: NDArray[np.float32], best: int, top: float, position: int) -> int:
        """The token of one row. Raises `ConstraintFailed` when every token is masked, or the row's constraint fails."""
        processor, params, constraint = row.processor, row.params, row.constraint
        logits = raw
        if processor is not None and processor.active(position - row.num_prompt):
            logits = raw.copy()
            processor.apply(logits, position - row.num_prompt)
            best, top = _largest(logits)
        if constraint is None:
            token = best if params.greedy else choose(logits, top, params, uniform(row.seed, position))
        else:
            token = self._choose_within(constraint, row, logits, best, position)
            self._unprepared.append(constraint)
        if processor is not None:
            processor.append(token)
        return token

    def _choose_within(
        self, constraint: LazyConstraint, row: _Row, logits: NDArray[np.float32], likeliest: int, position: int
    ) -> int:
        """``likeliest`` is that of all tokens."""
        mask = constraint.mask()
        struck: list[int] = []
        if row.params.greedy and allows(mask, likeliest):
            if constraint.take(likeliest):
                return likeliest
            struck.append(likeliest)
        if self._masker is None:
            self._masker = Masker(self.vocab_size)
        masked = self._masker.apply(mask, logits)
        if not struck:
            _largest(masked)
        while len(struck) <= MOST_REFUSALS:
            masked[struck] = _IMPOSSIBLE
            best = int(masked.argmax())
            top = float(masked[best])
            if top == _IMPOSSIBLE:
                break
            token = best if row.params.greedy else choose(masked, top, row.params, uniform(row.seed, position))
            if constraint.take(token):
                return token
            struck.append(token)
        token = constraint.take_way_out()
        if logits[token] == _IMPOSSIBLE:
            raise ConstraintFailed(ALL_MASKED)
        return token


def _largest(logits: NDArray[np.float32]) -> tuple[int, float]:
    """The likeliest token and its logit. Raises `ConstraintFailed` when no token is possible."""
    best = int(logits.argmax())
    top = float(logits[best])
    if top == _IMPOSSIBLE:
        raise ConstraintFailed(ALL_MASKED)
    return best, top
