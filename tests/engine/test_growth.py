"""What an engine holds does not grow with the requests that it has served."""

from __future__ import annotations

import gc
from collections import Counter

from tests.support.scripted_engine import Engine, ask, count_up

REQUESTS = 60
# What is kept of the last few thousand steps.
KEPT = "firsttoken.core.step_record.StepRecord"


def held() -> dict[str, int]:
    """Objects by their type."""
    gc.collect()
    counts = {
        f"{one.__module__}.{one.__qualname__}": count for one, count in Counter(map(type, gc.get_objects())).items()
    }
    return {name: count for name, count in counts.items() if name.startswith("firsttoken.") and name != KEPT}


def test_requests_unlike_any_other_leave_nothing_behind():
    engine = Engine(count_up, blocks=32)
    counts = []
    for round_number in range(3):
        numbers = range(round_number * REQUESTS + 1, (round_number + 1) * REQUESTS + 1)
        engine.submit(*[ask(number, [number % 200, number // 200, *range(30)], max_tokens=2) for number in numbers])
        engine.collect(numbers)
        engine.executor.plans.clear()
        counts.append(held())
    engine.stop()
    before, after = counts[1:]
    grown = {name: count for name, count in after.items() if count - before.get(name, 0) > REQUESTS // 5}
    assert grown == {}
