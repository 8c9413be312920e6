"""Persistent rows on a device with a stream: tokens and block tables, changed only by work in the stream's order."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firsttoken.core.plan import RowBlocks, RowStart
from firsttoken.kernels.step_io import HEAD_WORDS, start_rows

# Words of each ring slot's staging area: starts beyond it take fresh pinned memory.
STAGING_WORDS = 1 << 18


@dataclass(frozen=True, slots=True)
class Area:
    """Room in pinned memory: words of ``pinned`` from ``at`` on, and the same as the host writes them."""

    pinned: Tensor
    at: int
    ints: memoryview


class Staging:
    """A pinned area for what one step sends besides its inputs. Free again when that step is done."""

    def __init__(self, words: Tensor) -> None:
        self._words = words
        self._ints = words.numpy().data
        self._used = 0
        self._fresh: list[Tensor] = []

    def reset(self) -> None:
        self._used = 0
        self._fresh.clear()

    def take(self, words: int) -> Area:
        """Room for so many words."""
        at, end = self._used, self._used + words
        if end > len(self._ints):
            fresh = torch.empty(words, dtype=torch.int32, pin_memory=torch.cuda.is_available())
            self._fresh.append(fresh)  # torch, which knows nothing of kernels that read it, would hand it out again
            return Area(fresh, 0, fresh.numpy().data)
        self._used = end
        return Area(self._words, at, self._ints[at:end])


class StreamRows:
    """``tokens [slots, max_tokens + 1]`` and ``block_tables [slots, blocks]``, int32 on the device.

    Invariant, in stream order: after a plan's changes, ``tokens[slot, :known]`` hold the known tokens of the slot's
    request and ``block_tables[slot, :count]`` its blocks. The sampler's ``state``, int32 ``[slots, S]``, is written
    when a request takes a slot, together with these.
    """

    def __init__(self, max_tokens: int, block_tokens: int, state: Tensor) -> None:
        slots, device = state.shape[0], state.device
        # One position more than the longest request: the last sampled token is stored but never computed.
        self.tokens = torch.zeros((slots, max_tokens + 1), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((slots, -(-max_tokens // block_tokens)), dtype=torch.int32, device=device)
        self._state = state
        self._num_blocks = [0] * slots

    def start(self, rows: Sequence[RowStart], states: Sequence[NDArray[np.float64]], staging: Staging) -> None:
        """Send all known tokens, the blocks and the sampler's state of requests that take their slots: one launch."""
        values = [
            (memoryview(row.tokens).cast("i"), array("i", row.blocks), state.view(np.int32).data)
            for row, state in zip(rows, states, strict=True)
        ]
        first = HEAD_WORDS * len(rows)
        area = staging.take(first + sum(len(part) for parts in values for part in parts))
        heads = array("i")
        for row, parts in zip(rows, values, strict=True):
            heads.extend((row.slot, first, len(parts[0]), len(row.blocks)))
            for part in parts:
                area.ints[first : first + len(part)] = part
                first += len(part)
            self._num_blocks[row.slot] = len(row.blocks)
        area.ints[: len(heads)] = heads
        self._launch(area, len(rows), max(len(known) for known, _, _ in values))

    def start_padding(self, staging: Staging) -> None:
        """Launch what a start launches, for no row."""
        area = staging.take(HEAD_WORDS)
        area.ints[:] = array("i", (-1, 0, 0, 0))
        self._launch(area, 1, 0)

    def _launch(self, area: Area, count: int, longest: int) -> None:
        start_rows(self.tokens, self.block_tables, self._state, area.pinned, area.at, count, longest)

    def patches(self, added: list[RowBlocks]) -> list[tuple[int, int, int]]:
        """``(slot, index, block)`` for each appended block; the step's inputs carry them to the device."""
        patches: list[tuple[int, int, int]] = []
        for row in added:
            at = self._num_blocks[row.slot]
            patches.extend((row.slot, at + i, block) for i, block in enumerate(row.blocks))
            self._num_blocks[row.slot] = at + len(row.blocks)
        return patches

    def append(self, patches: list[tuple[int, int, int]], staging: Staging) -> None:
        """Write patches now, one copy each: for more of them than a step's inputs have room for."""
        for slot, index, block in patches:
            area = staging.take(1)
            area.ints[0] = block
            value = area.pinned[area.at : area.at + 1]
            self.block_tables[slot, index : index + 1].copy_(value, non_blocking=True)
