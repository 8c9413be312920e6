"""What the server says of its start."""

from __future__ import annotations

import pytest

from firsttoken.server.run import start_parts


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"interpreter": 60.4, "imports": 1000.4, "checkpoint": 40.4, "weights": 500.4, "warm_up": 90.4, "other": 3.3},
        {"imports": 0.5, "weights": 1.5, "other": 0.5},
    ],
)
def test_the_parts_that_are_shown_sum_to_the_total(engine):
    total, parts = start_parts(1911.2, engine)
    assert total == 1911
    assert sum(parts.values()) == total
    assert list(parts) == [name for name in engine if name != "other"] + ["other"]
    assert parts["other"] == pytest.approx(1911.2 - sum(ms for name, ms in engine.items() if name != "other"), abs=4)
