# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Where top_k and top_p end, without a sort: the last token kept in the order (logit descending, id ascending).

Both ask the same: the shortest prefix of that order whose sum reaches a target, where a token counts 1 (top_k) or
``exp(-y)`` (top_p), y >= 0 being its distance below the largest logit, divided by the temperature.

1. `survey`, twice: all programs of a row compare their chunk with LEVELS thresholds of y and add up what lies within
   each; the last to arrive finds between which two the prefix ends. The first levels are spread over the range where
   the row's large logits lie (judged by the partial maxima), the second ones over the interval that the first found.
2. `gather`: the tokens of the interval go to a list.
3. `select`: one program a row narrows the interval over the list, with LEVELS thresholds of (logit, id) at a time,
   until it holds one token. If the list overflowed, the row itself is read instead: slower, and as right.

Sums over the row are float32 within a chunk and float64 beyond, in a fixed order. The list has no order, since its
places are given out by a counter, so sums over it are whole numbers: exact in any order. A row with both limits lists
everything above its top_k interval: what top_k leaves must be added up before top_p can be a share of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from firsttoken.kernels.launch import launch, next_power_of_two
from firsttoken.kernels.sample import state as words
from firsttoken.kernels.sample.state import CHUNK, LEVELS, LISTED, NARROW, Step
from firsttoken.kernels.sample.triton import (
    HAS_TOP_K,
    HAS_TOP_P,
    WORDS,
    kernel,
    load_flags,
    load_scale,
    row_source,
    wait,
)

TOP_K = tl.constexpr(words.TOP_K)
TOP_P = tl.constexpr(words.TOP_P)
BOUNDS = tl.constexpr(words.BOUNDS)
# Words of a row of `bounds`: the interval LOW < y <= HIGH, the sum of all y <= LOW, the sum to reach, and whether the
# interval holds too many tokens for `select` to be quick.
LOW = tl.constexpr(0)
HIGH = tl.constexpr(1)
BEFORE = tl.constexpr(2)
TARGET = tl.constexpr(3)
WIDE = tl.constexpr(4)

# The first survey reaches from the largest logit to this many times its distance from the mean of the partial maxima:
# for logits that are normally distributed, beyond where top_p = 0.9 ends.
_RANGE = tl.constexpr(4.0)
_SMALLEST_RANGE = tl.constexpr(1e-3)  # nats
_LARGEST_RANGE = tl.constexpr(1e30)
_ONE = tl.constexpr(2**40)  # the weight of the most likely token, in the whole numbers that `select` adds
_FARTHEST_RANK = tl.constexpr(2**62)
ID_MASK = tl.constexpr(2**31 - 1)


@kernel
def _survey(
    logits, work, state, slots, positions, top, spread, bounds, sums, arrived,
    V: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, LEVELS: tl.constexpr, NARROW: tl.constexpr,
    AGAIN: tl.constexpr, EDITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    flags = load_flags(own)
    largest = tl.load(top + row)
    if ((flags & (HAS_TOP_K | HAS_TOP_P)) == 0) | (largest == -float("inf")):
        return
    by_count = (flags & HAS_TOP_K) != 0
    bound = bounds + row * BOUNDS
    inverse, farthest = load_scale(own)
    if AGAIN:
        if tl.load(bound + WIDE) == 0:
            return
        low, high = tl.load(bound + LOW).to(tl.float32), tl.load(bound + HIGH).to(tl.float32)
        before, target = tl.load(bound + BEFORE), tl.load(bound + TARGET)
        start = tl.maximum(low, 0.0)
        end = tl.where(high < float("inf"), high, start * LEVELS)
    else:
        low, high = tl.full([], -1.0, tl.float32), tl.full([], float("inf"), tl.float32)
        before = tl.full([], 0.0, tl.float64)
        start = tl.full([], 0.0, tl.float32)
        reach = _RANGE * tl.load(spread + row) * inverse
        end = tl.minimum(tl.maximum(reach, _SMALLEST_RANGE), _LARGEST_RANGE)
    level = tl.arange(0, LEVELS)
    # The last level is the interval's end (in the first survey: everything), so that the sum of all is known.
    levels = tl.where(level == LEVELS - 1, high, start + (end - start) * ((level + 1).to(tl.float32) / LEVELS))
    ids = part * CHUNK + tl.arange(0, CHUNK)
    source = row_source(logits, work, own, position, row, V, EDITED)
    x = tl.load(source + ids, mask=ids < V, other=-float("inf"))
    y = (largest - x) * inverse
    counted = (x > -float("inf")) & (y <= farthest) & (y > low)
    weight = tl.where(counted, tl.where(by_count, 1.0, tl.exp(-y)), 0.0)
    within = tl.sum(tl.where(y[None, :] <= levels[:, None], weight[None, :], 0.0), 1)
    tl.store(sums + (row * P + part) * LEVELS + level, within)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == P - 1:
        tl.store(arrived + row, 0)
        parts = tl.arange(0, PP)
        at = (row * P + parts[:, None]) * LEVELS + level[None, :]
        all_sums = tl.load(sums + at, mask=parts[:, None] < P, other=0.0, cache_modifier=".cg")
        up_to = before + tl.sum(all_sums.to(tl.float64), 0)
        if not AGAIN:
            whole = tl.sum(tl.where(level == LEVELS - 1, up_to, 0.0), 0)
            target = tl.where(by_count, tl.load(own + TOP_K), tl.load(own + TOP_P) * whole)
            tl.store(bound + TARGET, target)
        # The first level that reaches the target; the last when rounding keeps all from it.
        hit = tl.minimum(tl.sum((up_to < target).to(tl.int32), 0), LEVELS - 1)
        new_high = tl.sum(tl.where(level == hit, levels, 0.0), 0)
        reached = tl.sum(tl.where(level == hit, up_to, 0.0), 0)
        new_low = tl.where(hit == 0, low, tl.sum(tl.where(level == hit - 1, levels, 0.0), 0))
        new_before = tl.where(hit == 0, before, tl.sum(tl.where(level == hit - 1, up_to, 0.0), 0))
        tl.store(bound + LOW, new_low.to(tl.float64))
        tl.store(bound + HIGH, new_high.to(tl.float64))
        tl.store(bound + BEFORE, new_before)
        # Each token of the interval weighs at least exp(-new_high): that bounds how many there are.
        most = (reached - new_before).to(tl.float32) * tl.where(by_count, 1.0, tl.exp(new_high))
        tl.store(bound + WIDE, (most > NARROW).to(tl.float64))


@kernel
def _gather(
    logits, work, state, slots, positions, top, bounds, found, num_found,
    V: tl.constexpr, CHUNK: tl.constexpr, LISTED: tl.constexpr, EDITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    flags = load_flags(own)
    largest = tl.load(top + row)
    if ((flags & (HAS_TOP_K | HAS_TOP_P)) == 0) | (largest == -float("inf")):
        return
    inverse, farthest = load_scale(own)
    low, high = _listed_interval(bounds + row * BOUNDS, flags)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    source = row_source(logits, work, own, position, row, V, EDITED)
    x = tl.load(source + ids, mask=ids < V, other=-float("inf"))
    y = (largest - x) * inverse
    inside = (x > -float("inf")) & (y <= farthest) & (y > low) & (y <= high)
    count = tl.sum(inside.to(tl.int32), 0)
    if count > 0:
        first = tl.atomic_add(num_found + row, count)
        place = first + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(found + row * LISTED + place, ids, mask=inside & (place < LISTED))


@triton.jit
def _listed_interval(bound, flags):
    """Between which distances a row's candidates are listed: from 0 when both limits are set."""
    both = ((flags & HAS_TOP_K) != 0) & ((flags & HAS_TOP_P) != 0)
    low = tl.where(both, -1.0, tl.load(bound + LOW).to(tl.float32))
    return low, tl.load(bound + HIGH).to(tl.float32)


@triton.jit
def rank_of(x, ids):
    """A whole number that orders tokens as logit descending, id ascending does, largest first: the float's bits made
    ascending above, the inverted id below. |rank| <= 2**62, so differences fit in 64 bits."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & ID_MASK)
    return (ordered.to(tl.int64) << 31) | (ids ^ ID_MASK).to(tl.int64)


@triton.jit
def rank_value(rank):
    """The logit of a rank."""
    ordered = (rank >> 31).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & ID_MASK)).to(tl.float32, bitcast=True)


@triton.jit
def _candidates(source, found, start, count, listed, largest, inverse, farthest, low, high, BLOCK: tl.constexpr):
    """Rank, weight (a whole number, `_ONE` for the most likely token) and validity of BLOCK candidates."""
    at = start + tl.arange(0, BLOCK)
    live = at < count
    ids = tl.where(listed, tl.load(found + at, mask=live & listed, other=0), at)
    x = tl.load(source + ids, mask=live, other=-float("inf"))
    y = (largest - x) * inverse
    live = live & (x > -float("inf")) & (y <= farthest) & (y > low) & (y <= high)
    return rank_of(x, ids), (tl.exp(-y) * _ONE).to(tl.int64), live


@triton.jit
def _last_kept(
    source, found, count, listed, largest, inverse, farthest, low, high, from_rank, before, target,
    BY_COUNT: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank of the candidate at which the running sum, which starts at ``before``, reaches ``target``; of the last one
    when it never does. Only ranks of at least ``from_rank`` are looked at."""
    first = tl.full([], from_rank, tl.int64)
    last = tl.full([], _FARTHEST_RANK, tl.int64)
    level = tl.arange(0, LEVELS)
    searching = count > 0
    while searching:
        # Shrink the interval to what it holds; a candidate is left by construction.
        lowest = tl.full([BLOCK], _FARTHEST_RANK, tl.int64)
        highest = tl.full([BLOCK], -_FARTHEST_RANK, tl.int64)
        for start in range(0, count, BLOCK):
            rank, weight, live = _candidates(
                source, found, start, count, listed, largest, inverse, farthest, low, high, BLOCK
            )
            live = live & (rank >= first) & (rank <= last)
            lowest = tl.minimum(lowest, tl.where(live, rank, _FARTHEST_RANK))
            highest = tl.maximum(highest, tl.where(live, rank, -_FARTHEST_RANK))
        first, last = tl.min(lowest, 0), tl.max(highest, 0)
        searching = first < last
        if searching:
            width = last - first
            step = level.to(tl.int64) + 1
            # (width * step) // LEVELS without leaving 64 bits; the last threshold is `last`.
            thresholds = first + (width // LEVELS) * step + (width % LEVELS) * step // LEVELS
            above = tl.zeros([LEVELS], tl.int64)
            for start in range(0, count, BLOCK):
                rank, weight, live = _candidates(
                    source, found, start, count, listed, largest, inverse, farthest, low, high, BLOCK
                )
                live = live & (rank >= first) & (rank <= last)
                value = tl.where(live, 1 if BY_COUNT else weight, 0).to(tl.int64)
                above += tl.sum(tl.where(rank[None, :] >= thresholds[:, None], value[None, :], 0), 1)
            # Sums fall as thresholds rise: the first `hit` of them reach the target.
            hit = tl.sum((before + above >= target).to(tl.int32), 0)
            lower = tl.sum(tl.where(level == hit - 1, thresholds, 0), 0)
            upper = tl.sum(tl.where(level == hit, thresholds, 0), 0)
            first = tl.where(hit == 0, first, lower)
            last = tl.where(hit == LEVELS, last, upper - 1)
            before += tl.sum(tl.where(level == hit, above, 0), 0)
    return first


@kernel
def _select(
    logits, work, state, slots, positions, top, bounds, found, num_found, cut_value, cut_id,
    V: tl.constexpr, LEVELS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, EDITED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    flags = load_flags(own)
    largest = tl.load(top + row)
    by_count, by_mass = (flags & HAS_TOP_K) != 0, (flags & HAS_TOP_P) != 0
    if ((by_count | by_mass) == 0) | (largest == -float("inf")):
        return
    inverse, farthest = load_scale(own)
    bound = bounds + row * BOUNDS
    low, high = _listed_interval(bound, flags)
    source = row_source(logits, work, own, position, row, V, EDITED)
    count = tl.load(num_found + row)
    tl.debug_barrier()
    tl.store(num_found + row, 0)
    listed = count <= LISTED
    own_found = found + row * LISTED
    cut = tl.full([], -_FARTHEST_RANK, tl.int64)
    if count > 0:
        if listed == 0:
            count = tl.full([], V, tl.int32)
        before = tl.where(low < 0.0, 0.0, tl.load(bound + BEFORE))
        target = tl.load(bound + TARGET)
        mass_target = tl.ceil(target * _ONE).to(tl.int64)
        if by_count:
            cut = _last_kept(
                source, own_found, count, listed, largest, inverse, farthest, low, high, cut,
                before.to(tl.int64), target.to(tl.int64), True, LEVELS, BLOCK,
            )  # fmt: skip
            if by_mass:
                mass = tl.zeros([BLOCK], tl.int64)
                for start in range(0, count, BLOCK):
                    rank, weight, live = _candidates(
                        source, own_found, start, count, listed, largest, inverse, farthest, low, high, BLOCK
                    )
                    mass += tl.where(live & (rank >= cut), weight, 0)
                mass_target = tl.ceil(tl.load(own + TOP_P) * tl.sum(mass, 0).to(tl.float64)).to(tl.int64)
        if by_mass:
            cut = _last_kept(
                source, own_found, count, listed, largest, inverse, farthest, low, high, cut,
                (before * _ONE).to(tl.int64), mass_target, False, LEVELS, BLOCK,
            )  # fmt: skip
        tl.store(cut_value + row, rank_value(cut))
        tl.store(cut_id + row, ((cut & ID_MASK) ^ ID_MASK).to(tl.int32))
    else:
        tl.store(cut_value + row, -float("inf"))
        tl.store(cut_id + row, -1)


def search(step: Step, *, edited: bool = False) -> None:
    """Find the last token that top_k and top_p keep of each random row that has one of them, into the scratch's
    ``cut_value`` and ``cut_id``. `finish` must have run."""
    scratch = step.scratch
    vocab, rows, pdl = step.vocab_size, step.rows, step.pdl
    chunks = words.num_chunks(vocab)
    work = step.rich.work if step.rich is not None else step.logits
    row = (step.logits, work, step.state, step.slots, step.positions, scratch.top)
    for again in (False, True):
        launch(
            _survey, (chunks, rows), *row, scratch.spread, scratch.bounds, scratch.sums, scratch.arrived, V=vocab,
            CHUNK=CHUNK, P=chunks, PP=next_power_of_two(chunks), LEVELS=LEVELS, NARROW=NARROW, AGAIN=again,
            EDITED=edited, pdl=pdl, num_warps=4,
        )  # fmt: skip
    launch(
        _gather, (chunks, rows), *row, scratch.bounds, scratch.found, scratch.num_found, V=vocab, CHUNK=CHUNK,
        LISTED=LISTED, EDITED=edited, pdl=pdl, num_warps=4,
    )  # fmt: skip
    launch(
        _select, (rows,), *row, scratch.bounds, scratch.found, scratch.num_found, scratch.cut_value, scratch.cut_id,
        V=vocab, LEVELS=LEVELS, LISTED=LISTED, BLOCK=512, EDITED=edited, pdl=pdl, num_warps=8,
    )  # fmt: skip
