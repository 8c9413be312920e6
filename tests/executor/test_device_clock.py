"""Ends by the device's clock, told by the host's."""

from __future__ import annotations

import random

from firsttoken.executor.graphs.device_clock import DRIFT, DeviceClock

MS = 1_000_000


def test_a_host_that_is_late_is_told_apart_from_a_step_that_is_long() -> None:
    clock = DeviceClock()
    offset, at = 777 * MS, 10**12
    for late in (20_000, 15_000, 3 * MS, 18_000, 40 * MS):
        at += 5 * MS
        ended = clock.host_ns(at - offset, at + late)
        assert 0 <= ended - at < 40_000
        assert ended <= at + late


def test_clocks_that_drift_apart_are_followed() -> None:
    rng = random.Random(3)
    for drift in (-100e-6, 100e-6):
        clock = DeviceClock()
        worst = 0
        for step in range(20_000):
            at = 10**12 + step * 5 * MS
            ended = clock.host_ns(round(at * (1 + drift)), at + 10_000 + round(rng.expovariate(1 / 20_000)))
            worst = max(worst, abs(ended - at))
        assert worst < 0.3 * MS


def test_after_a_pause_it_finds_back() -> None:
    clock = DeviceClock()
    clock.host_ns(10**9, 2 * 10**9)
    late = 10 * MS  # the difference has grown by that in an hour
    hour = 3600 * 10**9
    assert hour // DRIFT > late
    at = 2 * 10**9 + hour
    assert clock.host_ns(10**9 + hour - late, at) == at


def test_without_a_clock_it_ends_when_it_is_heard_of() -> None:
    clock = DeviceClock()
    assert clock.host_ns(0, 5) == 5
    assert clock.host_ns(0, 9) == 9
