from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from firsttoken.kvcache.block_pool import BlockPool

BLOCKS = 5


class PoolMachine(RuleBasedStateMachine):
    """Against a model: the owners of each block, and the cached ones in order of age."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.owners: dict[int, int] = {}
        self.cached: list[int] = []

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

    @precondition(lambda self: self.owners or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.owners) | set(self.cached))))
        self.pool.share(block)
        self.owners[block] = self.owners.get(block, 0) + 1
        if block in self.cached:
            self.cached.remove(block)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), keep=st.booleans())
    def drop(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.owners)))
        self.pool.drop(block, keep=keep)
        self.owners[block] -= 1
        if not self.owners[block]:
            del self.owners[block]
            if keep:
                self.cached.append(block)

    @rule(block=st.integers(0, BLOCKS - 1))
    def touch(self, block: int) -> None:
        self.pool.touch(block)
        if block in self.cached:
            self.cached.remove(block)
            self.cached.append(block)

    @rule(block=st.integers(0, BLOCKS - 1))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        if block in self.cached:
            self.cached.remove(block)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check(self.owners)
        assert self.pool.num_used == len(self.owners)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.available == BLOCKS - len(self.owners)
        if self.cached:
            assert self.pool.oldest() == self.cached[0]


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_a_second_release_is_an_error_and_not_a_second_owner() -> None:
    pool = BlockPool(2)
    [block] = pool.take(1)
    pool.drop(block, keep=False)
    with pytest.raises(RuntimeError, match="released twice"):
        pool.drop(block, keep=False)
    pool.check({})


def test_what_was_given_back_last_is_taken_first() -> None:
    pool = BlockPool(5)
    assert pool.take(3) == [0, 1, 2]
    pool.drop(0, keep=False)
    pool.drop(2, keep=False)
    assert pool.take(3) == [2, 0, 3]


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(KeyError):
        BlockPool(1).share(0)


def test_check_sees_a_lost_reference() -> None:
    pool = BlockPool(2)
    [block] = pool.take(1)
    with pytest.raises(AssertionError, match="1 references but 0 owners"):
        pool.check({})
    pool.check({block: 1})


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
