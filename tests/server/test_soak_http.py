"""The soak over HTTP counts what it should: nothing is lost on a server that works, and what is lost is told."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.overload_http import Address
from benchmarks.soak_http import BAD, Tally, Watch, _bad, soak

from firsttoken.engine.stub import Fault
from tests.server.conftest import forever


def address(url: str) -> Address:
    return Address(int(url.rpartition(":")[2]))


async def test_a_server_that_works_loses_nothing(make_client, serve_http):
    async with make_client(forever, step_s=0.001) as client, serve_http(client.app) as url:
        found = await soak(address(url), streams=30, seconds=0.8, warm_up=0)
    assert found["calls"]["all"] > 30
    assert {name for name, one in found["checks"].items() if not one["pass"]} <= {"api growth", "engine growth"}


async def test_each_malformed_request_is_answered_as_it_should_be(make_client, serve_http):
    async with make_client(forever) as client, serve_http(client.app) as url:
        tally = Tally()
        await asyncio.gather(*(_bad(address(url), kind, tally) for kind in BAD))
    assert tally.outcomes == {"malformed": len(BAD)}, tally.lost


async def test_what_is_lost_is_told(make_client, serve_http):
    def breaks(request):
        return [5, Fault("broken")]

    async with make_client(breaks, step_s=0.001) as client, serve_http(client.app) as url:
        found = await soak(address(url), streams=4, seconds=0.1, warm_up=0)
    assert not found["checks"]["lost"]["pass"]
    assert not found["checks"]["failed"]["pass"]
    assert "1 of" in found["lost"][0]


def test_growth_is_that_of_the_line():
    watch = Watch([(float(at), 100.0 + (at if at >= 10 else 50), 40.0) for at in range(31)])
    found = watch.growth(1, 10)
    assert found["begin_mib"] == pytest.approx(110)
    assert found["slope_mib_per_minute"] == pytest.approx(60)
    assert found["growth"] == pytest.approx(20 / 110)
    assert watch.growth(2, 10)["growth"] == 0
