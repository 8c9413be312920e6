"""A step's inputs and results, moved by torch."""

from __future__ import annotations

from torch import Tensor

from firsttoken.kernels.step_io import BEGAN, PLACE


def begin_step(inputs: Tensor, ring: Tensor, state: Tensor, patches: Tensor, tables: Tensor) -> None:
    """As `kernels.step_io.begin_step`."""
    inputs.copy_(ring[int(state[PLACE]), : inputs.shape[0]])
    state[BEGAN] = 0
    for slot, index, block in patches.tolist():
        if slot >= 0:
            tables[slot, index] = block


def end_step(outputs: Tensor, ring: Tensor, times: Tensor, state: Tensor, *, pdl: bool) -> None:
    """As `kernels.step_io.end_step`."""
    place = int(state[PLACE])
    ring[place, : outputs.shape[0]] = outputs
    times[place, 0], times[place, 1] = state[BEGAN], 0
    state[PLACE] = (place + 1) % ring.shape[0]
