"""Persistent rows on the device: each running request's tokens and block table, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from firsttoken.core.plan import RowBlocks, RowStart


class DeviceRows:
    """``tokens[slot, position]`` (int32) and ``block_tables[slot, i]`` (int64), both on the device.

    Invariant: after a plan's changes are applied, ``tokens[slot, :known]`` hold the known tokens of the slot's
    request and ``block_tables[slot, :count]`` its blocks in order.
    """

    def __init__(self, slots: int, max_tokens: int, block_tokens: int, device: str) -> None:
        # One position more than the longest request: the last sampled token is stored but never computed.
        self.tokens = torch.zeros((slots, max_tokens + 1), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((slots, -(-max_tokens // block_tokens)), dtype=torch.int64, device=device)
        self._num_blocks = [0] * slots

    def start(self, row: RowStart) -> None:
        known = np.frombuffer(row.tokens, dtype="<u4").astype(np.int32)
        self.tokens[row.slot, : len(known)] = torch.from_numpy(known)
        self._num_blocks[row.slot] = 0
        self.add_blocks(RowBlocks(row.slot, row.blocks))

    def add_blocks(self, row: RowBlocks) -> None:
        at = self._num_blocks[row.slot]
        end = at + len(row.blocks)
        self.block_tables[row.slot, at:end] = torch.tensor(row.blocks, dtype=torch.int64)
        self._num_blocks[row.slot] = end

    def gather(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Input tokens ``[T]`` int64 of the given rows and positions (both ``[T]`` int64)."""
        return self.tokens[slots, positions].long()

    def append(self, slots: Sequence[int], positions: Sequence[int], tokens: torch.Tensor) -> None:
        """Store the chosen tokens ``[R]`` where the next step reads them, without a trip through the host."""
        device = self.tokens.device
        self.tokens[torch.tensor(slots, device=device), torch.tensor(positions, device=device)] = tokens.to(torch.int32)
