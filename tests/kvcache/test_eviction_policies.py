"""What every eviction policy owes to a tier, on random calls, and that it does not forget a shard."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction import POLICY_NAMES, EvictionConfig, EvictionPolicy, Shard, make_policy

CONFIG = EvictionConfig(ghosts=20)


class Tier:
    """Makes random calls that the interface allows. Shards are leaves by themselves here: trees are `run_cache`'s."""

    def __init__(self, policy: EvictionPolicy, seed: int) -> None:
        self.policy = policy
        self.rng = random.Random(seed)
        self.now_ns = 0
        self.offered: dict[bytes, Shard] = {}
        self.withdrawn: dict[bytes, Shard] = {}
        self.victims: list[bytes] = []

    def step(self) -> None:
        self.now_ns += self.rng.choice([0, 1, NS_PER_S, 7 * NS_PER_S, 400 * NS_PER_S, 5000 * NS_PER_S])
        calls = (self.use, self.use, self.use, self.offer, self.offer, self.withdraw, self.evict, self.drop)
        self.rng.choice(calls)()

    def use(self) -> None:
        key = bytes([self.rng.randrange(60)])
        if key in self.offered:
            self._withdraw(key)
        if key not in self.withdrawn:
            self.withdrawn[key] = Shard(key, 512 * self.rng.randrange(100), self.rng.choice([512, 512, 512, 100]), 512)
        shard = self.withdrawn[key]
        service = ServiceClass(self.rng.randrange(3))
        shard.uses += 1
        shard.used_ns = self.now_ns
        shard.service = min(shard.service, service)
        if self.rng.random() < 0.1:
            shard.keep_until_ns = self.now_ns + self.rng.randrange(600) * NS_PER_S
        self.policy.used(shard, service, self.now_ns)

    def offer(self) -> None:
        if self.withdrawn:
            key = self.rng.choice(sorted(self.withdrawn))
            self.offered[key] = self.withdrawn.pop(key)
            self.policy.offer(self.offered[key], self.now_ns)

    def withdraw(self) -> None:
        if self.offered:
            self._withdraw(self.rng.choice(sorted(self.offered)))

    def _withdraw(self, key: bytes) -> None:
        self.policy.withdraw(self.offered[key])
        self.withdrawn[key] = self.offered.pop(key)

    def evict(self) -> None:
        victim = self.policy.victim(self.now_ns)
        assert (victim is None) == (not self.offered)
        if victim is not None:
            assert self.offered.get(victim.key) is victim, "it was not offered"
            if any(shard.keep_until_ns <= self.now_ns for shard in self.offered.values()):
                assert victim.keep_until_ns <= self.now_ns, "it is pinned, and others are not"
            del self.offered[victim.key]
            self.policy.left(victim, self.now_ns, evicted=True)
            self.victims.append(victim.key)

    def drop(self) -> None:
        """Unwanted content goes, offered or not."""
        among = self.rng.choice([self.offered, self.withdrawn])
        if among and self.rng.random() < 0.3:
            shard = among.pop(self.rng.choice(sorted(among)))
            self.policy.left(shard, self.now_ns, evicted=False)

    def empty(self) -> None:
        while self.withdrawn:
            self.offer()
        for _ in range(len(self.offered)):
            self.evict()
        assert not self.offered, "a shard was lost"
        assert self.policy.victim(self.now_ns) is None


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), calls=st.integers(1, 300))
def test_victims_are_offered_none_is_lost_and_the_same_calls_choose_the_same(name: str, seed: int, calls: int) -> None:
    runs = []
    for _ in range(2):
        tier = Tier(make_policy(name, CONFIG), seed)
        for _ in range(calls):
            tier.step()
        tier.empty()
        runs.append(tier.victims)
    assert runs[0] == runs[1]


def shards(policy: EvictionPolicy, count: int, now_ns: int, service: ServiceClass = ServiceClass.P2) -> list[Shard]:
    """New ones, used once and offered."""
    made = []
    for number in range(count):
        shard = Shard(f"{service.label} {now_ns} {number}".encode(), 0, 512, 512)
        shard.service, shard.uses, shard.used_ns = service, 1, now_ns
        policy.used(shard, service, now_ns)
        policy.offer(shard, now_ns)
        made.append(shard)
    return made


def evicted(policy: EvictionPolicy, now_ns: int) -> Iterator[Shard]:
    while (shard := policy.victim(now_ns)) is not None:
        policy.left(shard, now_ns, evicted=True)
        yield shard


def use_again(policy: EvictionPolicy, shard: Shard, now_ns: int) -> None:
    policy.withdraw(shard)
    shard.uses += 1
    shard.used_ns = now_ns
    policy.used(shard, shard.service, now_ns)
    policy.offer(shard, now_ns)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_is_pinned_goes_last_and_is_free_when_its_time_is_over(name: str) -> None:
    policy = make_policy(name)
    [pinned] = shards(policy, 1, 0)
    policy.withdraw(pinned)
    pinned.keep_until_ns = 3000 * NS_PER_S
    policy.offer(pinned, 0)
    others = shards(policy, 3, 2900 * NS_PER_S)
    assert policy.victim(2901 * NS_PER_S) in others
    assert policy.victim(3001 * NS_PER_S) is pinned  # the oldest by far
    assert len(list(evicted(policy, 3001 * NS_PER_S))) == 4


def test_lfu_counts_uses_before_an_eviction() -> None:
    policy = make_policy("lfu")
    [often] = shards(policy, 1, 0)
    for second in (1, 2):
        use_again(policy, often, second * NS_PER_S)
    assert list(evicted(policy, 3 * NS_PER_S)) == [often]
    back = Shard(often.key, 0, 512, 512)
    back.uses, back.used_ns = 1, 4 * NS_PER_S
    policy.used(back, ServiceClass.P2, back.used_ns)
    policy.offer(back, back.used_ns)
    new = shards(policy, 1, 5 * NS_PER_S)
    assert list(evicted(policy, 6 * NS_PER_S)) == [*new, back]


def test_arc_and_s3fifo_keep_what_comes_back_from_a_scan() -> None:
    for name in ("arc", "s3fifo"):
        policy = make_policy(name)
        hot = shards(policy, 5, 0)
        for second in (1, 2, 3):
            for shard in hot:
                use_again(policy, shard, second * NS_PER_S)
        scan = shards(policy, 50, 10 * NS_PER_S)
        gone = evicted(policy, 20 * NS_PER_S)
        assert {next(gone).key for _ in range(45)} <= {shard.key for shard in scan}, name


def test_the_hybrid_lets_what_is_not_used_in_the_window_go_first_but_for_p0() -> None:
    policy = make_policy("hybrid")
    hot, p0 = shards(policy, 1, 0), shards(policy, 1, 0, ServiceClass.P0)
    for second in (1, 2):
        use_again(policy, hot[0], second * NS_PER_S)
    cold = shards(policy, 1, 3 * NS_PER_S)
    assert list(evicted(policy, 4 * NS_PER_S)) == [*cold, *hot, *p0]


def test_the_hybrid_forgets_the_window_and_then_the_age_of_p0() -> None:
    policy = make_policy("hybrid")
    p0, hot = shards(policy, 1, 0, ServiceClass.P0), shards(policy, 1, 0)
    for second in (1, 2):
        use_again(policy, hot[0], second * NS_PER_S)
    [late] = shards(policy, 1, 60 * NS_PER_S)
    assert policy.victim(61 * NS_PER_S) is hot[0]  # not in the window any more, and older
    [p0_late] = shards(policy, 1, 650 * NS_PER_S, ServiceClass.P0)
    order = list(evicted(policy, 700 * NS_PER_S))
    assert order == [hot[0], late, *p0, p0_late]  # over ten minutes, p0's 700 s count as 350


def test_an_unknown_name_and_a_bad_figure_are_refused() -> None:
    with pytest.raises(ConfigError, match="'mru' is no eviction policy: known are default, lru, lfu, arc, s3fifo, hyb"):
        make_policy("mru")
    with pytest.raises(ConfigError, match="window_s of the eviction must be a number of more than 0, got 0"):
        EvictionConfig(window_s=0)
    with pytest.raises(ConfigError, match=r"each of keep_s of the eviction must be a number of 0 or more, got -1"):
        EvictionConfig(keep_s=(-1, 0, 0))
