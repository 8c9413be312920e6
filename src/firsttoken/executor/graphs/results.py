"""From the device's results to the host's: a step's last kernel writes them to its place of a pinned ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken.core.plan import RowSample
from firsttoken.executor.graphs.runtime import Runtime
from firsttoken.kernels.sample.state import MAX_TOP, Outputs
from firsttoken.kernels.step_io import end_step
from firsttoken.sampling.device.params import Needs
from firsttoken.sampling.device.results import HostOutputs, read

# Words a row: token, error | log-probability, rank, alternatives and theirs.
_SHORT, _LONG = 2, 4 + 2 * MAX_TOP


class ResultRing:
    """``outputs`` is where the sampling kernels write, for ``rows`` rows; `send` has it copied to the place of the ring
    whose turn it is by ``state``, `read` decodes that.

    Every step sends tokens and errors; only those with log-probabilities send the rest.
    """

    def __init__(self, rows: int, places: int, state: Tensor, runtime: Runtime) -> None:
        rows = -(-rows // 16) * 16  # the kernel moves 16 bytes at once
        self._state = state
        self._device = torch.zeros(rows * _LONG, dtype=torch.int32, device=runtime.device)
        self._ring = runtime.pinned(places * rows * _LONG).view(places, -1)
        self._times = runtime.pinned(places * 4).view(torch.int64).view(places, 2)
        self._short = self._device[: rows * _SHORT]
        self._host = [HostOutputs.of(_views(words, rows)) for words in self._ring]
        self._host_times = list(self._times.numpy())
        self.outputs = _views(self._device, rows)

    def send(self, needs: Needs, *, pdl: bool) -> None:
        """Launch what ends the step: results and times go to its place, and the next one's turn comes."""
        words = self._device if needs & Needs.LOGPROBS else self._short
        end_step(words, self._ring, self._times, self._state, pdl=pdl)

    def read(self, place: int, slots: Sequence[int], wanted: Sequence[int | None]) -> list[RowSample]:
        """The samples of the first rows, once the step's end has passed; ``wanted`` alternatives each."""
        return read(self._host[place], slots, wanted)

    def times(self, place: int) -> tuple[int, int]:
        """When the step's first kernel began and its last ended, by the device's clock, once its end has passed."""
        began, ended = self._host_times[place].tolist()
        return int(began), int(ended)


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
