"""A load that ends before its time: by Ctrl-C, or because the server is gone. What was measured is told."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from firsttoken.bench.arrivals import Mix
from firsttoken.bench.http import stop
from firsttoken.bench.http.load import measure_http
from firsttoken.bench.http.server import Answered, Server, find_server
from firsttoken.bench.http.target import Target
from firsttoken.bench.repeats import measure_all
from firsttoken.bench.shape import Load
from tests.support.faulty_server import FaultyServer

LOADS = [{"rate": 40.0}, {"concurrency": 4}]


def load(**how: object) -> Load:
    return Load(mix=Mix.parse("8:4"), seconds=60.0, warmup_s=0.0, seed=1, **how)  # type: ignore[arg-type]


async def find(faulty: FaultyServer) -> Server:
    return await find_server(Target.parse(faulty.url), model=None, chat=False, text=False, api_key=None, timeout_s=20.0)


async def asked(faulty: FaultyServer, count: int) -> None:
    """Until it was asked so often, and has answered but for the last."""
    while len(faulty.asks) < count:  # noqa: ASYNC110  # it tells nobody
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", LOADS)
async def test_an_interrupt_ends_the_load_and_tells_what_was_measured(how: dict[str, object]) -> None:
    faulty = FaultyServer()
    async with faulty.running():
        server = await find(faulty)

        async def interrupt(before: int = len(faulty.asks)) -> None:
            await asked(faulty, before + 5)
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = asyncio.create_task(interrupt())
        async with asyncio.timeout(30):
            result = await measure_http(server, load(**how), "x")
        await interrupting
        server.pool.close()
    assert result["stopped"] == "interrupted"
    assert result["requests"]["ok"] > 0
    assert result["requests"]["failed"] == 0
    assert result["ttft_ms"]["p50"] > 0


@pytest.mark.parametrize("how", LOADS)
async def test_a_server_that_is_gone_ends_the_load(how: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "GONE_S", 0.3)
    faulty = FaultyServer()
    async with faulty.running():
        server = await find(faulty)
        before = len(faulty.asks)
        measuring = asyncio.create_task(measure_http(server, load(**how), "x"))
        await asked(faulty, before + 5)
    async with asyncio.timeout(20):
        result = await measuring
    server.pool.close()
    assert result["stopped"].startswith("the server is gone: ")
    assert result["requests"]["ok"] > 0
    assert any(reason.startswith("no connection") for reason in result["requests"]["reasons"])


def test_a_moment_without_connections_is_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "GONE_S", 0.0)
    watched = stop.Stop()
    unanswered = Answered(8, 4, sent_ns=0, error="no connection: Connection refused")
    for _ in range(2):
        for _ in range(stop.GONE_REQUESTS - 1):
            watched.saw(unanswered)
        watched.saw(Answered(8, 4, sent_ns=0, error="HTTP 503"))
    assert watched.reason is None
    for _ in range(stop.GONE_REQUESTS):
        watched.saw(unanswered)
    assert watched.reason is not None


async def test_nothing_is_measured_after_an_interrupt() -> None:
    made = 0

    async def measure(one: Load, number: int) -> dict[str, object]:
        nonlocal made
        made += 1
        return {"requests": {"sent": 1}, "tokens": {"output": 1}, "stopped": "interrupted" if made == 2 else None}

    results = await measure_all(measure, load(), [1.0, 2.0, 4.0], 1)
    assert [one["stopped"] for one in results] == [None, "interrupted"]
