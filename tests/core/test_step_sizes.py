"""The sizes that steps are padded to."""

from __future__ import annotations

from itertools import pairwise

import pytest

from firsttoken.core.step_sizes import GRAPH_SIZES, StepSizes, graph_sizes, next_size


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 17, 64, 100, 256, 1000, 4096])
@pytest.mark.parametrize("tokens", [1, 64, 512, 2000, 8192, 10_000])
def test_sizes_rise_to_the_most_that_a_step_may_have(rows: int, tokens: int):
    sizes = graph_sizes(rows, tokens)
    for found, most in zip(sizes, (rows, tokens, rows, rows + tokens), strict=True):
        assert list(found) == sorted(set(found))
        assert found[-1] == most


def test_little_is_wasted_where_products_decide():
    for low, high in pairwise(size for size in GRAPH_SIZES.chunks if size >= 512):
        assert high - low <= 0.25 * high


def test_a_size_is_padded_to_the_next():
    assert [next_size((4, 16), n) for n in (1, 4, 5, 16, 17)] == [4, 4, 16, 16, 17]
    assert GRAPH_SIZES.padded(5, 0) == 8
    assert GRAPH_SIZES.padded(0, 449) == 512
    assert GRAPH_SIZES.padded(33, 464) == 512
    assert GRAPH_SIZES.padded(33, 465) == 640
    assert StepSizes().padded(5, 7) == 12, "a device that does not pad"
