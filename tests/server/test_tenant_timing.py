"""The clock does not tell a tenant what another one has sent."""

from __future__ import annotations

import pytest
from benchmarks.kv_tenants import measure, told_apart

from firsttoken import AsyncEngineArgs

pytestmark = pytest.mark.clock


def test_how_well_times_tell_two_things_apart() -> None:
    assert told_apart([1, 2, 3], [4, 5, 6]) == 1
    assert told_apart([1, 2, 3], [1, 2, 3]) == 0.5
    assert told_apart([7], [4, 5, 6, 8]) == 0.25


@pytest.mark.model
async def test_anothers_prompt_takes_as_long_as_one_that_nobody_has_sent() -> None:
    args = AsyncEngineArgs(model="smollm2", threads=1, max_model_len=320)
    # Other programs make all times longer, in turns. What is found takes less than a tenth of the time.
    for _ in range(3):
        found = await measure(args, tokens=256, rounds=8)
        if found["own_told_apart"] > 0.95:
            break
    assert found["own_told_apart"] > 0.95, "its own is known by the clock"
    assert found["told_apart"] < 0.93, "half, and three standard errors"
    assert found["other_ms"] > 2 * found["own_ms"]
