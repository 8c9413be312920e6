"""From the device's results to the host's: one small copy a step into a ring of pinned places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken.core.plan import RowSample
from firsttoken.executor.graphs.runtime import Runtime
from firsttoken.kernels.sample.state import MAX_TOP, Outputs
from firsttoken.sampling.device.params import Needs
from firsttoken.sampling.device.results import read

# Words a row: token, error | log-probability, rank, alternatives and theirs.
_SHORT, _LONG = 2, 4 + 2 * MAX_TOP


class ResultRing:
    """``outputs`` is where the sampling kernels write; `send` copies it to a place of the ring, `read` decodes that.

    Every step sends tokens and errors; only those with log-probabilities send the rest.
    """

    def __init__(self, rows: int, places: int, runtime: Runtime) -> None:
        self._device = torch.zeros(rows * _LONG, dtype=torch.int32, device=runtime.device)
        pinned = [runtime.pinned(rows * _LONG) for _ in range(places)]
        self._host = [_views(words, rows) for words in pinned]
        # (pinned, device) of each place, made once: a step makes no views.
        self._short = [(words[: rows * _SHORT], self._device[: rows * _SHORT]) for words in pinned]
        self._long = [(words, self._device) for words in pinned]
        self.outputs = _views(self._device, rows)

    def send(self, place: int, needs: Needs) -> None:
        """Start the copy, in stream order."""
        pinned, device = (self._long if needs & Needs.LOGPROBS else self._short)[place]
        pinned.copy_(device, non_blocking=True)

    def read(self, place: int, slots: Sequence[int], wanted: Sequence[int | None]) -> list[RowSample]:
        """The samples of the first rows, once the step's end has passed; ``wanted`` alternatives each."""
        return read(self._host[place], slots, wanted)


def _views(words: Tensor, rows: int) -> Outputs:
    sizes = [rows, rows, rows, rows, rows * MAX_TOP, rows * MAX_TOP]
    tokens, errors, logprobs, ranks, top_ids, top_logprobs = torch.split(words, sizes)
    return Outputs(
        tokens=tokens,
        errors=errors,
        logprobs=logprobs.view(torch.float32),
        ranks=ranks,
        top_ids=top_ids.view(rows, MAX_TOP),
        top_logprobs=top_logprobs.view(torch.float32).view(rows, MAX_TOP),
    )
