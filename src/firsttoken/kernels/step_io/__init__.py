"""The first and the last kernel of a step: its inputs from pinned host memory, its results back into it; and the one
that goes before a step in which requests start.

The first and the last find their place of the host's rings by a counter on the device, which the last moves on. So one
captured graph serves every place, and the host starts nothing but the graph. Host and device stay in step because each
step launches the two once, in the order in which the host hands out places.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Words of `StepRings.state`: the place of the rings whose turn it is, and when its step began.
PLACE, BEGAN = 0, 1
# Words of a start's head: its slot (-1: padding), where its values begin, how many are tokens, how many are blocks.
HEAD_WORDS = 4


def new_state(device: torch.device) -> Tensor:
    """What the kernels keep from step to step, int64 ``[2]``: the first step has place 0."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def begin_step(inputs: Tensor, ring: Tensor, state: Tensor, patches: Tensor, tables: Tensor) -> None:
    """Copy the place's inputs to the device and append the blocks that they name to the block tables.

    ``inputs`` int32 ``[words]`` on the device receives as many words of its place of ``ring``, pinned int32
    ``[places, words or more]``. ``patches`` int32 ``[P, 3]``, part of ``inputs``, are then ``(slot, index, block)``
    each, which become ``tables[slot, index] = block``; slot -1 is padding. ``tables`` int32 ``[slots, W]``. ``state``
    is that of `new_state`. Never launched dependently: what follows may count on all of it.
    """
    from firsttoken.kernels.launch import launch
    from firsttoken.kernels.step_io.triton import BLOCK, COMPILED, LANES, begin_kernel

    sizes = (inputs.shape[0], ring.stride(0), tables.stride(0), patches.shape[0])
    launch(
        begin_kernel, (1,), inputs, ring, state, patches, tables, *sizes, BLOCK=BLOCK, LANES=LANES, COMPILED=COMPILED,
        pdl=False, num_warps=8,
    )  # fmt: skip


def start_rows(
    tokens: Tensor, tables: Tensor, state: Tensor, staging: Tensor, at: int, count: int, longest: int
) -> None:
    """Bring ``count`` starts (1 or more) from the host to the rows of their slots, in one launch.

    ``staging``, pinned int32, holds from word ``at`` on ``count`` heads of HEAD_WORDS, whose second word counts from
    ``at`` too. A start's values are its known tokens, its blocks and its row of ``state``, one after the other; they
    become the first words of its rows of ``tokens`` int32 ``[slots, L]``, ``tables`` int32 ``[slots, W]`` and all of
    that of ``state`` int32 ``[slots, S]``. Slots differ. ``longest`` is about as many words as the longest start has:
    it decides how many programs share one. Never launched dependently, and what follows may count on all of it.
    """
    from firsttoken.kernels.launch import cdiv, launch
    from firsttoken.kernels.step_io.triton import MOST_PARTS, START_BLOCK, start_kernel

    grid = (count, max(1, min(MOST_PARTS, cdiv(longest, START_BLOCK))))
    sizes = (tokens.stride(0), tables.stride(0), at)
    launch(
        start_kernel, grid, tokens, tables, state, staging, *sizes, HEAD=HEAD_WORDS, STATE=state.shape[1],
        BLOCK=START_BLOCK, pdl=False, num_warps=4,
    )  # fmt: skip


def end_step(outputs: Tensor, ring: Tensor, times: Tensor, state: Tensor, *, pdl: bool) -> None:
    """Copy ``outputs`` int32 ``[words]`` to the place's part of ``ring``, pinned int32 ``[places, words or more]``, the
    device's times of the step's begin and end (ns) to ``times``, pinned int64 ``[places, 2]``, and pass to the next
    place. Interpreted kernels have no clock: both times are 0."""
    from firsttoken.kernels.launch import launch
    from firsttoken.kernels.step_io.triton import COMPILED, END_BLOCK, end_kernel

    sizes = (outputs.shape[0], ring.stride(0))
    launch(
        end_kernel, (1,), outputs, ring, times, state, *sizes, PLACES=ring.shape[0], BLOCK=END_BLOCK, COMPILED=COMPILED,
        pdl=pdl, num_warps=8,
    )  # fmt: skip
