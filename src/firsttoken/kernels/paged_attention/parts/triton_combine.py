"""How the programs that share a (row, KV head) leave their parts of the softmax, and how the last of them combines all.

A part is a normalised result ``[heads, D]`` with the log2 of its softmax sum as weight.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def leave_part(
    parts, weights, cell, weight, part, GROUP: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Store a normalised ``part [R, DP]`` and the log2 of its softmax sum, ``weight [R]``, in ``cell``."""
    offs_g = tl.arange(0, R)
    offs_d = tl.arange(0, DP)
    mine = cell * GROUP + offs_g
    whole = (offs_g < GROUP)[:, None] & (offs_d < D)[None, :]
    tl.store(weights + mine, weight, mask=offs_g < GROUP)
    tl.store(parts + mine.to(tl.int64)[:, None] * D + offs_d[None, :], part, mask=whole)


@triton.jit
def combine_last(
    parts,
    weights,
    target,
    counter,
    cell,
    count,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Count this part as there; who comes last of ``count`` resets the counter, combines the parts in the order of
    their cells, from ``cell`` on, ``COMBINED`` at a time, and stores the rows of ``target``."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if before == count - 1:
        tl.store(counter, 0)
        offs_g = tl.arange(0, R)
        offs_d = tl.arange(0, DP)
        heads_in = offs_g < GROUP
        whole = heads_in[:, None] & (offs_d < D)[None, :]
        top = tl.full([R], float("-inf"), tl.float32)
        total = tl.zeros([R], tl.float32)
        acc = tl.zeros([R, DP], tl.float32)
        for first in range(0, count, COMBINED):
            # Heads come first so that each warp takes heads, and the sum over parts stays within a thread.
            offs_s = first + tl.arange(0, COMBINED)
            there = (offs_s < count)[None, :]
            cells = (cell + offs_s)[None, :] * GROUP + offs_g[:, None]
            at = parts + cells.to(tl.int64)[:, :, None] * D + offs_d[None, None, :]
            weight = tl.load(weights + cells, mask=there & heads_in[:, None], other=0.0, cache_modifier=".cg")
            part = tl.load(at, mask=there[:, :, None] & whole[:, None, :], other=0.0, cache_modifier=".cg")
            weight = tl.where(there, weight, float("-inf"))
            grown = tl.maximum(top, tl.max(weight, 1))
            shrink = tl.exp2(top - grown)
            factor = tl.exp2(weight - grown[:, None])
            total = total * shrink + tl.sum(factor, 1)
            acc = acc * shrink[:, None] + tl.sum(part * factor[:, :, None], 1)
            top = grown
        result = acc / total[:, None]
        tl.store(target + offs_g[:, None] * D + offs_d[None, :], result.to(target.dtype.element_ty), mask=whole)
