"""The sliding minute: percentiles near the true ones, seconds that leave, rates of whole seconds."""

from __future__ import annotations

import random

import pytest

from firsttoken.core.clock import NS_PER_S, clock_replaced
from firsttoken.core.step_record import StepRecord
from firsttoken.observability.live import SlidingCounts, SlidingPercentiles
from firsttoken.observability.metrics import FrontendMetrics
from firsttoken.observability.percentiles import percentiles
from firsttoken.transport.messages import EngineStats


@pytest.fixture
def clock():
    time = [1000 * NS_PER_S]
    with clock_replaced(lambda: time[0]):
        yield time


def test_percentiles_are_within_a_bucket_of_the_true_ones(clock):
    random.seed(7)
    for draw in (lambda: random.lognormvariate(-4, 1.2), lambda: random.uniform(0.001, 0.002), lambda: 0.0379):
        window = SlidingPercentiles()
        values = [draw() for _ in range(5000)]
        for value in values:
            window.observe(value)
        read = window.percentiles_ms()
        assert read.pop("count") == 5000
        true = percentiles(value * 1e3 for value in values)
        for name, value in read.items():
            assert value == pytest.approx(true[name], rel=0.06), name


def test_what_is_older_than_the_window_is_gone(clock):
    window = SlidingPercentiles(window_s=3)
    for second in range(10):
        clock[0] = (1000 + second) * NS_PER_S
        window.observe(0.001 * 2**second)
        assert window.percentiles_ms()["count"] == min(second + 1, 3)
    assert window.percentiles_ms()["p50"] == pytest.approx(256, rel=0.06)
    clock[0] += 3 * NS_PER_S
    assert window.percentiles_ms() == {"count": 0, "p50": None, "p90": None, "p95": None, "p99": None}
    clock[0] += 3600 * NS_PER_S
    window.observe(0.5)
    assert window.percentiles_ms()["count"] == 1


def test_reading_while_a_second_goes_on_sees_all_of_it(clock):
    counts = SlidingCounts()
    counts.add(1)
    assert counts.read() == {1: 1}
    counts.add(1)
    counts.add(2, 5)
    assert counts.read() == {1: 2, 2: 5}
    clock[0] += NS_PER_S
    assert counts.read() == {1: 2, 2: 5}


def test_rates_count_whole_seconds(clock):
    counts = SlidingCounts()
    for _ in range(20):
        for _ in range(40):
            counts.add(0)
        clock[0] += NS_PER_S // 2
    assert counts.per_second() == 80
    clock[0] += NS_PER_S // 3
    assert counts.per_second() == 80
    clock[0] += 3 * NS_PER_S
    assert counts.per_second() == 32
    clock[0] += 5 * NS_PER_S
    assert counts.per_second() == 0


@pytest.mark.parametrize("seconds", [0.0, -1e-9, 1e-12, 1e-6])
def test_nothing_is_too_short(clock, seconds):
    window = SlidingPercentiles()
    window.observe(seconds)
    assert window.percentiles_ms()["p99"] == pytest.approx(0.001, abs=2e-4)


def test_memory_is_bounded_by_the_window(clock):
    counts = SlidingCounts(window_s=60)
    for second in range(1000):
        clock[0] = second * NS_PER_S
        counts.add(second % 7)
    assert len(counts._seconds) <= 60


def test_the_metrics_feed_it(clock):
    metrics = FrontendMetrics()
    metrics.of(0).first_token(0.040)
    metrics.of(0).gaps.note(10_000_000)
    metrics.of(0).gaps.note(10_000_000)
    metrics.of(0).request_done(0.060)
    metrics.of(0).ended("finished", 2)
    metrics.of(2).ended("failed")
    clock[0] += NS_PER_S
    read = metrics.live.read()
    assert read["p0"]["ttft_ms"]["p50"] == pytest.approx(40, rel=0.06)
    assert read["p0"]["itl_ms"]["count"] == 2
    assert read["p0"]["e2e_ms"]["p99"] == pytest.approx(60, rel=0.06)
    assert read["p0"]["tokens_per_s"] == pytest.approx(3 / 5)
    assert (read["p0"]["ended"], read["p2"]["ended"]) == ({"finished": 2}, {"failed": 1})
    assert read["p1"]["ttft_ms"]["count"] == 0


def test_all_rates_are_of_the_same_seconds_and_none_shows_the_past(clock):
    metrics = FrontendMetrics()
    record = StepRecord(1, 0, 0, 0, 0, 0, decode_rows=6, prefill_tokens=2)
    for _ in range(20):
        for service in (0, 2):
            metrics.of(service).first_token(0.01)
            metrics.of(service).gaps.note(10_000_000)
            metrics.of(service).request_done(0.02)
        metrics.take_steps([record] * 10)
        metrics.update(EngineStats())
        clock[0] += NS_PER_S // 2
    rows = metrics.live.read()
    assert metrics.live.rates(rows) == {
        "requests_per_s": 4,
        "output_tokens_per_s": 8,
        "prompt_tokens_per_s": 40,
        "steps_per_s": 20,
        "tokens_per_step": 8,
    }
    assert (rows["p0"]["requests_per_s"], rows["p1"]["requests_per_s"], rows["p2"]["tokens_per_s"]) == (2, 0, 4)
    clock[0] += 6 * NS_PER_S
    rows = metrics.live.read()
    assert {one["requests_per_s"] + one["tokens_per_s"] for one in rows.values()} == {0}
    assert set(metrics.live.rates(rows).values()) == {0, None}


def test_seconds_in_which_nothing_was_counted_do_no_harm(clock):
    """Steps that only decode bring 0 prompt tokens; a minute of such must not take away what is not there."""
    metrics = FrontendMetrics()
    for _ in range(130):
        metrics.take_steps([StepRecord(1, 0, 0, 0, 1, 1, decode_rows=3)])
        clock[0] += NS_PER_S
    assert metrics.live.rates({})["prompt_tokens_per_s"] == 0
