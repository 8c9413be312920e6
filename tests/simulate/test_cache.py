from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction import POLICY_NAMES, make_policy
from firsttoken.simulate.cache import run_cache
from firsttoken.simulate.cache_bound import Clairvoyant
from firsttoken.simulate.cache_compare import CACHE_POLICY_NAMES, compare_cache, named_policies
from firsttoken.simulate.cache_loads import FLOOD_BLOCKS, session_jobs, with_flood, with_p0
from firsttoken.simulate.workload import TRACE_BLOCK_TOKENS, Job


def job(at_s: float, *blocks: int, service: ServiceClass = ServiceClass.P2) -> Job:
    return Job(round(at_s * NS_PER_S), len(blocks) * TRACE_BLOCK_TOKENS, 1, blocks, service)


def hits(jobs: list[Job], blocks: int, name: str = "lru") -> int:
    policy = Clairvoyant(jobs) if name == "clairvoyant" else make_policy(name)
    return run_cache(jobs, policy, blocks).all.hits


def test_a_block_is_found_when_all_before_it_are() -> None:
    assert hits([job(0, 1, 2, 3), job(1, 1, 2, 4), job(2, 1, 2, 3)], 10) == 2 + 3


@pytest.mark.parametrize("name", CACHE_POLICY_NAMES)
def test_leaves_go_first_so_that_what_stays_can_be_found(name: str) -> None:
    jobs = [job(0, 1, 2, 3, 4), job(1, 5, 6), job(2, 1, 2, 3, 4)]
    # Of six blocks two do not fit: the ends of the first prompt, or the second when it is not wanted any more.
    assert hits(jobs, 4, name) >= 2


@pytest.mark.parametrize("name", CACHE_POLICY_NAMES)
def test_a_prompt_that_does_not_fit_has_its_beginning_cached(name: str) -> None:
    assert hits([job(0, 1, 2, 3, 4), job(1, 1, 2, 3, 4), job(2, 1, 2, 9)], 3, name) == 3 + 2


def test_lru_is_that_of_the_textbook() -> None:
    jobs = session_jobs(1, 600, 3)
    cached: OrderedDict[int, None] = OrderedDict()
    expected = 0
    for each in jobs:
        for number in each.blocks:
            if number not in cached:
                break
            expected += 1
        for number in reversed(each.blocks):
            cached[number] = None
            cached.move_to_end(number)
        while len(cached) > 2000:
            cached.popitem(last=False)
    assert expected > 1000
    assert hits(jobs, 2000) == expected


def test_the_default_is_above_lru_and_nobody_is_above_the_bound() -> None:
    jobs = session_jobs(1, 900, 1)
    for blocks in (500, 1500):
        ratios = {name: compare_cache(jobs, name, blocks)["hit_ratio"] for name in CACHE_POLICY_NAMES}
        assert max(ratios, key=ratios.__getitem__) == "clairvoyant"
        assert ratios["default"] > ratios["lru"], ratios
        assert ratios["default"] > 0.95 * max(ratios[name] for name in POLICY_NAMES), ratios


def test_p0_keeps_what_it_finds_alone_when_p2_floods() -> None:
    jobs = with_flood(with_p0(session_jobs(1, 900, 5), 0.1, 5), 4, 5)
    default, lru = (compare_cache(jobs, name, 2000)["classes"]["p0"] for name in ("default", "lru"))
    assert default["alone"] > 0.3
    assert default["kept"] >= 0.95
    assert lru["kept"] < 0.8


def test_p0_that_does_not_fit_goes_oldest_first_and_is_counted() -> None:
    jobs = with_p0(session_jobs(1, 300, 5), 1.0, 5)
    result = compare_cache(jobs, "default", 500)
    assert result["early"][0] == result["evictions"] > 0
    # Uses within 5 s are at one time, so it is not quite LRU.
    assert result["hit_ratio"] == pytest.approx(compare_cache(jobs, "lru", 500)["hit_ratio"], rel=0.02)


def test_classes_are_those_of_conversations_and_a_flood_is_found_nowhere() -> None:
    plain = session_jobs(1, 600, 7)
    jobs = with_p0(plain, 0.3, 7)
    by_conversation: dict[tuple[int, ...], set[ServiceClass]] = {}
    for each in jobs:
        by_conversation.setdefault(each.blocks[:2], set()).add(each.service)
    assert all(len(classes) == 1 for classes in by_conversation.values())
    assert {ServiceClass.P0} in by_conversation.values()
    assert {ServiceClass.P2} in by_conversation.values()
    flooded = with_flood(jobs, 2, 7)
    assert [each for each in flooded if each in set(jobs)] == jobs
    added = len(flooded) - len(jobs)
    assert added * FLOOD_BLOCKS == pytest.approx(2 * sum(len(each.blocks) for each in jobs), abs=FLOOD_BLOCKS)
    huge = 10**9
    assert hits(flooded, huge) == hits(jobs, huge)
    with pytest.raises(ConfigError, match="nothing can be found again"):
        with_flood([Job(0, 5, 1)], 1, 1)


def test_conversations_grow_and_are_the_same_for_a_seed() -> None:
    jobs = session_jobs(1, 600, 7)
    assert jobs == session_jobs(1, 600, 7) != session_jobs(1, 600, 8)
    assert all(len(each.blocks) == -(-each.input // TRACE_BLOCK_TOKENS) for each in jobs)
    assert 0.2 < run_cache(jobs, make_policy("lru"), 10**9).all.ratio < 0.9


@pytest.mark.parametrize("name", CACHE_POLICY_NAMES)
def test_random_prompts_with_a_tight_cache(name: str) -> None:
    """Prefixes of random chains, ever more of them; the cache is never over its size, or it would raise."""
    rng = random.Random(11)
    jobs = []
    for number in range(400):
        root = rng.randrange(20)
        depth = rng.randrange(1, 12)
        chain = [root * 1000 + place for place in range(depth)]
        jobs.append(job(number * rng.random(), *chain))
    jobs.sort(key=lambda each: each.at_ns)
    assert 0 < hits(jobs, 7, name) <= hits(jobs, 10**6, name)


def test_names() -> None:
    assert named_policies("all") == list(CACHE_POLICY_NAMES)
    assert named_policies("lru,default") == ["lru", "default"]
    with pytest.raises(
        ConfigError, match=r"'fifo' is no eviction policy: known are default, lru, .*, clairvoyant, all"
    ):
        named_policies("lru,fifo")
