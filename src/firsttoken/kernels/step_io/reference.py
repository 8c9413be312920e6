"""A step's inputs and results, moved by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from firsttoken.kernels.step_io import BEGAN, HEAD_WORDS, PLACE


def begin_step(inputs: Tensor, ring: Tensor, state: Tensor, patches: Tensor, tables: Tensor) -> None:
    """As `kernels.step_io.begin_step`."""
    inputs.copy_(ring[int(state[PLACE]), : inputs.shape[0]])
    state[BEGAN] = 0
    for slot, index, block in patches.tolist():
        if slot >= 0:
            tables[slot, index] = block


@torch.inference_mode()  # a kernel asks for no mode
def start_rows(
    tokens: Tensor, tables: Tensor, state: Tensor, staging: Tensor, at: int, count: int, longest: int
) -> None:
    """As `kernels.step_io.start_rows`."""
    words = staging[at:]
    for slot, first, known, held in words[: count * HEAD_WORDS].view(count, HEAD_WORDS).tolist():
        if slot >= 0:
            parts = [known, held, state.shape[1]]
            values = torch.split(words[first : first + sum(parts)], parts)
            for target, part in zip((tokens, tables, state), values, strict=True):
                target[slot, : len(part)] = part


def end_step(outputs: Tensor, ring: Tensor, times: Tensor, state: Tensor, *, pdl: bool) -> None:
    """As `kernels.step_io.end_step`."""
    place = int(state[PLACE])
    ring[place, : outputs.shape[0]] = outputs
    times[place, 0], times[place, 1] = state[BEGAN], 0
    state[PLACE] = (place + 1) % ring.shape[0]
