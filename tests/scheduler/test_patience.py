"""How long a long prompt lets others pass."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.scheduler.patience import Patience
from tests.support.line import Line


@pytest.mark.parametrize("tenants", [1, 3, 20])
def test_a_long_prompt_is_passed_by_as_much_work_however_many_send_it(tenants: int) -> None:
    line = Line(patience=5.0)
    for number in range(2 * tenants):
        line.push(str(number % tenants), prompt=90)
    long = line.push("long", prompt=1000)
    passed = 0
    while line.serve() is not long:
        passed += 100
        line.push(str(passed // 100 % tenants), prompt=90)
        assert passed <= 2 * tenants * 100 + 5 * 1000 + 1010 + 1000 * tenants, "each goes on for ten of its own"
    assert passed >= 4000, "and by as much as its patience allows"


def test_one_that_runs_stands_by_the_usual_length_when_enough_has_passed() -> None:
    line = Line(patience=2.0)
    long = line.push("a", prompt=100)
    line.serve()
    assert long.place == 200.0
    for _ in range(12):
        line.push("b", prompt=10)
        line.serve()
    assert long.tag == 0.0
    assert 40.0 <= long.place < 70.0, "twice the mean, in which its own length counts too"


def test_what_leaves_unstarted_counts_as_passed_and_ended_ones_are_not_kept() -> None:
    line = Line(patience=1.0)
    long = line.push("a", prompt=400)
    for number in range(50):
        line.queue.end(line.push(str(number), prompt=10))
    assert long.place < 100
    patience: Patience[Any] = Patience()
    items = [object() for _ in range(1000)]
    for item in items:
        patience.begin(item, 1, 1e9)
    for item in items:
        patience.forget(item)
    assert len(patience) == 0
    assert patience.passed(1e12) == []
