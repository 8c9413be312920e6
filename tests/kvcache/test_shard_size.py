"""The recommended size of shards: the least cost, finer for short prefixes and coarser for long and busy ones."""

from __future__ import annotations

from itertools import pairwise

import pytest

from firsttoken.kvcache.shard_size import (
    DEFAULT_COSTS,
    SHARD_TOKENS,
    ShardCosts,
    added_us,
    prefix_cost_us,
    recommend_shard_tokens,
)

SIZES = (16, 32, 64, 128, 256, 512, 1024)


@pytest.mark.parametrize("uses", [0.5, 2, 30])
@pytest.mark.parametrize("length", [1, 100, 1000, 5000, 100_000])
def test_nothing_costs_less_than_what_is_recommended(length, uses):
    chosen = recommend_shard_tokens(length, uses, sizes=SIZES)
    costs = {size: prefix_cost_us(length, uses, size, DEFAULT_COSTS) for size in SIZES}
    assert costs[chosen] == min(costs.values())
    assert chosen in SIZES


def test_longer_and_busier_prefixes_get_coarser_shards():
    by_length = [recommend_shard_tokens(length) for length in (200, 2000, 20_000, 200_000)]
    by_uses = [recommend_shard_tokens(4000, uses) for uses in (0.1, 1, 10, 100)]
    for sizes in (by_length, by_uses):
        assert all(a <= b for a, b in pairwise(sizes))
        assert (sizes[0], sizes[-1]) == (SHARD_TOKENS[0], SHARD_TOKENS[-1])


def test_a_device_whose_copies_cost_nothing_gets_the_finest_and_free_memory_the_coarsest():
    assert recommend_shard_tokens(8192, costs=ShardCosts(index_us=0, copy_us=0, token_us=6)) == SHARD_TOKENS[0]
    assert recommend_shard_tokens(8192, costs=ShardCosts(index_us=8, copy_us=10, token_us=0)) == SHARD_TOKENS[-1]


def test_what_shards_add_is_told_against_a_single_one():
    costs = ShardCosts(index_us=2, copy_us=10, token_us=6)
    assert added_us(512, 512, costs) == 0
    assert added_us(8192, 128, costs) == 63 * 12
    assert added_us(8193, 128, costs) == 64 * 12


@pytest.mark.parametrize(
    ("words", "args", "more"),
    [
        ("length must be at least 1 token, got 0", (0,), {}),
        ("uses must be more than 0, got 0", (10, 0), {}),
        ("uses must be more than 0, got nan", (10, float("nan")), {}),
        ("multiple of the 16 tokens of a block, got 100", (10,), {"sizes": (100,)}),
    ],
)
def test_what_cannot_be_is_refused(words, args, more):
    with pytest.raises(ValueError, match=words):
        recommend_shard_tokens(*args, **more)


def test_costs_are_not_negative():
    with pytest.raises(ValueError, match="copy_us must be 0 or more, got -1"):
        ShardCosts(index_us=1, copy_us=-1, token_us=1)
