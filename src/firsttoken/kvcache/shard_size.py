"""How many tokens a shard should have: finer ones hold less in vain, coarser ones need fewer look-ups and copies.

A prefix that is used again ends somewhere inside its last shard: on average half of that is held for nobody. Each
shard costs its look-up and its copy whenever its prefix is used. Both are time: a held token keeps out another one,
which would have to be computed again. So the cost of a prefix of ``length`` tokens that is used ``uses`` times is

    uses * length / shard * (index_us + copy_us)  +  shard / 2 * token_us

whose least is at a square root, as in the economic order quantity (Harris, 1913). What the two terms are on a trace is
measured by ``benchmarks/shard_size.py``.
"""

from __future__ import annotations

import msgspec

# A shard is a run of blocks between these, by powers of two.
SHARD_TOKENS = (128, 256, 512)


class ShardCosts(msgspec.Struct, frozen=True, kw_only=True):
    """In microseconds. ``index_us``: look-up, use and eviction of a shard; ``copy_us``: the fixed part of a copy
    between tiers, whatever its size; ``token_us``: what a token of KV that was held in vain would have spared, which is
    the time to compute one times the chance that it is used."""

    index_us: float
    copy_us: float
    token_us: float

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")


# The index as measured (benchmarks/results/kv/shard_size.json); a copy's start as the driver takes for it on an H200; a
# token of an 8B in prefill there (21 us), used again in one of four cases.
DEFAULT_COSTS = ShardCosts(index_us=5.3, copy_us=10.0, token_us=5.0)


def shards_of(length: int, shard_tokens: int) -> int:
    """How many shards a prefix of so many tokens has."""
    return -(-length // shard_tokens)


def added_us(length: int, shard_tokens: int, costs: ShardCosts) -> float:
    """By how much a use of the prefix is slower than if it were one shard."""
    return (shards_of(length, shard_tokens) - 1) * (costs.index_us + costs.copy_us)


def prefix_cost_us(length: int, uses: float, shard_tokens: int, costs: ShardCosts) -> float:
    """What a prefix costs with such shards: their handling in all its uses, and what half of its last one keeps out."""
    handling = uses * shards_of(length, shard_tokens) * (costs.index_us + costs.copy_us)
    return handling + min(shard_tokens, length) / 2 * costs.token_us


def recommend_shard_tokens(
    length: int,
    uses: float = 2.0,
    costs: ShardCosts = DEFAULT_COSTS,
    *,
    block_tokens: int = 16,
    sizes: tuple[int, ...] = SHARD_TOKENS,
) -> int:
    """Of ``sizes``, the one at which a prefix of ``length`` tokens that is used ``uses`` times costs least; of equal
    ones the finer. Shards can be split and merged, so this may be asked again when ``uses`` turns out otherwise.

    Raises ValueError for a length or a number of uses that cannot be, or a size that is not whole blocks.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    if not uses > 0:
        raise ValueError(f"uses must be more than 0, got {uses}")
    for size in sizes:
        if size < 1 or size % block_tokens:
            raise ValueError(f"a shard must be a multiple of the {block_tokens} tokens of a block, got {size}")
    return min(sorted(sizes), key=lambda size: prefix_cost_us(length, uses, size, costs))
