"""Fair shares between the tenants of a class, and what the scheduler remembers of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.core.errors import InvalidRequest
from firsttoken.scheduler.tenants import EXPECTED_OUTPUT, TenantTags
from tests.support.line import Line, request


def unlike(number: int, length: int) -> list[int]:
    return [100 + number] + [7] * (length - 1)


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    line = Line()
    tickets = [line.push("a", prompt=1 + 37 * number % 50) for number in range(20)]
    assert [line.serve() for _ in range(20)] == tickets


def test_a_prompt_lets_pass_what_comes_within_its_patience_and_is_shorter() -> None:
    line = Line(patience=2.0)
    long = line.push("a", prompt=100, output=10)  # stands at 200
    short = [line.push("a", prompt=10, output=10) for _ in range(10)]  # at 130, 150, 170, ...
    middle = line.push("a", prompt=60, output=10)  # at 430
    assert [line.serve() for _ in range(5)] == [*short[:4], long]
    assert [line.serve() for _ in range(7)] == [*short[4:], middle]


def test_a_tenant_that_sends_much_does_not_delay_one_that_sends_little() -> None:
    line = Line()
    for _ in range(50):
        line.push("flood")
    line.served(10)
    line.push("little")
    assert "little" in line.served(2)
    line.push("little")
    assert "little" in line.served(3)


def test_shares_are_of_tokens_not_of_requests() -> None:
    line = Line()
    for _ in range(40):
        line.push("long", prompt=90, output=10)
        line.push("short", prompt=10, output=10)
    served = line.served(48)
    assert served.count("short") == 40, "five for each long one"


def test_long_outputs_count_as_expected_not_as_allowed() -> None:
    _, charge = TenantTags().charge(request(1, "a", prompt=5, output=100_000))
    assert charge == 5 + EXPECTED_OUTPUT


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=4), st.data())
def test_while_all_have_requests_each_gets_its_share(shares: list[int], data: st.DataObject) -> None:
    line = Line()
    costs = st.integers(1, 200)
    for _ in range(80):
        for tenant, share in enumerate(shares):
            line.push(str(tenant), prompt=data.draw(costs), output=1, share=float(share))
    got = [0.0] * len(shares)
    left = [80] * len(shares)
    while min(left) > 0:
        ticket = line.serve()
        tenant = int(ticket.request.tenant)
        got[tenant] += ticket.charge  # tokens over the share
        left[tenant] -= 1
        # The bound of start-time fair queueing: the largest request of each, over its share.
        assert max(got) - min(got) <= 2 * 201 / min(shares) + 1e-6


def test_what_is_aborted_while_it_waits_is_not_charged() -> None:
    line = Line()
    line.push("b")
    for ticket in [line.push("a", prompt=1000) for _ in range(30)]:
        line.queue.end(ticket)
    line.push("b")
    line.push("a")
    assert line.served(3) == ["b", "a", "b"]


def test_tenants_are_forgotten() -> None:
    tags = TenantTags()
    for number in range(10_000):
        tag, _ = tags.charge(request(number, f"tenant {number}"))
        tags.start(tag + 100)
        assert len(tags) <= 200
    tags.forget()
    assert len(tags) == 0


def test_a_class_without_waiting_requests_begins_anew() -> None:
    line = Line()
    for _ in range(30):
        line.push("a")
    line.served(30)
    line.push("a")
    line.push("b")
    assert line.served(1) == ["a"]


def test_classes_do_not_share() -> None:
    line = Line()
    for _ in range(9):
        line.push("a", service=1)
    line.push("b", service=2)
    line.push("a", service=2)
    line.served(9)
    assert line.served(2) == ["b", "a"]


def test_preempted_requests_are_not_charged_again(world: Any, clock: Any) -> None:
    w = world(blocks=64, slots=1, alone=64)
    first = w.add(unlike(0, 9), 4, tenant="a")
    w.add(unlike(1, 9), 4, tenant="b")
    w.step()
    for _ in range(3):
        w.scheduler.preempt(first.request_id)
        w.step()
    w.add(unlike(2, 9), 4, tenant="a")
    w.add(unlike(3, 9), 4, tenant="b")
    w.drain()
    order = sorted(w.requests, key=w.first_token_step.__getitem__)
    assert [w.requests[number].tenant for number in order] == ["a", "b", "a", "b"]


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf")])
def test_shares_that_mean_nothing_are_refused(world: Any, share: float) -> None:
    with pytest.raises(InvalidRequest, match="share of a tenant must be more than 0"):
        world().add([1, 2], share=share)


def test_tiny_shares_do_not_break_the_order() -> None:
    line = Line()
    for _ in range(5):
        line.queue.end(line.push("tiny", share=1e-300))
        line.push("tiny", share=1e-300)
    line.push("b")
    assert line.served(2).count("b") == 1
