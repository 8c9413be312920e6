"""The replay by which benchmarks/shard_size.py measures memory counts hits and residents as they are."""

from __future__ import annotations

import random

from benchmarks.shard_size import BLOCK, WHOLE, Cache, Conversations, replay

SYSTEM = (0, 64)


def test_what_begins_alike_is_found_and_kept_once():
    cache = Cache(32, 10_000)
    cache.use([SYSTEM, (1, 160)], 128)
    assert (cache.hits, cache.resident) == (0, 160)
    cache.use([SYSTEM, (2, 160)], 128)
    assert (cache.hits, cache.resident) == (64, 256)


def test_whole_sequences_hold_what_nobody_needs_while_others_continue_their_beginning():
    whole, fine = Cache(WHOLE, 300), Cache(32, 300)
    for cache in (whole, fine):
        for name in (1, 2, 3, 4, 5):
            cache.use([SYSTEM, (name, 160)], 160)
        # The beginning is hot in both, and the first sequence long cold.
        before = cache.hits
        cache.use([SYSTEM, (1, 160), (9, 200)], 200)
        cache.gained = cache.hits - before
    assert whole.gained == 160, "its rest could not go without the beginning"
    assert fine.gained == 64
    assert max(whole.resident, fine.resident) <= 300


def test_each_in_a_slab_of_its_own_keeps_beginnings_as_often():
    slabs = Cache(WHOLE, 10_000, share=False)
    for name in (1, 2, 3):
        slabs.use([SYSTEM, (name, 160)], 160)
    assert slabs.resident == 3 * 160
    assert slabs.hits == 2 * 64


def test_residents_are_the_tokens_of_the_shards_that_are_there():
    tree, rng = Conversations(seed=3), random.Random(3)
    cache = Cache(128, 5_000)
    for _ in range(300):
        cache.use(*tree.request(rng.randrange(1, 2000), rng.randrange(1, 200)))
        stack, resident = list(cache._root.children), 0
        while stack:
            node = stack.pop()
            assert node.begin % BLOCK == node.end % BLOCK == 0
            assert node.end <= node.limit
            resident += node.end - node.begin
            stack += node.children
        assert resident == cache.resident <= 5_000


def test_without_limits_all_sizes_find_the_same():
    tree, rng = Conversations(seed=2), random.Random(2)
    requests = [tree.request(rng.randrange(1, 2000), rng.randrange(1, 200)) for _ in range(200)]
    assert len({replay(requests, size, WHOLE) for size in (16, 128, 2048, WHOLE)}) == 1
