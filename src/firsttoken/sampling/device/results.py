"""What the host reads of a step's sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firsttoken.core.errors import ConstraintFailed
from firsttoken.core.plan import RowSample, TokenLogprobs
from firsttoken.kernels.sample import state as words
from firsttoken.kernels.sample.state import Outputs
from firsttoken.sampling.sampler import ALL_MASKED, NON_FINITE

_MESSAGES = {words.NON_FINITE: NON_FINITE, words.ALL_MASKED: ALL_MASKED}
_CODES = {words.ALL_MASKED: ConstraintFailed.code}


@dataclass(frozen=True, slots=True)
class HostOutputs:
    """`Outputs` in host memory as NumPy sees them: its slices cost a fraction of torch's."""

    tokens: NDArray[np.int32]
    errors: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def of(cls, outputs: Outputs) -> HostOutputs:
        """The same memory."""
        return cls(
            tokens=outputs.tokens.numpy(),
            errors=outputs.errors.numpy(),
            logprobs=outputs.logprobs.numpy(),
            ranks=outputs.ranks.numpy(),
            top_ids=outputs.top_ids.numpy(),
            top_logprobs=outputs.top_logprobs.numpy(),
        )


def read(outputs: Outputs | HostOutputs, slots: Sequence[int], num_logprobs: Sequence[int | None]) -> list[RowSample]:
    """The samples of the first ``len(slots)`` rows, once the device has written them to ``outputs`` in host memory.

    ``num_logprobs`` is what `DeviceSampler.num_logprobs` said when the step was launched: the slots may have passed on
    to other requests since.
    """
    count = len(slots)
    tokens, errors = outputs.tokens[:count].tolist(), outputs.errors[:count].tolist()
    if not any(errors) and num_logprobs.count(None) == count:
        return [RowSample(slot, token) for slot, token in zip(slots, tokens, strict=True)]
    return [
        RowSample(
            slot,
            tokens[row],
            None if wanted is None or errors[row] else _logprobs(outputs, row, wanted),
            _MESSAGES.get(errors[row]),
            code=_CODES.get(errors[row]),
        )
        for row, (slot, wanted) in enumerate(zip(slots, num_logprobs, strict=True))
    ]


def _logprobs(outputs: Outputs | HostOutputs, row: int, wanted: int) -> TokenLogprobs:
    ids = outputs.top_ids[row, :wanted].tolist()
    count = ids.index(-1) if -1 in ids else wanted
    return TokenLogprobs(
        logprob=float(outputs.logprobs[row]),
        rank=int(outputs.ranks[row]),
        top_ids=ids[:count],
        top_logprobs=outputs.top_logprobs[row, :count].tolist(),
    )
