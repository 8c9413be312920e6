"""How long a step takes on a device: what a simulator runs by, and a budget that is given a time.

A step's kernels run one after the other, so its parts add up:

* *products*: weights are read and multiplied, whichever takes longer. A curve over the padded token rows, flat while
  reading decides and a straight line once arithmetic does, with the bend as it was measured;
* *KV*: what decode rows attend to is read once;
* *chunks*: the larger of the arithmetic (query-key pairs) and of one query tile's walk along the longest chunk's keys,
  which a chunk of a few tokens behind a long prefix is bound by.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from firsttoken.core.plan import StepPlan
from firsttoken.core.step_sizes import GRAPH_SIZES, StepSizes
from firsttoken.scheduler.least_squares import nonnegative_least_squares

# Sizes that are nearer to each other than this share one knot of the curve.
KNOT_RATIO = 1.2
# Which of the two terms of a chunk's attention is the larger settles in a few rounds, begun with chunks of more tokens
# than this as those of many pairs.
ROUNDS = 8
FIRST_GUESS = 256


class StepLoad(NamedTuple):
    """What a step computes. ``decode_rows`` rows of one token, which attend to ``decode_context`` tokens together,
    their own included; ``prefill_tokens`` of chunks, whose queries meet ``prefill_pairs`` keys in all; the last token
    of some chunk is the ``prefill_reach``-th of its request, and of none a later one."""

    decode_rows: int
    decode_context: int
    prefill_tokens: int
    prefill_pairs: int
    prefill_reach: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        tokens = pairs = reach = 0
        rows = len(plan.work)
        # Decode rows come first and may be hundreds: the few chunks are looked for from the end.
        for work in reversed(plan.work):
            start, count = work.start, work.count
            if count == 1 and work.sample:
                break
            rows -= 1
            tokens += count
            pairs += chunk_pairs(start, count)
            reach = max(reach, start + count)
        context = sum([work.start for work in plan.work[:rows]]) + rows
        return cls(rows, context, tokens, pairs, reach)

    def with_chunk(self, start: int, count: int) -> StepLoad:
        """The same with one more chunk."""
        return StepLoad(
            self.decode_rows,
            self.decode_context,
            self.prefill_tokens + count,
            self.prefill_pairs + chunk_pairs(start, count),
            max(self.prefill_reach, start + count),
        )


def chunk_pairs(start: int, count: int) -> int:
    """Query-key pairs of ``count`` tokens from position ``start``: each attends to all before it and to itself."""
    return count * start + count * (count + 1) // 2


class StepTime(Protocol):
    """Predicts the time of a step on its device."""

    def ms(self, load: StepLoad) -> float: ...


class FittedStepTime(NamedTuple):
    """The sum of the parts (see the module). ``knots`` are the ends of the products' curve: (token rows, ms), both
    rising; beyond the last it goes on as steep as its last piece. The other numbers are ms for each token of context,
    query-key pair, and token of reach.

    None of them is negative and the padded sizes never fall, so a larger load never takes less.
    """

    sizes: StepSizes
    knots: tuple[tuple[int, float], ...]
    per_context: float
    per_pair: float
    per_reach: float

    def products(self, decode_rows: int, prefill_tokens: int) -> float:
        return _along(self.knots, self.sizes.padded(decode_rows, prefill_tokens))

    def chunks(self, pairs: int, reach: int) -> float:
        return max(self.per_pair * pairs, self.per_reach * reach)

    def ms(self, load: StepLoad) -> float:
        rows, context, tokens, pairs, reach = load
        return self.products(rows, tokens) + self.per_context * context + self.chunks(pairs, reach)


def fit_steps(rows: Sequence[Mapping[str, Any]], sizes: StepSizes = GRAPH_SIZES) -> FittedStepTime:
    """The model of a device, from steps measured on it by ``bench steps``: mappings with ``decode_rows``, ``context``
    (of each decode row), ``prefill_tokens``, ``prefill_start`` and ``ms``. ``sizes``: what the device pads to.

    Shares of the measured time are fitted, so short steps count as much as long ones. Raises `ValueError` without rows
    and for a step that took no time.
    """
    if not rows:
        raise ValueError("no steps to fit a model of step times to; give at least one measured step")
    return fit_loads([load_of(row) for row in rows], [float(row["ms"]) for row in rows], sizes)


def fit_loads(loads: Sequence[StepLoad], times: Sequence[float], sizes: StepSizes) -> FittedStepTime:
    """The same from loads, which took ``times`` in ms. Raises `ValueError` for a step that took no time."""
    if not min(times) > 0:
        raise ValueError(f"a measured step took {min(times)} ms; each must take more than 0")
    totals = [sizes.padded(load.decode_rows, load.prefill_tokens) for load in loads]
    ends = _knots(totals)
    by_pairs = [load.prefill_tokens > FIRST_GUESS for load in loads]
    for _ in range(ROUNDS):
        table = [
            [value / ms for value in _columns(ends, total, load, pairs)]
            for total, load, pairs, ms in zip(totals, loads, by_pairs, times, strict=True)
        ]
        *rises, per_context, per_pair, per_reach = nonnegative_least_squares(table, [1.0] * len(times))
        before, by_pairs = by_pairs, [per_pair * load.prefill_pairs >= per_reach * load.prefill_reach for load in loads]
        if by_pairs == before:
            break
    knots = tuple(zip(ends, accumulate(rises), strict=True))
    return FittedStepTime(sizes, knots, per_context, per_pair, per_reach)


def _columns(ends: Sequence[int], total: int, load: StepLoad, by_pairs: bool) -> list[float]:
    """What the model's numbers are multiplied by for this step."""
    pairs, reach = (load.prefill_pairs, 0) if by_pairs else (0, load.prefill_reach)
    return [*_ramps(ends, total), load.decode_context, pairs, reach]


def load_of(row: Mapping[str, Any]) -> StepLoad:
    """The load of a step that ``bench steps`` measured: decode rows of one length, and at most one chunk."""
    decode_rows, start, count = row["decode_rows"], row["prefill_start"], row["prefill_tokens"]
    load = StepLoad(decode_rows, decode_rows * (row["context"] + 1), 0, 0)
    return load.with_chunk(start, count) if count else load


def _knots(totals: Sequence[int]) -> list[int]:
    knots: list[int] = []
    for total in sorted(set(totals)):
        if not knots or total >= KNOT_RATIO * knots[-1]:
            knots.append(total)
    return knots


def _ramps(ends: Sequence[int], total: int) -> list[float]:
    """The share of each rise of the curve that ``total`` has behind it: the first begins at once, the last goes on."""
    ramps = [1.0]
    for index in range(1, len(ends)):
        share = (total - ends[index - 1]) / (ends[index] - ends[index - 1])
        ramps.append(max(0.0, share if index == len(ends) - 1 else min(share, 1.0)))
    return ramps


def _along(knots: tuple[tuple[int, float], ...], total: int) -> float:
    place = bisect_left(knots, (total,))  # of the first knot that is not below
    if place == 0:
        return knots[0][1]
    if place == len(knots):
        if place == 1:
            return knots[0][1]
        place -= 1
    (low, low_ms), (high, high_ms) = knots[place - 1], knots[place]
    return low_ms + (high_ms - low_ms) * (total - low) / (high - low)
