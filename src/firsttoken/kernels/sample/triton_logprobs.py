# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Log-probabilities of the raw logits: the chosen token's, its rank and the most likely tokens.

All programs of a row look at their chunk: its largest logit, mass, tokens ahead of the chosen one and best tokens; then
one program a row puts the chunks together. Ties go to the lowest id, so the rank agrees with the order of the best.
"""

from __future__ import annotations

import triton.language as tl

from firsttoken.kernels.launch import launch, next_power_of_two
from firsttoken.kernels.sample import state as words
from firsttoken.kernels.sample.state import CHUNK, MAX_TOP, Step
from firsttoken.kernels.sample.triton import WORDS, kernel, load_flags, wait
from firsttoken.kernels.sample.triton_search import ID_MASK, rank_of, rank_value

HAS_LOGPROBS = tl.constexpr(words.HAS_LOGPROBS)
NUM_LOGPROBS = tl.constexpr(words.NUM_LOGPROBS)
_NO_RANK = tl.constexpr(-(2**62))


@kernel
def _survey_chunks(
    logits, state, slots, positions, top, table, masses, above, best, L,
    V: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr, MAX_TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    if ((load_flags(own) & HAS_LOGPROBS) == 0) | (tl.load(top + row) == -float("inf")):
        return
    source = logits + row.to(tl.int64) * V
    ids = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(source + ids, mask=ids < V, other=-float("inf"))
    token = tl.load(table + slot.to(tl.int64) * L + position)
    value = tl.load(source + token)
    ahead = (x > value) | ((x == value) & (ids < token) & (ids < V))
    largest = tl.max(x, 0)
    mass = tl.sum(tl.where(x > -float("inf"), tl.exp(x - largest), 0.0), 0)
    at = row * P + part
    tl.store(masses + at * 2, largest)
    tl.store(masses + at * 2 + 1, mass)
    tl.store(above + at, tl.sum(ahead.to(tl.int32), 0))
    ranks = tl.where(x > -float("inf"), rank_of(x, ids), _NO_RANK)
    for index in range(tl.load(own + NUM_LOGPROBS).to(tl.int32)):
        highest = tl.max(ranks, 0)
        tl.store(best + at * MAX_TOP + index, highest)
        ranks = tl.where(ranks == highest, _NO_RANK, ranks)


@kernel
def _report(
    logits, state, slots, positions, top, table, masses, above, best,
    out_logprobs, out_ranks, out_ids, out_top_logprobs, L,
    V: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, MAX_TOP: tl.constexpr, CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    if ((load_flags(own) & HAS_LOGPROBS) == 0) | (tl.load(top + row) == -float("inf")):
        return
    parts = tl.arange(0, PP)
    at = row * P + parts
    tops = tl.load(masses + at * 2, mask=parts < P, other=-float("inf"))
    mass = tl.load(masses + at * 2 + 1, mask=parts < P, other=0.0)
    largest = tl.max(tops, 0)
    norm = largest + tl.log(tl.sum(mass * tl.exp(tops - largest), 0))
    token = tl.load(table + slot.to(tl.int64) * L + position)
    tl.store(out_logprobs + row, tl.load(logits + row.to(tl.int64) * V + token) - norm)
    tl.store(out_ranks + row, 1 + tl.sum(tl.load(above + at, mask=parts < P, other=0), 0))
    wanted = tl.load(own + NUM_LOGPROBS).to(tl.int32)
    candidate = tl.arange(0, CANDIDATES)
    filled = (candidate < P * MAX_TOP) & (candidate % MAX_TOP < wanted)
    ranks = tl.load(best + row * (P * MAX_TOP) + candidate, mask=filled, other=_NO_RANK)
    for index in range(wanted):
        highest = tl.max(ranks, 0)
        some = highest > _NO_RANK
        # -1: fewer tokens are possible than were asked for.
        tl.store(out_ids + row * MAX_TOP + index, tl.where(some, ((highest & ID_MASK) ^ ID_MASK).to(tl.int32), -1))
        tl.store(out_top_logprobs + row * MAX_TOP + index, tl.where(some, rank_value(highest) - norm, 0.0))
        ranks = tl.where(ranks == highest, _NO_RANK, ranks)


def logprobs(step: Step) -> None:
    """Write logprob, rank and best tokens of the rows that asked for them; their tokens must be in the table.

    Raises ValueError when the step lacks its room."""
    if step.rich is None:
        raise ValueError("a step with log-probabilities needs rich scratch")
    vocab, rows, length = step.vocab_size, step.rows, step.table.shape[1]
    chunks = words.num_chunks(vocab)
    rich, out = step.rich, step.out
    row = (step.logits, step.state, step.slots, step.positions, step.scratch.top, step.table)
    parts = (rich.masses, rich.above, rich.best)
    launch(
        _survey_chunks, (chunks, rows), *row, *parts, length, V=vocab, CHUNK=CHUNK, P=chunks, MAX_TOP=MAX_TOP,
        pdl=step.pdl, num_warps=4,
    )  # fmt: skip
    launch(
        _report, (rows,), *row, *parts, out.logprobs, out.ranks, out.top_ids, out.top_logprobs, length, V=vocab,
        P=chunks, PP=next_power_of_two(chunks), MAX_TOP=MAX_TOP,
        CANDIDATES=next_power_of_two(chunks * MAX_TOP), pdl=step.pdl, num_warps=8,
    )  # fmt: skip
