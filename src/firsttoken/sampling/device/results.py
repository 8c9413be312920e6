"""What the host reads of a step's sampling."""

from __future__ import annotations

from collections.abc import Sequence

from firsttoken.core.plan import RowSample, TokenLogprobs
from firsttoken.kernels.sample import state as words
from firsttoken.kernels.sample.state import Outputs
from firsttoken.sampling.sampler import ALL_MASKED, NON_FINITE

_MESSAGES = {words.NON_FINITE: NON_FINITE, words.ALL_MASKED: ALL_MASKED}


def read(outputs: Outputs, slots: Sequence[int], num_logprobs: Sequence[int | None]) -> list[RowSample]:
    """The samples of the first ``len(slots)`` rows, once the device has written them to ``outputs`` in host memory.

    ``num_logprobs`` is what `DeviceSampler.num_logprobs` said when the step was launched: the slots may have passed on
    to other requests since.
    """
    tokens, errors = outputs.tokens.tolist(), outputs.errors.tolist()
    return [
        RowSample(
            slot,
            tokens[row],
            None if wanted is None or errors[row] else _logprobs(outputs, row, wanted),
            _MESSAGES.get(errors[row]),
        )
        for row, (slot, wanted) in enumerate(zip(slots, num_logprobs, strict=True))
    ]


def _logprobs(outputs: Outputs, row: int, wanted: int) -> TokenLogprobs:
    ids = outputs.top_ids[row, :wanted].tolist()
    count = ids.index(-1) if -1 in ids else wanted
    return TokenLogprobs(
        logprob=float(outputs.logprobs[row]),
        rank=int(outputs.ranks[row]),
        top_ids=ids[:count],
        top_logprobs=outputs.top_logprobs[row, :count].tolist(),
    )
