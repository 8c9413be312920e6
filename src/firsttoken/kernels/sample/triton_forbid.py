# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Tokens that a row may not choose, whatever else changes its logits: all but the allowed ones, and those with which
the output would come to the end of a bad sequence. Nothing is ever taken back, so the order of programs is free."""

from __future__ import annotations

import triton.language as tl

from firsttoken.core.sampling_params import MAX_BAD_WORD_TOKENS
from firsttoken.kernels.launch import launch, next_power_of_two
from firsttoken.kernels.sample import state as words
from firsttoken.kernels.sample.state import CHUNK, Step
from firsttoken.kernels.sample.triton import NUM_PROMPT, WORDS, kernel, load_flags, wait

NUM_BAD = tl.constexpr(words.NUM_BAD)
HAS_ALLOWED = tl.constexpr(words.HAS_ALLOWED)
HAS_BAD = tl.constexpr(words.HAS_BAD)
_LONGEST = next_power_of_two(MAX_BAD_WORD_TOKENS)


@kernel
def _forbid(
    work, allowed, bad, state, slots, positions, table, capacity, L,
    V: tl.constexpr, CHUNK: tl.constexpr, LONGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, row) looks at the i-th chunk of the vocabulary, and at every bad sequence from the i-th on."""
    wait(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    line = work + row.to(tl.int64) * V
    flags = load_flags(own)
    if (flags & HAS_ALLOWED) != 0:
        ids = part * CHUNK + tl.arange(0, CHUNK)
        word = tl.load(allowed + slot.to(tl.int64) * ((V + 31) // 32) + ids // 32, mask=ids < V, other=0)
        tl.store(line + ids, -float("inf"), mask=(ids < V) & (((word >> (ids % 32)) & 1) == 0))
    if (flags & HAS_BAD) != 0:
        listed = bad + slot.to(tl.int64) * capacity
        known = table + slot.to(tl.int64) * L + position
        output = position - tl.load(own + NUM_PROMPT).to(tl.int32)
        at = tl.arange(0, LONGEST)
        for index in range(part, tl.load(own + NUM_BAD).to(tl.int32), tl.num_programs(0)):
            first, end = tl.load(listed + index), tl.load(listed + index + 1)
            before = end - first - 1
            looked = (at < before) & (before <= output)
            wanted = tl.load(listed + first + at, mask=looked, other=0)
            differ = tl.sum((wanted != tl.load(known - before + at, mask=looked, other=0)).to(tl.int32))
            if (before <= output) & (differ == 0):
                tl.store(line + tl.load(listed + end - 1), -float("inf"))


def forbid(step: Step) -> None:
    """After all other edits of ``step.rich.work``. Raises ValueError when the step lacks its lists or room."""
    if step.rich is None or step.allowed is None or step.bad is None:
        raise ValueError("a step with edited logits needs rich scratch, allowed and bad")
    launch(
        _forbid, (words.num_chunks(step.vocab_size), step.rows), step.rich.work, step.allowed, step.bad, step.state,
        step.slots, step.positions, step.table, step.bad.shape[1], step.table.shape[1], V=step.vocab_size, CHUNK=CHUNK,
        LONGEST=_LONGEST, pdl=step.pdl, num_warps=4,
    )  # fmt: skip
