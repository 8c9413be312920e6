from __future__ import annotations

from random import Random

import pytest

from firsttoken.kvcache.copy_meter import CopyCost, CopyMeter

PRIOR = CopyCost(fixed_s=20e-6, s_per_byte=1 / 20e9)
MIB = 1 << 20


def test_it_begins_at_the_prior_and_nothing_costs_nothing() -> None:
    meter = CopyMeter(PRIOR)
    assert meter.cost.seconds(2_000_000_000) == pytest.approx(0.1 + 20e-6)
    assert meter.cost.seconds(0) == 0


def test_one_copy_is_believed_for_its_size() -> None:
    meter = CopyMeter(PRIOR)
    meter.observe(16 * MIB, 0.003)
    assert meter.cost.seconds(16 * MIB) == pytest.approx(0.003)
    assert meter.cost.fixed_s == PRIOR.fixed_s


@pytest.mark.parametrize(("gb_s", "fixed_us"), [(55, 8), (48, 30), (3, 100), (400, 12)])
def test_bandwidth_and_fixed_cost_are_found_through_noise(gb_s: float, fixed_us: float) -> None:
    meter, noise = CopyMeter(PRIOR), Random(1)
    for _ in range(300):
        nbytes = noise.choice([1, 2, 4, 16, 64]) * MIB // 2
        meter.observe(nbytes, (fixed_us * 1e-6 + nbytes / (gb_s * 1e9)) * noise.gauss(1, 0.03))
    for nbytes in (MIB, 8 * MIB, 256 * MIB):
        assert meter.cost.seconds(nbytes) == pytest.approx(fixed_us * 1e-6 + nbytes / (gb_s * 1e9), rel=0.05)
    assert meter.cost.fixed_s == pytest.approx(fixed_us * 1e-6, rel=0.25)


def test_a_link_that_becomes_slower_is_noticed() -> None:
    meter = CopyMeter(PRIOR)
    for nbytes in (MIB, 8 * MIB) * 100:
        meter.observe(nbytes, 1e-5 + nbytes / 50e9)
    for nbytes in (MIB, 8 * MIB) * 100:
        meter.observe(nbytes, 1e-5 + nbytes / 10e9)
    assert meter.cost.seconds(4 * MIB) == pytest.approx(1e-5 + 4 * MIB / 10e9, rel=0.1)


def test_no_cost_is_ever_negative() -> None:
    noise = Random(7)
    meter = CopyMeter(PRIOR)
    for _ in range(500):
        meter.observe(noise.choice([1, 4096, MIB, 64 * MIB]), noise.choice([1e-7, 1e-5, 1e-3, 1.0]))
        assert meter.cost.fixed_s >= 0
        assert meter.cost.s_per_byte > 0


def test_what_tells_nothing_teaches_nothing() -> None:
    meter = CopyMeter(PRIOR)
    meter.observe(0, 0.1)
    meter.observe(MIB, 0.0)
    assert meter.cost == PRIOR
    assert meter.observed == 0
