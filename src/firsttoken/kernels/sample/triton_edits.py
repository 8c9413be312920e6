# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What changes a row's logits before a token is chosen: mask, bias, minimum length, penalties, in this order.

The raw logits stay as they are, for the log-probabilities: rows with edits get a copy. Penalties keep no state of their
own: each step counts the row's tokens in the table, so a row that is preempted and comes back is none the wiser. Who
first takes a token's count away (and leaves 0 for the next step) penalises the token; all see the same count, so it
does not matter who.
"""

from __future__ import annotations

import triton
import triton.language as tl

from firsttoken.kernels.launch import launch
from firsttoken.kernels.sample import state as words
from firsttoken.kernels.sample.state import TILE, Step
from firsttoken.kernels.sample.triton import (
    HAS_MIN_TOKENS,
    MIN_TOKENS,
    NUM_PROMPT,
    TILES_AT_ONCE,
    WORDS,
    is_edited,
    kernel,
    load_flags,
    store_maxima,
    wait,
)

PRESENCE = tl.constexpr(words.PRESENCE)
FREQUENCY = tl.constexpr(words.FREQUENCY)
REPETITION = tl.constexpr(words.REPETITION)
NUM_BIAS = tl.constexpr(words.NUM_BIAS)
NUM_STOPS = tl.constexpr(words.NUM_STOPS)
HAS_PENALTIES = tl.constexpr(words.HAS_PENALTIES)
HAS_MASK = tl.constexpr(words.HAS_MASK)
# A token's count: this bit when it is in the prompt, plus how often it was generated.
_IN_PROMPT = tl.constexpr(1 << 30)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_BLOCK = 1024


@kernel
def _copy(
    logits, work, masks, state, slots, positions, values, indices,
    V: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    if is_edited(own, position):
        tiles = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
        ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        at = row.to(tl.int64) * V + ids
        x = tl.load(logits + at, mask=ids < V, other=-float("inf"))
        if (load_flags(own) & HAS_MASK) != 0:
            # Each word is read once, and past the caches: it may lie on the host, who has just written it.
            mask_words = (V + 31) // 32
            first = tl.program_id(0) * (AT_ONCE * TILE // 32) + tl.arange(0, AT_ONCE * TILE // 32)
            line = masks + row.to(tl.int64) * mask_words
            word = tl.load(line + first, mask=first < mask_words, other=0, volatile=True)
            places = tl.arange(0, AT_ONCE * TILE)
            allowed = tl.reshape((tl.gather(word, places // 32, 0) >> (places % 32)) & 1, (AT_ONCE, TILE))
            x = tl.where(allowed != 0, x, -float("inf"))
        tl.store(work + at, x, mask=ids < V)
        store_maxima(x, ids, values + row * TILES, indices + row * TILES, tiles, V, TILES)


@triton.jit
def _change_listed(work, ids, values, own, position, BLOCK: tl.constexpr):
    """Add the bias; forbid the stop ids, which stand behind it in the list, while the output is too short."""
    num_bias = tl.load(own + NUM_BIAS).to(tl.int32)
    at = tl.arange(0, BLOCK)
    for start in range(0, num_bias, BLOCK):
        mask = start + at < num_bias
        token = tl.load(ids + start + at, mask=mask, other=0)
        biased = tl.load(work + token, mask=mask) + tl.load(values + start + at, mask=mask)
        tl.store(work + token, biased, mask=mask)
    tl.debug_barrier()  # an id may be in both parts
    forbidden = position - tl.load(own + NUM_PROMPT).to(tl.int32) < tl.load(own + MIN_TOKENS).to(tl.int32)
    if ((load_flags(own) & HAS_MIN_TOKENS) != 0) & forbidden:
        end = num_bias + tl.load(own + NUM_STOPS).to(tl.int32)
        for start in range(num_bias, end, BLOCK):
            mask = start + at < end
            token = tl.load(ids + start + at, mask=mask, other=0)
            tl.store(work + token, -float("inf"), mask=mask)


@kernel
def _count(
    work, counts, state, slots, positions, table, ids, values, capacity, L,
    V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (0, row) applies the row's lists, program (i + 1, row) counts the i-th block of its tokens."""
    wait(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    if part == 0:
        if is_edited(own, position):
            listed = slot.to(tl.int64) * capacity
            _change_listed(work + row.to(tl.int64) * V, ids + listed, values + listed, own, position, BLOCK)
    elif (load_flags(own) & HAS_PENALTIES) != 0:
        at = (part - 1) * BLOCK + tl.arange(0, BLOCK)
        known = at < position
        token = tl.load(table + slot.to(tl.int64) * L + at, mask=known, other=0)
        known = known & (token >= 0) & (token < V)
        place = counts + row.to(tl.int64) * V + token
        generated = at >= tl.load(own + NUM_PROMPT).to(tl.int32)
        tl.atomic_add(place, 1, mask=known & generated, sem="relaxed")
        tl.atomic_or(place, _IN_PROMPT, mask=known & (generated == 0), sem="relaxed")


@kernel
def _penalise(
    work, counts, state, slots, positions, table, L,
    V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    if (load_flags(own) & HAS_PENALTIES) == 0:
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < position
    token = tl.load(table + slot.to(tl.int64) * L + at, mask=known, other=0)
    known = known & (token >= 0) & (token < V)
    place = row.to(tl.int64) * V + token
    count = tl.atomic_xchg(counts + place, 0, mask=known, sem="relaxed")
    mine = known & (count != 0)
    outputs = (count & (_IN_PROMPT - 1)).to(tl.float64)
    # float64 as on the host: products may leave the float32 range.
    value = tl.load(work + place, mask=mine, other=0.0).to(tl.float64)
    repetition = tl.load(own + REPETITION)
    value = tl.where(value > 0, value / repetition, value * repetition)
    value -= tl.load(own + FREQUENCY) * outputs
    value -= tl.where(outputs > 0, tl.load(own + PRESENCE), 0.0)
    tl.store(work + place, tl.minimum(value, _LARGEST).to(tl.float32), mask=mine)


def copy(step: Step) -> None:
    """Write the logits of each row with edits, masked where it has a mask, to ``step.rich.work``, and their maxima to
    the scratch, which are right where a mask is all that changes them; other rows' are left as they are. Raises
    ValueError when the step lacks its room."""
    if step.rich is None:
        raise ValueError("a step with edited logits needs rich scratch")
    scratch, tiles = step.scratch, words.num_tiles(step.vocab_size)
    launch(
        _copy, (-(-tiles // TILES_AT_ONCE), step.rows), step.logits, step.rich.work, step.rich.masks, step.state,
        step.slots, step.positions, scratch.values, scratch.indices, V=step.vocab_size, TILES=tiles, TILE=TILE,
        AT_ONCE=TILES_AT_ONCE, pdl=step.pdl, num_warps=4,
    )  # fmt: skip


def edit(step: Step) -> None:
    """Change what `copy` has left in ``step.rich.work`` as the rows' lists and their tokens so far say.

    Token ids in the table outside the vocabulary are passed over. Raises ValueError when the step lacks its lists or
    room."""
    if step.rich is None or step.edit_ids is None or step.edit_values is None:
        raise ValueError("a step with edited logits needs rich scratch, edit_ids and edit_values")
    vocab, rows, length = step.vocab_size, step.rows, step.table.shape[1]
    work, counts = step.rich.work, step.rich.counts
    row = (step.state, step.slots, step.positions)
    blocks = -(-length // _BLOCK)
    launch(
        _count, (1 + blocks, rows), work, counts, *row, step.table, step.edit_ids, step.edit_values,
        step.edit_ids.shape[1], length, V=vocab, BLOCK=_BLOCK, pdl=step.pdl, num_warps=4,
    )  # fmt: skip
    launch(
        _penalise, (blocks, rows), work, counts, *row, step.table, length, V=vocab, BLOCK=_BLOCK, pdl=step.pdl,
        num_warps=4,
    )  # fmt: skip
