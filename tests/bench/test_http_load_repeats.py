"""Means and confidence intervals of repeated measurements."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.bench.arrivals import Mix
from firsttoken.bench.repeats import half_width, measure_all, student_t95, together
from firsttoken.bench.shape import Load


def result(ms: float, ok: int, *, met: bool = True) -> dict[str, Any]:
    return {
        "requests": {"sent": ok + 1, "ok": ok, "reasons": {"HTTP 500": 1}},
        "ttft_ms": {"p50": ms},
        "itl_ms": {},
        "targets": {"ttft_ms": {"p99": ms, "met": met}},
        "goodput_rps": ms,
        "nothing": None,
    }


def test_together() -> None:
    found = together([result(1, 4), result(2, 5), result(3, 6, met=False)])
    assert found["requests"] == {"sent": 18, "ok": 15, "reasons": {"HTTP 500": 3}}
    assert found["ttft_ms"] == {"p50": 2}
    assert found["targets"]["ttft_ms"] == {"p99": 2, "met": False}
    assert found["nothing"] is None
    # The mean of 1, 2, 3: a deviation of 1, t of 2 degrees of freedom.
    assert found["ci95"]["ttft_ms"]["p50"] == pytest.approx(4.303 / 3**0.5)
    assert found["ci95"]["itl_ms"] == {}
    assert len(found["repeats"]) == 3


def test_half_width_of_a_known_sample() -> None:
    assert half_width([4.0, 6.0]) == pytest.approx(12.706 * 1.0)
    assert half_width([5.0, 5.0, 5.0]) == 0


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (30, 2.042), (31, 2.0395), (60, 2.0003), (120, 1.9799)])
def test_student_t(freedom: int, t: float) -> None:
    assert student_t95(freedom) == pytest.approx(t, abs=1e-3)


async def test_each_rate_is_measured_so_often() -> None:
    seen: list[tuple[float | None, int]] = []

    async def measure(load: Load, number: int) -> dict[str, Any]:
        seen.append((load.rate, number))
        return result(float(number), 1)

    load = Load(mix=Mix((1,), (1,)), rate=None)
    found = await measure_all(measure, load, [2.0, 4.0], 2)
    assert seen == [(2.0, 0), (2.0, 1), (4.0, 2), (4.0, 3)]
    assert [(one["rate"], one["goodput_rps"]) for one in found] == [(2.0, 0.5), (4.0, 2.5)]
    assert "ci95" not in (await measure_all(measure, load, [], 1))[0]
