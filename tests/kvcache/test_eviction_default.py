from __future__ import annotations

import math

import pytest

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction import EvictionConfig, Shard
from firsttoken.kvcache.eviction.default import LearnedPolicy
from firsttoken.kvcache.eviction.returns import BINS, EDGES_S, ReturnTimes, bin_of, gittins_index

P0, P1, P2 = ServiceClass.P0, ServiceClass.P1, ServiceClass.P2


def add(policy: LearnedPolicy, name: str, at_s: float, service: ServiceClass = P2, *, start: int = 0) -> Shard:
    shard = Shard(name.encode(), start, 512, 512)
    shard.service, shard.uses, shard.used_ns = service, 1, round(at_s * NS_PER_S)
    policy.used(shard, service, shard.used_ns)
    policy.offer(shard, shard.used_ns)
    return shard


def order(policy: LearnedPolicy, at_s: float) -> list[str]:
    names = []
    while (shard := policy.victim(round(at_s * NS_PER_S))) is not None:
        policy.left(shard, round(at_s * NS_PER_S), evicted=True)
        names.append(shard.key.decode())
    return names


def test_classes_are_kept_for_their_times_worst_first_and_oldest_first() -> None:
    policy = LearnedPolicy(EvictionConfig())
    add(policy, "p0 old", 0, P0)
    add(policy, "p0", 100, P0)
    add(policy, "p1", 50, P1)
    add(policy, "p2", 110)
    assert order(policy, 120) == ["p2", "p1", "p0 old", "p0"]
    assert policy.early == [2, 1, 0]


def test_a_class_is_kept_no_longer_than_its_time() -> None:
    policy = LearnedPolicy(EvictionConfig())
    add(policy, "p0", 0, P0)
    p2 = [add(policy, f"p2 {number}", 895) for number in range(3)]
    assert policy.victim(898 * NS_PER_S) in p2
    assert order(policy, 950)[0] == "p0"
    assert policy.early == [0, 0, 0]


def test_the_last_class_is_kept_only_where_that_is_asked_for() -> None:
    # By then the younger of the two is of the kind that is used more rarely, but within its three minutes.
    for keep in (True, False):
        policy = LearnedPolicy(EvictionConfig(keep_last_class=keep))
        old = add(policy, "often", 0)
        for second in range(1, 12):
            policy.withdraw(old)
            old.used_ns = second * NS_PER_S
            policy.used(old, P2, old.used_ns)
            policy.offer(old, old.used_ns)
        add(policy, "once", 190)
        assert order(policy, 210) == (["often", "once"] if keep else ["once", "often"])


def test_what_is_dear_to_recompute_stays_where_that_counts() -> None:
    policy = LearnedPolicy(EvictionConfig(attention_tokens=1000))
    add(policy, "deep", 0, start=50_000)
    add(policy, "shallow", 0)
    assert order(policy, 1) == ["shallow", "deep"]


def test_it_learns_when_shards_come_back() -> None:
    """All come back after 60 to 75 s: one of 50 s is worth more than one that has just come, one of 100 s less."""
    policy = LearnedPolicy(EvictionConfig())
    # Kinds are by uses, so each key is used twice.
    for number in range(400):
        shard = add(policy, f"{number}", number)
        policy.left(shard, (number + 1) * NS_PER_S, evicted=True)
        if number >= 65:
            back = add(policy, f"{number - 65}", number)
            policy.left(back, (number + 1) * NS_PER_S, evicted=True)
    for name, at_s in (("late", 1000), ("soon", 1050), ("new", 1098)):
        add(policy, name, at_s)
    for _ in range(20):  # idle time is caught up with in parts
        policy.victim(1100 * NS_PER_S)
    assert order(policy, 1100) == ["late", "new", "soon"]


def test_learned_rates_are_those_of_the_load() -> None:
    """Half of 4,000 come back evenly in their second minute, the others never."""
    times = ReturnTimes((1.0,), math.inf)
    for age_bin in range(BINS - 1):
        begin, end = EDGES_S[age_bin], EDGES_S[age_bin + 1]
        gone_before = 2000 * min(1.0, max(0.0, (begin - 60) / 60))
        times.enters(0, age_bin, 4000 - round(gone_before), 1.0)
        for number in range(2000):
            age_s = 60 + 60 * (number + 0.5) / 2000
            if begin <= age_s < end:
                times.leaves(0, age_bin, round(age_s * NS_PER_S), 1.0)
                times.returned(0, age_bin, 1.0)
    index = [times.index(0, age_bin, 1) for age_bin in range(BINS)]
    # A new one: half a return for 105 s on average (60 to 120 s, half of the time at 90 s, half at 120 s).
    assert index[0] == pytest.approx(0.5 / 105, rel=0.1)
    assert index[bin_of(60 * NS_PER_S)] == pytest.approx(0.5 / 45, rel=0.1)
    assert index[bin_of(120 * NS_PER_S)] < 0.1 * index[0]


def test_the_index_of_a_constant_rate_is_the_rate_at_every_age() -> None:
    assert gittins_index([0.01] * BINS) == pytest.approx([0.01] * BINS)


def test_the_index_sees_what_is_ahead_and_not_what_is_behind() -> None:
    rates = [1e-9] * BINS
    rates[8] = 0.1
    index = gittins_index(rates)
    assert index[:9] == sorted(index[:9])
    assert index[8] == pytest.approx(0.1)
    assert index[9] == pytest.approx(1e-9)


def test_old_counts_weigh_less_and_never_overflow() -> None:
    times = ReturnTimes((1.0,), 10.0)
    for second in range(0, 100_000, 100):
        times.returned(0, 3, times.weight(second * NS_PER_S))
    assert 0 < times.index(0, 3, 100_000 * NS_PER_S) < math.inf


def test_a_long_idle_time_is_caught_up_with_in_parts() -> None:
    policy = LearnedPolicy(EvictionConfig())
    for number in range(1000):
        add(policy, f"{number}", 5 * number)
    assert sorted(order(policy, 100_000)) == sorted(f"{number}" for number in range(1000))
