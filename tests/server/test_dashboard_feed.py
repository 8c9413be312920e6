"""The live feed: what its frames tell, whom, how often, and that nobody's absence costs anything."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager, closing

import pytest

from firsttoken.core.step_record import StepRecord
from firsttoken.frontend.restarts import RestartPolicy
from firsttoken.server import listener as listener_module
from firsttoken.server.config import ServerConfig
from firsttoken.server.dashboard import feed as feed_module
from firsttoken.server.dashboard.steps import FIELDS, bars
from firsttoken.server.run import _Uvicorn, _uvicorn_config
from tests.server.conftest import forever

LIVE = "/dashboard/live?hz=10"


@asynccontextmanager
async def watching(client, path=LIVE, **options):
    call = client.start(path, method="GET", **options)
    try:
        yield call
    finally:
        call.leave()
        await asyncio.wait_for(call.task, 2)


def frames(call) -> list:
    return call.reply.events


async def until(call, holds, *, within=3.0):
    """The first frame that ``holds``."""
    async with asyncio.timeout(within):
        while True:
            for frame in frames(call):
                if holds(frame):
                    return frame
            await asyncio.sleep(0.01)


async def feed_of(client):
    return client.app.dashboard._feed


async def test_a_request_is_seen(make_client):
    async with make_client(forever, step_s=0.002, cached_tokens=4) as client:
        async with watching(client) as call:
            first = await until(call, lambda frame: "engine" in frame)
            assert (first["engine"]["model"], first["state"], first["running"]) == ("stub", "idle", 0)
            assert first["step_fields"] == list(FIELDS)
            done = await client.complete("hello you", max_tokens=20, service_tier="p0")
            ended = await until(call, lambda frame: frame["requests"])
            (line,) = ended["requests"]
            assert (line["id"], line["service_class"]) == (done.headers["x-request-id"], "p0")
            assert (line["prompt_tokens"], line["output_tokens"], line["outcome"]) == (9, 20, "finished")
            assert 0 < line["ttft_ms"] < line["total_ms"]
            told = await until(call, lambda frame: frame["classes"]["p0"]["ended"])
            p0 = told["classes"]["p0"]
            assert (p0["ttft_ms"]["count"], p0["itl_ms"]["count"], p0["ended"]) == (1, 19, {"finished": 1})
            # The line's first token is the engine's, the window's the one that came here.
            assert line["ttft_ms"] * 0.93 < p0["ttft_ms"]["p50"] < line["total_ms"] * 1.07
            await until(call, lambda frame: sum(bar[1] for bar in frame["steps"]) > 0)
            steps = [bar for frame in frames(call) for bar in frame["steps"]]
            assert sum(bar[FIELDS.index("steps")] for bar in steps) == 20
            assert [bar[0] for bar in steps] == sorted({bar[0] for bar in steps}), "each step once, in order"
            kv = await until(call, lambda frame: (frame.get("kv") or {}).get("heat"))
            assert kv["kv"]["heat"]["tokens"]["p0"]["device"][0] == 4
        # Who comes later begins with what was.
        async with watching(client) as call:
            first = await until(call, lambda frame: "engine" in frame)
            assert [one["id"] for one in first["requests"]] == [done.headers["x-request-id"]]
            assert sum(bar[1] for bar in first["steps"]) == 20
            assert first["kv"]["heat"]


async def test_queues_are_told_by_class(make_client):
    async with make_client(forever, step_s=0.005, max_num_seqs=1) as client:
        calls = [
            client.start("/v1/completions", {"prompt": "hi", "max_tokens": 500, "service_tier": tier})
            for tier in ("p1", "p2", "p2")
        ]
        async with watching(client) as call:
            frame = await until(call, lambda frame: frame["waiting"] == 2)
            assert (frame["running"], frame["state"]) == (1, "busy")
            told = {name: (one["running"], one["waiting"]) for name, one in frame["classes"].items()}
            assert told == {"p0": (0, 0), "p1": (1, 0), "p2": (0, 2)}
            assert frame["kv_blocks"]["used"] > 0
            busy = await until(call, lambda frame: (frame["rates"]["output_tokens_per_s"] or 0) > 0)
            assert busy["rates"]["steps_per_s"] > 0
        for one in calls:
            one.leave()
            await one.task


@pytest.mark.parametrize("hz", ["0", "11", "nan", "x", "", "-1", "1e3", "inf"])
async def test_a_pace_that_cannot_be_kept_is_refused(client, hz):
    reply = await client.get(f"/dashboard/live?hz={hz}")
    assert (reply.status, reply.error["param"]) == (400, "hz")
    assert "[0.1, 10]" in reply.error["message"]


async def test_each_listener_has_its_pace_and_all_share_the_ticks(client):
    feed = await feed_of(client)
    looks = []
    now = feed._snapshots.now
    feed._snapshots.now = lambda: (looks.append(1), now())[1]
    async with watching(client) as fast, watching(client) as second, watching(client, "/dashboard/live?hz=2") as slow:
        await asyncio.sleep(1.3)
    assert 9 <= len(frames(fast)) <= 15
    assert abs(len(frames(fast)) - len(frames(second))) <= 2
    assert 2 <= len(frames(slow)) <= 4
    assert len(looks) <= len(frames(fast)) + 4


async def test_a_fast_listener_need_not_wait_for_a_slow_one(client):
    async with watching(client, "/dashboard/live?hz=0.1") as slow:
        await until(slow, lambda frame: True)
        async with watching(client) as fast:
            async with asyncio.timeout(2):
                while len(frames(fast)) < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    assert len(frames(slow)) == 1


async def test_without_listeners_nothing_runs(make_client):
    async with make_client() as client:
        feed = await feed_of(client)
        others = list(client.llm.recent._subscribers)
        async with watching(client), watching(client):
            await asyncio.sleep(0.05)
            assert feed._ticking is not None
            assert client.llm.recent._subscribers == [*others, feed._note_end]
        assert feed._ticking is None
        assert not feed._listeners
        assert client.llm.recent._subscribers == others
        number = feed._number
        await client.complete()
        await asyncio.sleep(0.25)
        assert feed._number == number


async def test_listeners_are_bounded(client, monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_LISTENERS", 2)
    async with watching(client), watching(client):
        await asyncio.sleep(0.05)
        reply = await client.get(LIVE)
        assert (reply.status, reply.error["code"]) == (503, "dashboard_full")
    async with watching(client) as call:
        await until(call, lambda frame: True)


async def test_some_who_come_again_and_again_keep_nobody_waiting(client):
    async with watching(client) as call:
        await until(call, lambda frame: True)
        async with asyncio.timeout(5):
            while len(frames(call)) < 6:
                await client.post(LIVE, method="HEAD")
                await asyncio.sleep(0.02)


async def test_a_picture_that_cannot_be_made_ends_the_streams_and_does_not_stay(client, monkeypatch, caplog):
    feed = await feed_of(client)
    now = feed._snapshots.now
    async with watching(client) as call:
        await until(call, lambda frame: True)
        monkeypatch.setattr(feed._snapshots, "now", lambda: 1 / 0)
        await asyncio.wait_for(call.task, 2)
        assert call.reply.complete
        assert "could not be made" in caplog.text
    with pytest.raises(ZeroDivisionError):
        await client.get(LIVE)
    assert not feed._listeners
    assert feed._ticking is None
    monkeypatch.setattr(feed._snapshots, "now", now)
    async with watching(client) as call:
        await until(call, lambda frame: True)


async def test_one_who_never_reads_loses_his_connection(client, monkeypatch):
    monkeypatch.setattr(listener_module, "UNREAD_S", 1)
    feed = await feed_of(client)
    with closing(listener_module.bind(ServerConfig(port=0))) as listening, socket.socket() as caller:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server = _Uvicorn(_uvicorn_config(client.app))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(caller.connect, listening.getsockname())
        caller.send(b"GET /dashboard/live?hz=10 HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(15):
            while not feed._listeners:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while feed._listeners:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert feed._ticking is None
        server.should_exit = True
        await serving


async def test_head_ends_at_once(client):
    reply = await client.post(LIVE, method="HEAD")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert not (await feed_of(client))._listeners


async def test_a_key_sees_its_own_requests(make_client):
    config = ServerConfig(api_keys=("one-key", "two-key"))
    async with make_client(config=config) as client:
        head = {name: {"authorization": f"Bearer {name}-key"} for name in ("one", "two")}
        assert (await client.get(LIVE)).status == 401
        assert (await client.get(LIVE, headers={"authorization": "Bearer wrong"})).status == 401
        old = await client.post("/v1/completions", {"prompt": "hi"}, headers=head["one"])
        async with watching(client, headers=head["one"]) as one, watching(client, headers=head["two"]) as two:
            await until(two, lambda frame: True)
            new = await client.post("/v1/completions", {"prompt": "hi"}, headers=head["two"])
            await until(two, lambda frame: frame["requests"])
            await asyncio.sleep(0.25)
        ids = [[line["id"] for frame in frames(call) for line in frame["requests"]] for call in (one, two)]
        assert ids == [[old.headers["x-request-id"]], [new.headers["x-request-id"]]]


async def test_a_dead_engine_is_told_and_the_feed_goes_on(make_client):
    async with make_client(forever, step_s=0.002) as client:
        async with watching(client) as call:
            asked = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 4000, "service_tier": "p1"})
            await until(call, lambda frame: frame["classes"]["p1"].get("running") == 1)
            client.engine.kill("the device is on fire")
            dead = await until(call, lambda frame: frame["state"] == "dead")
            assert "the device is on fire" in dead["error"]
            assert (dead["running"], dead["classes"]["p1"]["running"]) == (0, 0), "nobody runs on a dead engine"
            await asked.task
            ended = await until(call, lambda frame: frame["requests"])
            assert ended["requests"][0]["outcome"] == "failed"
            count = len(frames(call))
            await asyncio.sleep(0.3)
            assert len(frames(call)) > count
        async with watching(client) as call:
            first = await until(call, lambda frame: True)
            assert (first["state"], first["engine"]["model"]) == ("dead", "stub"), "what was known is shown on"


async def test_an_engine_that_is_started_again_is_told_and_its_steps_go_on(make_client):
    once = RestartPolicy(limit=1)
    async with make_client(forever, step_s=0.002, restarts=once) as client, watching(client) as call:
        await client.complete(max_tokens=5)
        before = await until(call, lambda frame: frame["steps"])
        client.engine.kill("the device is on fire")
        away = await until(call, lambda frame: frame["state"] == "restarting")
        assert "the device is on fire" in away["error"]
        back = await until(call, lambda frame: frame["state"] == "idle" and frame["now_ms"] > away["now_ms"])
        assert back["error"] is None
        await client.complete(max_tokens=5)
        after = await until(call, lambda frame: frame["steps"] and frame["now_ms"] > back["now_ms"])
        assert after["steps"][0][0] > before["steps"][-1][0], "numbered on"


async def test_draining_is_told_and_the_stop_ends_the_streams(make_client):
    async with make_client(forever, step_s=0.01) as client:
        running = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 1000})
        call = client.start(LIVE, method="GET")
        await until(call, lambda frame: frame["running"] == 1)
        drain = asyncio.create_task(client.llm.drain(5))
        await until(call, lambda frame: frame["state"] == "draining")
        client.app.dashboard.close()
        await asyncio.wait_for(call.task, 1)
        assert call.reply.complete
        assert (await client.get(LIVE)).error["code"] == "server_stopping"
        running.leave()
        await asyncio.gather(running.task, drain)


async def test_a_reader_that_stops_reading_misses_ticks_but_no_step(make_client):
    """Its frames are not kept for it: when it reads on it gets the present, and the steps since."""
    async with make_client(forever, step_s=0.005) as client:
        feed = await feed_of(client)
        listener = feed_module.Listener(10.0, None)
        reading = feed.frames(listener)
        await anext(reading)
        await client.complete(max_tokens=60)
        await asyncio.sleep(0.5)
        late = json.loads(await anext(reading))
        assert sum(bar[1] for bar in late["steps"]) == 60
        assert late["now_ms"] == pytest.approx(json.loads(feed._ticks[-1].common + b"}")["now_ms"])
        await reading.aclose()
        assert feed._ticking is None


def records(*kinds: str, **fields) -> list[StepRecord]:
    """Steps of 1 ms, 2 ms apart: d(ecode), p(refill) or m(ixed)."""
    made = []
    for at, kind in enumerate(kinds):
        ns = at * 2_000_000
        rows, prompt = {"d": (4, 0), "p": (0, 64), "m": (4, 64)}[kind]
        times = (ns, ns + 1000, ns + 2000, ns + 1_002_000, ns + 1_003_000)
        made.append(StepRecord(at, *times, decode_rows=rows, prefill_tokens=prompt, **fields))
    return made


def test_few_steps_are_a_bar_each():
    rows = [dict(zip(FIELDS, row, strict=True)) for row in bars(records("d", "p", "m", gc_ns=5000, preempted=1))]
    assert [(row["id"], row["steps"], row["decode_rows"], row["prefill_tokens"]) for row in rows] == [
        (0, 1, 4, 0),
        (1, 1, 0, 64),
        (2, 1, 4, 64),
    ]
    first = {"start": 0.002, "end": 1.002, "longest": 1.0, "plan": 0.001, "gc": 0.005, "uncaptured": 1, "preempted": 1}
    assert {name: rows[0][name] for name in first} == first


def test_of_many_steps_neighbours_of_a_kind_are_one_bar_and_nothing_is_lost():
    steps = records(*"dddddddpdddddddddddddddm", run_queue_ns=1000)
    rows = [dict(zip(FIELDS, row, strict=True)) for row in bars(steps, most=6)]
    assert [row["steps"] for row in rows] == [4, 3, 1, 4, 4, 4, 3, 1]
    assert sum(row["decode_rows"] for row in rows) == sum(step.decode_rows for step in steps)
    assert sum(row["run_queue"] for row in rows) == pytest.approx(0.024)
    assert (rows[0]["start"], rows[0]["end"], rows[0]["longest"]) == (0.002, 7.002, 1.0)


def test_bars_are_bounded_whatever_comes():
    assert len(bars(records(*"dm" * 500), most=40)) == 80
    assert bars([]) == []
