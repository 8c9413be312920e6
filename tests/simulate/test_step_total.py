"""Steps of a fixed number of token rows."""

from __future__ import annotations

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.scheduler import StepLoad
from firsttoken.simulate.step_total import StepTotal

BUDGET = StepTotal(128, (4, 16, 32))


def tokens(budget: StepTotal, rows: int) -> int:
    return budget.prefill_tokens(StepLoad(rows, 0, 0, 0), waiting=7)


def test_rows_and_prompt_tokens_fill_a_step() -> None:
    assert [tokens(BUDGET, rows) for rows in (0, 1, 4, 5, 17, 33)] == [128, 124, 124, 112, 96, 95]
    assert tokens(BUDGET, 120) == 64, "prompts get half of it"
    assert BUDGET.most == 128


def test_caps_that_were_asked_for_are_kept() -> None:
    capped = BUDGET.limited(None, 20)
    assert capped.prefill_tokens(StepLoad(5, 0, 0, 0), waiting=0) == 20
    assert BUDGET.limited(100, None).most == 100
    assert BUDGET.limited(None, None) is BUDGET
    with pytest.raises(ConfigError, match="1 token row or more, got 0"):
        StepTotal(0, ())
