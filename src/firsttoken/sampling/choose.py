"""Choosing one token from one row of logits with one uniform random number.

The order of all definitions is (logit descending, id ascending), so ties are always settled by the lowest id:
``top_k`` keeps the first k of that order, ``top_p`` the shortest prefix whose share of the mass that min_p and top_k
left is at least p. The token is then found by inverse CDF over the kept tokens in the order of their ids. One draw a
token is far cheaper here than Gumbel-max, which would need one for each token of the vocabulary.

Nothing sorts the vocabulary: a threshold first leaves few candidates, and is lowered when they hold too little mass.
Every function works on a single row, so a row's result cannot depend on other rows.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from firsttoken.core.sampling_params import SamplingParams

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

_GROUPS = 64  # elements a group of `largest`
_BLOCK = 256  # elements a block of the two-level CDF
_LEVELS = (4.0, 8.0, 16.0)  # nucleus thresholds, in nats below the largest logit
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
_BINS = 1024  # of the nucleus histogram
_SMALLEST_SPAN, _LARGEST_SPAN = 1e-6, 104.0  # nats; exp(-104) is 0 in float32
_SMALL_SORT = 2048  # below it a stable argsort is quicker than sorting composite keys


def choose(row: Row, top: float, params: SamplingParams, u: float) -> int:
    """The token that ``u`` in [0, 1) picks from the distribution that ``params`` makes of ``row`` (float32 [V]).

    ``top`` is the row's largest value and finite; -inf elsewhere means impossible. ``params`` must not be greedy.
    """
    z = row - np.float32(top)
    if params.temperature != 1:
        # Never 0 in float32: an impossible token's -inf would turn into NaN.
        z *= np.float32(max(1.0 / params.temperature, _SMALLEST_SCALE))
    kept: Ids | None = None
    if params.min_p > 0:
        kept = np.flatnonzero(z >= np.float32(math.log(params.min_p)))
    if 0 < params.top_k < (len(z) if kept is None else len(kept)):
        kept = largest(row, params.top_k) if kept is None else kept[largest(row[kept], params.top_k)]
    if kept is None:
        return _choose_wide(z, params.top_p, u)
    z = z[kept]
    weights = np.exp(z)
    if params.top_p < 1:
        prefix = _nucleus(z, weights, params.top_p * float(weights.sum(dtype=np.float64)))
        kept, weights = kept[prefix], weights[prefix]
    return int(kept[_pick(np.cumsum(weights, dtype=np.float64), u)])


def largest(values: Row, count: int) -> Ids:
    """Ids (ascending) of the ``count`` largest of ``values``, ties at the border settled by the lowest id.

    ``values`` float32 [n] without NaN, 0 < ``count`` <= n. The ``count``-th largest of the maxima of disjoint groups
    is a lower bound of the ``count``-th largest value, so few elements pass it.
    """
    groups = len(values) // _GROUPS
    if count > groups:
        bound = np.partition(values, len(values) - count)[len(values) - count]
    else:
        maxima = values[: groups * _GROUPS].reshape(_GROUPS, groups).max(axis=0)
        bound = np.partition(maxima, groups - count)[groups - count]
    candidates = np.flatnonzero(values >= bound)
    if len(candidates) == count:
        return candidates
    order = descending(values[candidates])[:count]
    return np.sort(candidates[order])


def descending(values: Row) -> Ids:
    """Indices that sort ``values`` (float32 [n], no NaN) from the largest down, equal ones by index."""
    if len(values) <= _SMALL_SORT:
        return np.argsort(-values, kind="stable")
    # One unstable (vectorised) sort of keys that hold the value above and the index below. Float bits become
    # ascending unsigned words when negative numbers are inverted and positive ones get the top bit; + 0.0 makes
    # -0.0 equal to 0.0.
    bits = (-values + np.float32(0)).view(np.uint32)
    ordered = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    keys = (ordered << np.uint64(32)) | np.arange(len(values), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _nucleus(z: Row, weights: Row, needed: float) -> Ids:
    """Indices (ascending) of the shortest prefix, in descending order of ``z``, whose weights reach ``needed``.

    ``z`` <= 0 with a largest value of 0. When there are many, a histogram of the mass over ``z`` finds the bin in
    which the prefix ends, and only that bin is sorted.
    """
    if len(z) <= _SMALL_SORT:
        return np.sort(_prefix(z, weights, needed))
    span = min(max(float(-z.min()), _SMALLEST_SPAN), _LARGEST_SPAN)
    bins = np.minimum(z * np.float32(-_BINS / span), np.float32(_BINS - 1)).astype(np.int64)
    mass = np.cumsum(np.bincount(bins, weights=weights, minlength=_BINS))
    last = min(int(np.searchsorted(mass, needed, side="left")), _BINS - 1)
    kept = bins < last
    inside = np.flatnonzero(bins == last)
    before = float(mass[last - 1]) if last else 0.0
    kept[inside[_prefix(z[inside], weights[inside], needed - before)]] = True
    return np.flatnonzero(kept)


def _prefix(z: Row, weights: Row, needed: float) -> Ids:
    """Like `_nucleus`, by a sort of everything; in descending order."""
    order = descending(z)
    mass = np.cumsum(weights[order], dtype=np.float64)
    size = min(int(np.searchsorted(mass, needed, side="left")) + 1, len(order))
    return order[:size]


def _choose_wide(z: Row, top_p: float, u: float) -> int:
    """`choose` when neither min_p nor top_k narrows the vocabulary."""
    weights = np.exp(z)
    starts = np.arange(0, len(z), _BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    if top_p >= 1:
        return _pick_blocked(weights, blocks, u)
    needed = top_p * float(blocks[-1])
    for level in _LEVELS:
        candidates = np.flatnonzero(z >= np.float32(-level))
        if float(weights[candidates].sum(dtype=np.float64)) >= needed:
            break
    else:
        candidates = np.flatnonzero(weights > 0)
    prefix = _nucleus(z[candidates], weights[candidates], needed)
    kept = candidates[prefix]
    return int(kept[_pick(np.cumsum(weights[kept], dtype=np.float64), u)])


def _pick(cdf: NDArray[np.float64], u: float) -> int:
    """First index whose cumulative mass exceeds ``u`` of the total: an index of zero mass is never picked."""
    index = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
    if index == len(cdf):  # u * total was rounded up to the total
        index = int(np.searchsorted(cdf, cdf[-1], side="left"))
    return index


def _pick_blocked(weights: Row, blocks: NDArray[np.float64], u: float) -> int:
    """`_pick` over all ``weights``, given the cumulative masses of their blocks."""
    block = _pick(blocks, u)
    before = float(blocks[block - 1]) if block else 0.0
    cdf = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    index = int(np.searchsorted(cdf, u * float(blocks[-1]) - before, side="right"))
    if index == len(cdf):
        # The block's float32 sum was larger than its float64 running sum: the remainder belongs to its last token.
        index = int(np.searchsorted(cdf, cdf[-1], side="left"))
    return block * _BLOCK + index
