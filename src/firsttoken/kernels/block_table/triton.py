"""Appending blocks in one small kernel at the head of a step."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 64


@triton.jit(do_not_specialize=["COUNT"])
def patch_kernel(patches, tables, stride, COUNT, PDL: tl.constexpr):
    """Each lane takes one ``(slot, index, block)``; slots below 0 are padding."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    patch = tl.program_id(0) * 64 + tl.arange(0, 64)
    live = patch < COUNT
    slot = tl.load(patches + patch * 3, mask=live, other=-1)
    live &= slot >= 0
    index = tl.load(patches + patch * 3 + 1, mask=live, other=0)
    block = tl.load(patches + patch * 3 + 2, mask=live, other=0)
    tl.store(tables + slot.to(tl.int64) * stride + index, block, mask=live)
