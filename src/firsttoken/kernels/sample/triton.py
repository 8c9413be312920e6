"""Partial maxima, the greedy choice and the random one, on the GPU.

Random rows use Gumbel-max: the token with the largest ``logit / temperature + g`` among those kept, where g is Gumbel
noise that depends on (seed, position, token id) alone. So a row needs no sum over the vocabulary to be normalised and
no running sum to be walked, and its programs need not agree on anything but the best pair.

Every kernel waits for the one before it ahead of its first read: the logits, and the token, position and state of the
row, may all be that young.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from firsttoken.kernels.launch import launch, next_power_of_two
from firsttoken.kernels.sample import state as words
from firsttoken.kernels.sample.state import CHUNK, TILE, Step

WORDS = tl.constexpr(words.WORDS)
FLAGS = tl.constexpr(words.FLAGS)
INVERSE_TEMPERATURE = tl.constexpr(words.INVERSE_TEMPERATURE)
FARTHEST = tl.constexpr(words.FARTHEST)
SEED_LOW = tl.constexpr(words.SEED_LOW)
SEED_HIGH = tl.constexpr(words.SEED_HIGH)
NUM_PROMPT = tl.constexpr(words.NUM_PROMPT)
MIN_TOKENS = tl.constexpr(words.MIN_TOKENS)
RANDOM = tl.constexpr(words.RANDOM)
HAS_TOP_K = tl.constexpr(words.HAS_TOP_K)
HAS_TOP_P = tl.constexpr(words.HAS_TOP_P)
ALWAYS_EDITED = tl.constexpr(words.HAS_MASK | words.HAS_BIAS | words.HAS_PENALTIES | words.HAS_ALLOWED | words.HAS_BAD)
HAS_MIN_TOKENS = tl.constexpr(words.HAS_MIN_TOKENS)
OK = tl.constexpr(words.OK)
NON_FINITE = tl.constexpr(words.NON_FINITE)
ALL_MASKED = tl.constexpr(words.ALL_MASKED)

_STEP = tl.constexpr(2.0**-32)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)

_STAGES = tl.constexpr(5)
TILES_AT_ONCE = 8  # of `partials`: CHUNK logits a program
_LONG = 2048  # partial maxima from which `finish` takes more warps

# Of a kernel that the host starts. What a caller may hand over as a view into something larger is read and written a
# word at a time, so its alignment must not make another variant to compile.
kernel = triton.jit(
    do_not_specialize=("L", "capacity"),
    do_not_specialize_on_alignment=(
        *("slots", "positions", "table", "tokens", "errors"),
        *("out_logprobs", "out_ranks", "out_ids", "out_top_logprobs"),
    ),
)


@triton.jit
def wait(PDL: tl.constexpr):
    """Let the next kernel start, then wait for the one before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def load_flags(own):
    return tl.load(own + FLAGS).to(tl.int32)


@triton.jit
def is_edited(own, position):
    """Whether the logits that decide differ from the raw ones, for the row whose state is ``own``."""
    flags = load_flags(own)
    short = position - tl.load(own + NUM_PROMPT).to(tl.int32) < tl.load(own + MIN_TOKENS).to(tl.int32)
    return ((flags & ALWAYS_EDITED) != 0) | (((flags & HAS_MIN_TOKENS) != 0) & short)


@triton.jit
def row_source(logits, work, own, position, row, V: tl.constexpr, EDITED: tl.constexpr):
    """Where the logits lie that decide the row."""
    at = row.to(tl.int64) * V
    source = logits + at
    if EDITED:  # noqa: SIM102  # the compiler drops the outer branch
        if is_edited(own, position):
            source = work + at
    return source


@triton.jit
def _mix64(word):
    """`core.random.mix64`."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _mix32(word):
    """A bijective scramble of 32 bits: lowbias32 of Wellons' hash-prospector (2018), a two-round multiply-xorshift."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def row_key(own, position):
    """The two 32-bit words of ``core.random.random_word(seed, position)``, low and high."""
    low = tl.load(own + SEED_LOW).to(tl.int64).to(tl.uint64)
    high = tl.load(own + SEED_HIGH).to(tl.int64).to(tl.uint64)
    gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    seed = _mix64(((high << 32) | low) ^ gamma)
    word = _mix64(seed + (position + 1).to(tl.uint64) * gamma)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def gumbel(ids, low, high):
    """Gumbel noise float32 for token ``ids`` under the row's key.

    32 random bits give v in (0, 1), and ``e = -log(1 - v)`` is exponential. What wins is a small e, so v is precise
    near 0, where the logarithm's argument would round to 1: there its series is summed.
    """
    bits = _mix32(_mix32(ids.to(tl.uint32) ^ low) + high)
    v = tl.minimum(bits.to(tl.float32) * _STEP + 0.5 * _STEP, _BELOW_ONE)
    series = v + v * v * (0.5 + v * (1.0 / 3 + v * (0.25 + v * 0.2)))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(1.0 - v)))


@triton.jit
def store_maxima(x, ids, values, indices, tiles, V: tl.constexpr, TILES: tl.constexpr):
    """The largest of each tile of logits ``x``, NaN above all, and the lowest id at ties."""
    nan = x != x
    top = tl.max(x, 1)
    top = tl.where(tl.max(nan.to(tl.int32), 1) > 0, float("nan"), top)
    index = tl.min(tl.where(nan | (x == top[:, None]), ids, V), 1)
    tl.store(values + tiles, top, mask=tiles < TILES)
    tl.store(indices + tiles, index, mask=tiles < TILES)


@kernel
def _partials(
    logits, work, state, slots, positions, values, indices,
    V: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr, EDITED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    source = logits + row.to(tl.int64) * V
    if EDITED:
        if is_edited(state + slot * WORDS, position) == 0:
            return
        source = work + row.to(tl.int64) * V
    tiles = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(source + ids, mask=ids < V, other=-float("inf"))
    store_maxima(x, ids, values + row * TILES, indices + row * TILES, tiles, V, TILES)


@kernel
def _finish(
    values, indices, state, slots, positions, top, spread, table, tokens, errors, L,
    P: tl.constexpr, BLOCK: tl.constexpr, CHECK_EDITED: tl.constexpr, EDITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    decides = (load_flags(own) & RANDOM) == 0
    if CHECK_EDITED:
        edited = is_edited(own, position)
        if EDITED:
            # A row whose raw logits had an error keeps that one.
            if (edited == 0) | (tl.load(top + row) == -float("inf")):
                return
        else:
            decides = decides & (edited == 0)
    at = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, P, BLOCK, num_stages=_STAGES):
        value = tl.load(values + row * P + start + at, mask=start + at < P, other=-float("inf"))
        finite = (value > -float("inf")) & (value < float("inf"))
        nans |= (value != value).to(tl.int32)
        total += tl.where(finite, value, 0.0)
        count += finite.to(tl.int32)
        larger = value > best
        best = tl.where(larger, value, best)
        place = tl.where(larger, start + at, place)
    largest = tl.max(best, 0)
    sound = (largest > -float("inf")) & (largest < float("inf")) & (tl.max(nans, 0) == 0)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    if EDITED:
        tl.debug_barrier()  # `top` was read above
    tl.store(top + row, tl.where(sound, largest, -float("inf")))
    tl.store(spread + row, largest - mean)
    if decides | (sound == 0):
        # Pieces come in the order of ids, so the first of equal ones holds the lowest.
        piece = tl.min(tl.where(best == largest, place, P - 1), 0)
        token = tl.where(sound, tl.load(indices + row * P + piece), 0)
        code = ALL_MASKED if EDITED else NON_FINITE
        tl.store(table + slot.to(tl.int64) * L + position, token)
        tl.store(tokens + row, token)
        tl.store(errors + row, tl.where(sound, OK, code))


@kernel
def _draw(
    logits, work, state, slots, positions, top, cut_value, cut_id, scores, score_ids, arrived, table, tokens, errors, L,
    V: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, SEARCHED: tl.constexpr,
    EDITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, row) finds the best draw of the i-th chunk; the last to arrive takes the best of all chunks."""
    wait(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot < 0) | (position < 0):
        return
    own = state + slot * WORDS
    flags = load_flags(own)
    largest = tl.load(top + row)
    if ((flags & RANDOM) == 0) | (largest == -float("inf")):
        return
    inverse, farthest = load_scale(own)
    ids = part * CHUNK + tl.arange(0, CHUNK)
    source = row_source(logits, work, own, position, row, V, EDITED)
    x = tl.load(source + ids, mask=ids < V, other=-float("inf"))
    y = (largest - x) * inverse
    kept = (x > -float("inf")) & (y <= farthest)
    if SEARCHED:  # noqa: SIM102  # the compiler drops the outer branch
        if (flags & (HAS_TOP_K | HAS_TOP_P)) != 0:
            value = tl.load(cut_value + row)
            kept = kept & ((x > value) | ((x == value) & (ids <= tl.load(cut_id + row))))
    best = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], V, tl.int32)
    if tl.max(kept.to(tl.int32), 0) > 0:  # of few kept tokens, few chunks pay for noise
        low, high = row_key(own, position)
        score = tl.where(kept, gumbel(ids, low, high) - y, -float("inf"))
        best = tl.max(score, 0)
        token = tl.min(tl.where(kept & (score == best), ids, V), 0)
    tl.store(scores + row * P + part, best)
    tl.store(score_ids + row * P + part, token)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == P - 1:
        tl.store(arrived + row, 0)
        parts = tl.arange(0, PP)
        all_best = tl.load(scores + row * P + parts, mask=parts < P, other=-float("inf"), cache_modifier=".cg")
        all_ids = tl.load(score_ids + row * P + parts, mask=parts < P, other=V, cache_modifier=".cg")
        token = tl.min(tl.where(all_best == tl.max(all_best, 0), all_ids, V), 0)
        tl.store(table + slot.to(tl.int64) * L + position, token)
        tl.store(tokens + row, token)
        tl.store(errors + row, OK)


@triton.jit
def load_scale(own):
    """1 / temperature, and how far below the largest logit (in nats, after it) min_p still keeps a token."""
    return tl.load(own + INVERSE_TEMPERATURE).to(tl.float32), tl.load(own + FARTHEST).to(tl.float32)


def partials(step: Step, *, edited: bool = False) -> None:
    """Write the maxima of each row's tiles to the scratch's ``values`` and ``indices``; those of the edited logits, and
    of rows that have some alone, when ``edited``."""
    scratch = step.scratch
    tiles = words.num_tiles(step.vocab_size)
    work = step.rich.work if step.rich is not None else step.logits
    launch(
        _partials, (-(-tiles // TILES_AT_ONCE), step.rows), step.logits, work, step.state, step.slots, step.positions,
        scratch.values, scratch.indices, V=step.vocab_size, TILES=tiles, TILE=TILE, AT_ONCE=TILES_AT_ONCE,
        EDITED=edited, pdl=step.pdl, num_warps=4,
    )  # fmt: skip


def finish(step: Step, *, check_edited: bool = False, edited: bool = False) -> None:
    """From partial maxima, each row's largest logit or its error, and the token of the greedy rows.

    ``check_edited`` leaves rows with edits to a second call, which says ``edited`` and reads the maxima in the scratch.
    """
    scratch, out = step.scratch, step.out
    values, indices = (scratch.values, scratch.indices) if edited else (step.values, step.indices)
    parts = values.shape[1]
    long = parts > _LONG
    block = min(next_power_of_two(parts), 4096)
    launch(
        _finish, (step.rows,), values, indices, step.state, step.slots, step.positions, scratch.top, scratch.spread,
        step.table, out.tokens, out.errors, step.table.shape[1], P=parts, BLOCK=block,
        CHECK_EDITED=check_edited or edited, EDITED=edited, pdl=step.pdl, num_warps=16 if long else 4,
    )  # fmt: skip


def draw(step: Step, *, searched: bool, edited: bool = False) -> None:
    """The token of each random row; ``searched`` when thresholds may have been found for some."""
    scratch, out = step.scratch, step.out
    chunks = words.num_chunks(step.vocab_size)
    work = step.rich.work if step.rich is not None else step.logits
    launch(
        _draw, (chunks, step.rows), step.logits, work, step.state, step.slots, step.positions, scratch.top,
        scratch.cut_value, scratch.cut_id, scratch.scores, scratch.score_ids, scratch.arrived, step.table, out.tokens,
        out.errors, step.table.shape[1], V=step.vocab_size, CHUNK=CHUNK, P=chunks, PP=next_power_of_two(chunks),
        SEARCHED=searched, EDITED=edited, pdl=step.pdl, num_warps=4,
    )  # fmt: skip
