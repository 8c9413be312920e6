"""How the programs of one (row, KV head) leave their parts of the softmax, and how one of them combines these.

A part is a normalised result ``[heads, D]`` with the log2 of its softmax sum as weight. Which of the two ways is taken
is the config's; `triton_decode` describes them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A NaN that arithmetic never makes: the hardware's own NaN is 0x7fffffff, and bf16 inputs have zeros at the end.
_EMPTY = tl.constexpr(-1)
# About a second of reading: a lost part becomes NaN, which the sampler reports, and never a hang.
_MAX_READS = tl.constexpr(1 << 20)


@triton.jit
def leave_part(
    parts, weights, cell, weight, part, GROUP: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Store a split's normalised ``part [R, DP]`` and the log2 of its softmax sum, ``weight [R]``."""
    offs_g = tl.arange(0, R)
    offs_d = tl.arange(0, DP)
    mine = cell * GROUP + offs_g
    whole = (offs_g < GROUP)[:, None] & (offs_d < D)[None, :]
    tl.store(weights + mine, _bits(weight), mask=offs_g < GROUP)
    tl.store(parts + mine.to(tl.int64)[:, None] * D + offs_d[None, :], _bits(part), mask=whole)


@triton.jit
def _bits(x):
    """Bits of float32 ``x``, with another NaN in place of the one that means "not yet written"."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits == _EMPTY, 0x7FFFFFFF, bits)


@triton.jit
def combine_last(
    parts,
    weights,
    target,
    counter,
    cell,
    active,
    GROUP: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLITS: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Count this part as there; who comes last of ``active`` splits and the new token combines them all."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if before == active:
        tl.store(counter, 0)
        offs_g = tl.arange(0, GROUP_PARTS)
        offs_d = tl.arange(0, DP)
        newest = (cell + active) * GROUP + offs_g
        whole = (offs_g < GROUP)[:, None] & (offs_d < D)[None, :]
        own = tl.load(weights + newest, mask=offs_g < GROUP, other=0, cache_modifier=".cg")
        at = parts + newest.to(tl.int64)[:, None] * D + offs_d[None, :]
        new_v = tl.load(at, mask=whole, other=0, cache_modifier=".cg")
        combine_parts(
            parts, weights, target, cell, active, own.to(tl.float32, bitcast=True), new_v.to(tl.float32, bitcast=True),
            GROUP, GROUP_PARTS, D, DP, SPLITS, COMBINED, False, False, False,
        )  # fmt: skip


@triton.jit
def combine_parts(
    parts,
    weights,
    target,
    cell,
    count,
    own,
    new_v,
    GROUP: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    MOST: tl.constexpr,
    COMBINED: tl.constexpr,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Add to the new token's part (weight ``own [GROUP_PARTS]``, values ``new_v``) ``count`` (at most ``MOST``) others
    in their order, and store the rows of ``target``.

    ``COPIES``: ``COMBINED`` parts are so few elements that several threads hold the same.
    """
    offs_g = tl.arange(0, GROUP_PARTS)
    offs_d = tl.arange(0, DP)
    heads_in = offs_g < GROUP
    whole = heads_in[:, None] & (offs_d < D)[None, :]
    top, total, acc = own, tl.full([GROUP_PARTS], 1.0, tl.float32), new_v
    for first in tl.static_range(0, MOST, COMBINED):
        if first < count:
            # Heads come first so that each warp takes heads, and the sum over parts stays within a thread.
            offs_s = first + tl.arange(0, COMBINED)
            there = (offs_s < count)[None, :]
            cells = (cell + offs_s)[None, :] * GROUP + offs_g[:, None]
            cells_in = there & heads_in[:, None]
            at = parts + cells.to(tl.int64)[:, :, None] * D + offs_d[None, None, :]
            at_in = there[:, :, None] & whole[:, None, :]
            if WORDS:
                weight, part = _read_words(weights + cells, cells_in, at, at_in, COMPILED, COMPILED and COPIES)
            else:
                weight = tl.load(weights + cells, mask=cells_in, other=0, cache_modifier=".cg")
                part = tl.load(at, mask=at_in, other=0, cache_modifier=".cg")
            weight = tl.where(there, weight.to(tl.float32, bitcast=True), float("-inf"))
            grown = tl.maximum(top, tl.max(weight, 1))
            shrink = tl.exp2(top - grown)
            factor = tl.exp2(weight - grown[:, None])
            total = total * shrink + tl.sum(factor, 1)
            acc = acc * shrink[:, None] + tl.sum(part.to(tl.float32, bitcast=True) * factor[:, :, None], 1)
            top = grown
    result = acc / total[:, None]
    tl.store(target + offs_g[:, None] * D + offs_d[None, :], result.to(target.dtype.element_ty), mask=whole)


@triton.jit
def _read_words(weights_at, weights_in, parts_at, parts_in, SETTLE_WEIGHTS: tl.constexpr, SETTLE_PARTS: tl.constexpr):
    """Read until every word has been written, then mark all of them as not written for the next launch.

    A word is whole by itself (32 bits), so no order between words is needed, and no fence. The loop asks one thread for
    each word of the parts; ``SETTLE_*`` let every thread look at its own copies.
    """
    weight = tl.load(weights_at, mask=weights_in, other=0, volatile=True)
    part = tl.load(parts_at, mask=parts_in, other=0, volatile=True)
    missing = tl.max((part == _EMPTY).to(tl.int32))
    reads = 0
    while (missing > 0) & (reads < _MAX_READS):
        weight = tl.load(weights_at, mask=weights_in, other=0, volatile=True)
        part = tl.load(parts_at, mask=parts_in, other=0, volatile=True)
        missing = tl.max((part == _EMPTY).to(tl.int32))
        reads += 1
    if SETTLE_WEIGHTS:
        weight = _settled(weight, weights_at)
    if SETTLE_PARTS:
        part = _settled(part, parts_at)
    tl.debug_barrier()
    tl.store(weights_at, tl.full(weight.shape, _EMPTY, tl.int32), mask=weights_in)
    tl.store(parts_at, tl.full(part.shape, _EMPTY, tl.int32), mask=parts_in)
    return weight, part


@triton.jit
def _settled(word, at):
    """``word``, read again from ``at`` by the thread that holds it for as long as it is not written (bounded)."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred again;
        .reg .b32 left;
        mov.b32 $0, $1;
        mov.b32 left, 65536;
        look:
        setp.eq.b32 again, $0, -1;
        @!again bra done;
        ld.volatile.global.b32 $0, [$2];
        sub.s32 left, left, 1;
        setp.ne.s32 again, left, 0;
        @again bra look;
        done:
        }""",
        "=&r,r,l",
        [word, at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
