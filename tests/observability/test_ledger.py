"""The step ledger and the percentile object."""

import gc
import os
import timeit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.core.step_record import StepRecord
from firsttoken.observability.ledger import GCClock, RunQueueClock, StepLedger, summary
from firsttoken.observability.percentiles import percentiles

MS = 1_000_000


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200))
def test_percentiles_are_numpys(values):
    found = percentiles(values)
    assert list(found) == ["mean", "p50", "p90", "p95", "p99", "max"]
    assert found["max"] == max(values)
    assert found["mean"] == pytest.approx(np.mean(values), rel=1e-9, abs=1e-3)
    for name in ("p50", "p90", "p95", "p99"):
        assert found[name] == pytest.approx(np.percentile(values, int(name[1:])), rel=1e-9, abs=1e-3)


def test_percentiles_of_nothing():
    assert percentiles([]) == {}


def record(step):
    start = step * 10 * MS
    return StepRecord(
        step,
        start,
        start + MS,
        start + 2 * MS,
        start + 8 * MS,
        start + 9 * MS,
        decode_rows=step,
        forward_ns=5 * MS,
        sample_ns=MS,
    )


def test_the_ring_keeps_the_last_records_in_order():
    ledger = StepLedger(capacity=3)
    for step in range(5):
        ledger.append(record(step))
    assert len(ledger) == 3
    assert [entry.step_id for entry in ledger.snapshot()] == [2, 3, 4]


def test_capacity_must_be_positive():
    with pytest.raises(ValueError, match="0"):
        StepLedger(0)


def test_summary():
    found = summary(record(step) for step in range(4))
    assert found["steps"] == 4
    expected = {"plan_ms": 1, "lane_ms": 1, "compute_ms": 6, "harvest_ms": 1, "gap_ms": 4}
    assert {name: found[name]["p50"] for name in expected} == expected
    assert found["gc_ms"] == {}
    assert summary([])["compute_ms"] == {}


def test_appending_is_cheap():
    ledger = StepLedger()
    best = min(timeit.repeat(lambda: ledger.append(StepRecord(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)), number=2000, repeat=5))
    assert best / 2000 < 2e-6


def test_gc_clock_sees_collections_only_while_started():
    clock = GCClock()
    clock.start()
    clock.start()
    try:
        gc.collect()
        assert clock.take() > 0
        assert clock.take() == 0
    finally:
        clock.stop()
    gc.collect()
    assert clock.take() == 0


def test_the_two_segments_of_compute_are_told_apart():
    found = summary([record(step) for step in range(4)])
    assert (found["compute_ms"]["p50"], found["forward_ms"]["p50"], found["sample_ms"]["p50"]) == (6.0, 5.0, 1.0)


def test_the_wait_for_a_processor_is_what_the_kernel_counts(tmp_path):
    clock = RunQueueClock()
    assert clock.take() == 0, "not started"
    clock.start()
    counts = tmp_path / "schedstat"
    counts.write_text("100 5000 3\n")
    if clock._file is not None:
        clock.stop()
    clock._file = os.open(counts, os.O_RDONLY)
    clock.take()
    counts.write_text("200 12500 4\n")
    assert clock.take() == 7500
    assert clock.take() == 0
    counts.write_text("damaged")
    assert clock.take() == 0
    clock.stop()
    clock.stop()
    assert clock.take() == 0


def test_a_kernel_without_the_count_leaves_it_at_zero(monkeypatch):
    def refuse(*_):
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", refuse)
    clock = RunQueueClock()
    clock.start()
    assert clock.take() == 0
    clock.stop()
