"""All that observes at once, while callers come and go at random or the engine is killed: the counts agree afterwards,
no gauge stays up, and no task, thread or file does."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from firsttoken.observability.otlp.settings import OtlpSettings
from firsttoken.server.exporting import exporting
from tests.server.conftest import forever

STREAMS, AT_ONCE = 240, 80
OUTCOMES = {"finished", "aborted", "refused", "expired", "failed"}


async def connect(url: str, head: str, body: bytes = b""):
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write(f"{head} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode())
    writer.write(body)
    return reader, writer


async def read(url: str, head: str, body: bytes = b"", patience_s: float = 20.0) -> bytes:
    """What came until the server closed, or until patience ended and the connection was dropped."""
    reader, writer = await connect(url, head, body)
    found = b""
    try:
        async with asyncio.timeout(patience_s):
            while data := await reader.read(65536):
                found += data
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return found


async def caller(url: str, rng: random.Random) -> bytes:
    body = {"prompt": "x" * rng.randint(1, 50), "max_tokens": rng.randint(1, 60), "stream": True}
    body |= {"service_tier": rng.choice(["p0", "p1", "p2"]), "timings": rng.random() < 0.5, "n": rng.choice([1, 2])}
    if rng.random() < 0.1:
        body["max_tokens"] = -1
    if rng.random() < 0.1:
        body["deadline_ms"] = 1
    patience = rng.random() * 0.3 if rng.random() < 0.4 else 20.0
    return await read(url, "POST /v1/completions", json.dumps(body).encode(), patience)


def figures(text: bytes) -> dict[str, float]:
    """Sums over all labels, but for outcomes."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            name = f"{sample.name} {sample.labels['outcome']}" if "outcome" in sample.labels else sample.name
            found[name] = found.get(name, 0) + sample.value
    return found


def own() -> tuple[int, int]:
    """Files that are open, and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def holds(true, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("killed", [False, True])
async def test_counts_agree_and_nothing_stays(make_client, serve_http, killed):
    rng = random.Random(int(killed))
    settings = OtlpSettings("http", "http", "http://127.0.0.1:9", spans_every_s=0.05, metrics_every_s=0.2)
    async with make_client(forever, step_s=0.001, max_num_seqs=24) as client, serve_http(client.app) as url:
        await read(url, "GET /metrics")  # and have the loop's own thread made
        tasks, (files, threads) = len(asyncio.all_tasks()), own()
        async with exporting(settings, client.llm):
            ended = asyncio.Event()

            async def scrape() -> None:
                while not ended.is_set():
                    await read(url, "GET /metrics")

            watching = [asyncio.create_task(read(url, "GET /dashboard/live?hz=10", patience_s=60)) for _ in range(3)]
            scraping = asyncio.create_task(scrape())
            gate = asyncio.Semaphore(AT_ONCE)

            async def one() -> bytes:
                async with gate:
                    return await caller(url, rng)

            calls = [asyncio.create_task(one()) for _ in range(STREAMS)]
            if killed:
                await holds(lambda: len(client.llm.recent) > STREAMS // 4, 30)
                client.engine.kill()
            replies = await asyncio.wait_for(asyncio.gather(*calls), 40)
            ended.set()
            await scraping
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        await holds(lambda: len(client.llm.recent) == STREAMS)
        await holds(lambda: client.app.dashboard._feed._ticking is None)
        if not killed:
            await client.quiet()
        told = figures((await read(url, "GET /metrics")).partition(b"\r\n\r\n")[2])
        outcomes = {name: told.get(f"firsttoken_requests_ended_total {name}", 0) for name in OUTCOMES}
        assert told["firsttoken_requests_started_total"] == sum(outcomes.values())
        assert outcomes["finished"] > 0
        assert outcomes["aborted"] > 0
        assert (outcomes["failed"] > 0) == killed
        for gauge in ("requests_running", "requests_waiting", "class_requests_running", "class_requests_waiting"):
            assert told[f"firsttoken_{gauge}"] == 0, gauge
        assert {one.outcome for one in client.llm.recent.latest(STREAMS)} <= OUTCOMES
        if killed:
            assert any(b"engine_dead" in reply for reply in replies)
        await holds(lambda: len(asyncio.all_tasks()) <= tasks)
        await holds(lambda: own()[0] <= files)
        assert threading.active_count() <= threads + 8  # a pool's
