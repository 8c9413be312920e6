"""What changes a row's logits before a token is chosen: bias, minimum length, penalties.

All are sparse: they touch only the ids they are about, never the whole vocabulary, so that a row with a penalty costs
microseconds. Values stay finite or -inf: a product that leaves the float32 range is clamped to its largest value.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from firsttoken.core.sampling_params import SamplingParams

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class TokenCounts:
    """The distinct tokens of one request, and how often each was generated.

    ``ids`` int64 [n] are distinct, ``outputs`` int32 [n] count occurrences in the output (0: only in the prompt).
    """

    __slots__ = ("_ids", "_index", "_outputs", "_size")

    def __init__(self, prompt: NDArray[np.int64], output: Iterable[int]) -> None:
        unique = np.unique(prompt)
        self._size = len(unique)
        self._ids = np.zeros(self._size + 64, dtype=np.int64)
        self._ids[: self._size] = unique
        self._outputs = np.zeros(len(self._ids), dtype=np.int32)
        self._index = {token: index for index, token in enumerate(unique.tolist())}
        for token in output:
            self.append(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def outputs(self) -> NDArray[np.int32]:
        return self._outputs[: self._size]

    def append(self, token: int) -> None:
        """Count one generated token."""
        index = self._index.get(token)
        if index is None:
            index = self._size
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._outputs = np.concatenate([self._outputs, np.zeros_like(self._outputs)])
            self._index[token] = index
            self._ids[index] = token
            self._size += 1
        self._outputs[index] += 1


class RowProcessor:
    """The logits changes of one request, in the order allowed tokens, bias, minimum length, penalties, bad words."""

    __slots__ = (
        "_allowed",
        "_bad",
        "_bias_ids",
        "_bias_values",
        "_counts",
        "_min_tokens",
        "_output",
        "_params",
        "_stop_ids",
    )

    def __init__(
        self, params: SamplingParams, stop_ids: NDArray[np.int64], prompt: NDArray[np.int64], output: Iterable[int]
    ) -> None:
        bias = params.logit_bias or {}
        self._params = params
        self._bias_ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self._bias_values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self._stop_ids = stop_ids
        self._min_tokens = params.min_tokens if len(stop_ids) else 0
        output = list(output)
        self._counts = TokenCounts(prompt, output) if params.has_penalties else None
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else np.array(allowed, dtype=np.int64)
        self._bad = [(list(ids[:-1]), ids[-1]) for ids in params.bad_words_token_ids or ()]
        self._output = output if self._bad else []

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """False when the raw logits decide."""
        chosen_from = params.allowed_token_ids is not None or bool(params.bad_words_token_ids)
        return chosen_from or bool(params.logit_bias) or params.min_tokens > 0 or params.has_penalties

    def active(self, num_output: int) -> bool:
        """True when a token chosen after ``num_output`` output tokens may differ from what raw logits give."""
        if self._allowed is not None or self._bad:
            return True
        return len(self._bias_ids) > 0 or num_output < self._min_tokens or self._counts is not None

    def append(self, token: int) -> None:
        """Note a generated token, for penalties and bad words."""
        if self._bad:
            self._output.append(token)
        if self._counts is not None:
            self._counts.append(token)

    def apply(self, row: NDArray[np.float32], num_output: int) -> None:
        """Change ``row`` (float32 [V]) in place, for the token that follows ``num_output`` output tokens."""
        if self._allowed is not None:
            kept = row[self._allowed]
            row[:] = -np.inf
            row[self._allowed] = kept
        if len(self._bias_ids):
            row[self._bias_ids] += self._bias_values
        if num_output < self._min_tokens:
            row[self._stop_ids] = -np.inf
        if self._counts is not None:
            self._penalise(row, self._counts)
        for before, last in self._bad:
            if not before or self._output[-len(before) :] == before:
                row[last] = -np.inf

    def _penalise(self, row: NDArray[np.float32], counts: TokenCounts) -> None:
        params = self._params
        ids, outputs = counts.ids, counts.outputs
        # float64, because 1 / repetition_penalty and the products may leave the float32 range.
        values = row[ids].astype(np.float64)
        if params.repetition_penalty != 1:
            values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        values -= params.frequency_penalty * outputs
        values -= params.presence_penalty * (outputs > 0)
        row[ids] = np.minimum(values, _FLOAT32_MAX)
