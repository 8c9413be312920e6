"""Loads that are made: phases, bursts, and classes that leave arrivals as they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from firsttoken.bench.arrivals import Mix
from firsttoken.core.clock import NS_PER_S
from firsttoken.core.service import ServiceClass
from firsttoken.simulate.workload import Burst, Phase, poisson_jobs, shaped_jobs, with_classes

MIX = Mix((64, 256), (16, 32))


def test_phases_have_their_rates_and_follow_one_another() -> None:
    jobs = shaped_jobs([Phase(5, 60), Phase(40, 60), Phase(5, 60)], [], MIX, 1)
    counts = Counter(job.at_ns // (60 * NS_PER_S) for job in jobs)
    assert sorted(counts) == [0, 1, 2]
    assert 240 < counts[0] < 360
    assert 2200 < counts[1] < 2600
    assert 240 < counts[2] < 360
    assert [job.at_ns for job in jobs] == sorted(job.at_ns for job in jobs)
    assert jobs == shaped_jobs([Phase(5, 60), Phase(40, 60), Phase(5, 60)], [], MIX, 1)
    assert jobs != shaped_jobs([Phase(5, 60), Phase(40, 60), Phase(5, 60)], [], MIX, 2)


def test_bursts_come_at_once_after_their_idle_time_and_are_counted_apart() -> None:
    jobs = shaped_jobs([Phase(5, 60)], [Burst(32, 10), Burst(8, 2.5)], MIX, 1)
    bursts = [job for job in jobs if job.group]
    assert Counter(job.at_ns for job in bursts) == {70 * NS_PER_S: 32, round(72.5 * NS_PER_S): 8}
    assert {job.counted_in for job in bursts} == {"p2 bursts"}
    assert {job.counted_in for job in jobs if not job.group} == {"p2"}


@given(st.floats(0, 1), st.integers(0, 1000))
def test_classes_change_nothing_else(share: float, seed: int) -> None:
    jobs = poisson_jobs(20, 1, MIX, 3)
    found = with_classes(jobs, {ServiceClass.P0: share, ServiceClass.P2: 1 - share}, seed)
    assert [replace(job, service=ServiceClass.P2) for job in found] == jobs


def test_classes_come_in_their_shares() -> None:
    jobs = with_classes(poisson_jobs(100, 100, MIX, 3), {ServiceClass.P0: 0.2, ServiceClass.P2: 0.8}, 1)
    assert 0.18 < sum(job.service is ServiceClass.P0 for job in jobs) / len(jobs) < 0.22
