"""Ended requests are kept for a bounded while, found by what their callers know, and told to who subscribed."""

from __future__ import annotations

from array import array

import pytest

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.observability.recent import EndedRequest, RecentRequests


def ended(id_: str, *, response: str = "", tenant: str = "", tokens: int = 0, ago_s: float = 0) -> EndedRequest:
    at = now_ns() - round(ago_s * NS_PER_S)
    return EndedRequest(
        id=id_,
        response_id=response,
        tenant=tenant,
        route="/v1/completions",
        model="m",
        outcome="finished",
        received_ns=at - 1000,
        received_unix_ns=0,
        ended_ns=at,
        make_account=dict,
        timeline=(),
        token_times=array("q", range(tokens)),
    )


def test_found_by_either_id_and_only_by_its_tenant():
    recent = RecentRequests()
    recent.add(ended("req-1", response="cmpl-1", tenant="a"))
    for id_ in ("req-1", "cmpl-1"):
        assert recent.get(id_).id == "req-1"
        assert recent.get(id_, "a").id == "req-1"
        assert recent.get(id_, "b") is None
    assert recent.get("other") is None


def test_an_id_that_two_tenants_chose_is_each_ones_own():
    recent = RecentRequests()
    for tenant, response in (("a", "cmpl-1"), ("b", "cmpl-2"), ("a", "cmpl-3")):
        recent.add(ended("mine", response=response, tenant=tenant))
    assert [recent.get("mine", tenant).response_id for tenant in "ab"] == ["cmpl-3", "cmpl-2"]
    assert recent.get("mine").response_id == "cmpl-3"


def test_the_oldest_go_when_there_are_too_many():
    recent = RecentRequests(capacity=3)
    for number in range(5):
        recent.add(ended("same", response=f"cmpl-{number}"))
    assert len(recent) == 3
    assert [one.response_id for one in recent.latest(10)] == ["cmpl-4", "cmpl-3", "cmpl-2"]
    assert recent.get("cmpl-1") is None
    assert recent.get("cmpl-2") is not None


def test_the_old_go():
    recent = RecentRequests(age_s=5)
    recent.add(ended("old", ago_s=6))
    assert recent.get("old") is None
    assert len(recent) == 0


def test_token_times_are_bounded_but_the_newest_stays():
    recent = RecentRequests(max_tokens=100)
    recent.add(ended("a", tokens=60))
    recent.add(ended("b", tokens=60))
    assert [one.id for one in recent.latest(10)] == ["b"]
    recent.add(ended("c", tokens=1000))
    assert [one.id for one in recent.latest(10)] == ["c"]


def test_latest_is_one_tenants():
    recent = RecentRequests()
    for number in range(6):
        recent.add(ended(f"r{number}", tenant="ab"[number % 2]))
    assert [one.id for one in recent.latest(2, "a")] == ["r4", "r2"]


def test_subscribers_hear_of_each_until_they_leave_and_one_that_fails_harms_nobody(caplog):
    recent = RecentRequests()
    heard: list[str] = []

    def fail(_: EndedRequest) -> None:
        raise RuntimeError("no")

    recent.subscribe(fail)
    leave = recent.subscribe(lambda one: heard.append(one.id))
    recent.add(ended("a"))
    leave()
    recent.add(ended("b"))
    assert heard == ["a"]
    assert [one.id for one in recent.latest(2)] == ["b", "a"]
    assert "subscriber" in caplog.text


@pytest.mark.parametrize("bad", [{"capacity": 0}, {"age_s": 0}, {"max_tokens": 0}])
def test_bounds_must_be_some(bad):
    with pytest.raises(ValueError, match="above 0"):
        RecentRequests(**bad)
