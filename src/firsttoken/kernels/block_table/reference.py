"""Appending blocks, one by one."""

from __future__ import annotations

from torch import Tensor


def patch_blocks(patches: Tensor, tables: Tensor) -> None:
    """As `kernels.block_table.patch_blocks`."""
    for slot, index, block in patches.tolist():
        if slot >= 0:
            tables[slot, index] = block
