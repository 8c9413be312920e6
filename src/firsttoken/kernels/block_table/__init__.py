"""Appending blocks to the block tables of rows that run."""

from __future__ import annotations

from torch import Tensor


def patch_blocks(patches: Tensor, tables: Tensor, *, pdl: bool) -> None:
    """``tables[slot, index] = block`` for each ``(slot, index, block)`` of ``patches`` int32 ``[P, 3]``; slot -1 is
    padding. ``tables`` int32 ``[slots, W]``."""
    from firsttoken.kernels.block_table.triton import BLOCK, patch_kernel
    from firsttoken.kernels.launch import launch

    count = patches.shape[0]
    launch(patch_kernel, (-(-count // BLOCK),), patches, tables, tables.stride(0), count, pdl=pdl, num_warps=1)
