"""Persistent rows on a device with a stream: tokens and block tables, changed only by work in the stream's order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from firsttoken.core.plan import RowBlocks, RowStart

# Words of each ring slot's staging area: a start beyond it takes fresh pinned memory.
STAGING_WORDS = 1 << 18


class Staging:
    """A pinned area for what one step sends besides its inputs. Free again when that step is done."""

    def __init__(self, words: Tensor) -> None:
        self._words = words
        self._numpy = words.numpy()
        self._used = 0

    def reset(self) -> None:
        self._used = 0

    def put(self, values: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Tensor:
        """A host tensor with the values, ready for an asynchronous copy."""
        end = self._used + len(values)
        if end > len(self._numpy):
            fresh = torch.from_numpy(values.copy())
            return fresh.pin_memory() if torch.cuda.is_available() else fresh
        self._numpy[self._used : end] = values
        part = self._words[self._used : end]
        self._used = end
        return part


class StreamRows:
    """``tokens [slots, max_tokens + 1]`` and ``block_tables [slots, blocks]``, int32 on the device.

    Invariant, in stream order: after a plan's changes, ``tokens[slot, :known]`` hold the known tokens of the slot's
    request and ``block_tables[slot, :count]`` its blocks.
    """

    def __init__(self, slots: int, max_tokens: int, block_tokens: int, device: torch.device) -> None:
        # One position more than the longest request: the last sampled token is stored but never computed.
        self.tokens = torch.zeros((slots, max_tokens + 1), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((slots, -(-max_tokens // block_tokens)), dtype=torch.int32, device=device)
        self._num_blocks = [0] * slots

    def start(self, row: RowStart, staging: Staging) -> None:
        """Send all known tokens and blocks of a request that takes its slot."""
        known = np.frombuffer(row.tokens, dtype="<u4").astype(np.int32)
        self.tokens[row.slot, : len(known)].copy_(staging.put(known), non_blocking=True)
        blocks = np.array(row.blocks, dtype=np.int32)
        self.block_tables[row.slot, : len(blocks)].copy_(staging.put(blocks), non_blocking=True)
        self._num_blocks[row.slot] = len(blocks)

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
            value = staging.put(np.array([block], dtype=np.int32))
            self.block_tables[slot, index : index + 1].copy_(value, non_blocking=True)
