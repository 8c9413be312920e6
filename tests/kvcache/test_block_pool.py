from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from firsttoken.kvcache.block_pool import BlockPool

BLOCKS = 5


class PoolMachine(RuleBasedStateMachine):
    """Against a model: the owners of each block, and the cached ones."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.owners: dict[int, int] = {}
        self.cached: set[int] = set()

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        free = self.pool.num_free
        with pytest.raises(IndexError):
            self.pool.take(free + 1)
        assert self.pool.num_free == free
        blocks = self.pool.take(data.draw(st.integers(0, free)))
        assert len(blocks) == free - self.pool.num_free
        for block in blocks:
            assert block not in self.owners
            assert block not in self.cached
            self.owners[block] = 1

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        shared = data.draw(st.sets(st.sampled_from(range(BLOCKS))))
        if shared - set(self.owners) - self.cached:
            with pytest.raises(ValueError, match="is free and has no content"):
                self.pool.share(sorted(shared))
            return
        self.pool.share(sorted(shared))
        for block in shared:
            self.owners[block] = self.owners.get(block, 0) + 1
        self.cached -= shared

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), keep=st.booleans())
    def drop(self, data: st.DataObject, keep: bool) -> None:
        dropped = data.draw(st.sets(st.sampled_from(sorted(self.owners))))
        assert self.pool.exclusive(dropped) == sum(self.owners[block] == 1 for block in dropped)
        self.pool.drop(sorted(dropped), keep=keep)
        for block in dropped:
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                if keep:
                    self.cached.add(block)

    @rule(blocks=st.sets(st.integers(0, BLOCKS - 1)))
    def forget(self, blocks: set[int]) -> None:
        self.pool.forget(sorted(blocks))
        self.cached -= blocks

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check(self.owners)
        assert self.pool.num_used == len(self.owners)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.available == BLOCKS - len(self.owners)
        assert {block for block in range(BLOCKS) if self.pool.is_cached(block)} == self.cached


PoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_a_second_release_is_an_error_and_not_a_second_owner() -> None:
    pool = BlockPool(2)
    [block] = pool.take(1)
    pool.drop([block], keep=False)
    with pytest.raises(RuntimeError, match="released twice"):
        pool.drop([block], keep=False)
    pool.check({})


def test_what_was_given_back_last_is_taken_first() -> None:
    pool = BlockPool(5)
    assert pool.take(3) == [0, 1, 2]
    pool.drop([0], keep=False)
    pool.drop([2], keep=False)
    assert pool.take(3) == [2, 0, 3]


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="KV block 0 is free"):
        BlockPool(1).share([0])


def test_forgotten_blocks_are_taken_in_order() -> None:
    pool = BlockPool(5)
    blocks = pool.take(5)
    pool.drop(blocks, keep=True)
    pool.forget([3, 1, 4])
    assert pool.take(2) == [3, 1]


def test_check_sees_a_lost_reference() -> None:
    pool = BlockPool(2)
    [block] = pool.take(1)
    with pytest.raises(AssertionError, match="1 references but 0 owners"):
        pool.check({})
    pool.check({block: 1})


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
