"""``GET /v1/requests``: each call is there once it is over, however it ended, for its own caller only."""

from __future__ import annotations

import asyncio
import time

import pytest

from firsttoken.engine.stub import Fault
from firsttoken.observability.account import STAGES
from firsttoken.server import requests as requests_module
from firsttoken.server.config import ServerConfig
from tests.server.conftest import forever, say

MINE = {"x-request-id": "mine/1"}


async def record(client, id_="mine/1", **headers):
    """It comes a moment after the end where the engine has to say its last word of an aborted request."""
    for _ in range(100):
        reply = await client.get(f"/v1/requests/{id_}", headers=headers)
        if reply.status == 200:
            break
        await asyncio.sleep(0.005)
    assert reply.status == 200, reply.body
    return reply.json


def whole(timings) -> bool:
    return sum(timings[stage] for stage in STAGES) == pytest.approx(timings["total_ms"], abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_is_found_by_both_ids_with_its_writing(client, stream, n):
    body = {"prompt": "hi", "stream": stream, "n": n}
    reply = await client.post("/v1/completions", body, headers=MINE)
    answer = reply.events[0] if stream else reply.json
    found = await record(client)
    assert found == await record(client, answer["id"])
    assert (found["id"], found["response_id"], found["object"]) == ("mine/1", answer["id"], "request")
    assert (found["route"], found["model"], found["service_class"]) == ("/v1/completions", "stub", "p2")
    assert (found["outcome"], found["status"], found["error"], found["finish_reason"]) == (
        "finished",
        200,
        None,
        "stop",
    )
    assert (found["prompt_tokens"], found["output_tokens"]) == (2, 14 * n)
    assert len(found["token_ms"]) == 14
    timings = found["timings"]
    assert whole(timings)
    assert timings["write_ms"] > 0
    assert timings["unaccounted_ms"] == 0
    names = [name for name, _ in found["timeline"]]
    assert (names[0], names[-1]) == ("received", "written")
    assert found["timeline"][-1][1] == pytest.approx(timings["total_ms"], abs=1e-6)
    # One meaning everywhere: until the caller's side got the first token of any answer.
    assert 0 < found["ttft_ms"] <= found["token_ms"][0]
    assert n > 1 or found["ttft_ms"] == found["token_ms"][0]
    told = client.llm.metrics.registry.get_sample_value(
        "firsttoken_time_to_first_token_seconds_sum", {"service_class": "p2"}
    )
    assert told * 1e3 == pytest.approx(found["ttft_ms"])
    assert abs(found["received"] - time.time()) < 10


async def test_several_prompts_are_one_record(client):
    await client.post("/v1/completions", {"prompt": ["hi", "hello"]}, headers=MINE)
    found = await record(client)
    assert (found["prompt_tokens"], found["output_tokens"]) == (7, 28)
    assert whole(found["timings"])
    (listed,) = (await client.get("/v1/requests")).json["data"]
    assert listed["id"] == "mine/1"
    assert not {"timeline", "token_ms"} & set(listed)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [(b"{", 400, None), ({"prompt": "x", "model": "other"}, 404, "model_not_found"), ({"prompt": []}, 400, None)],
)
async def test_a_refused_request(client, body, status, code):
    reply = await client.post("/v1/completions", body, headers=MINE)
    assert reply.status == status
    found = await record(client)
    assert (found["outcome"], found["status"]) == ("refused", status)
    assert found["error"] == reply.error["code"]
    assert code is None or found["error"] == code
    assert found["ttft_ms"] is None
    assert whole(found["timings"])
    assert found["timings"]["unaccounted_ms"] == 0
    assert found["timings"]["parse_ms"] > 0


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_failed_request(make_client, tokens):
    async with make_client(lambda request: [97] * tokens + [Fault("boom")]) as client:
        reply = await client.post("/v1/completions", {"prompt": "hi"}, headers=MINE)
        assert reply.status == 500
        found = await record(client)
        assert (found["outcome"], found["status"], found["error"]) == ("failed", 500, "generation_failed")
        assert whole(found["timings"])
        assert found["timings"]["unaccounted_ms"] == 0


async def test_a_caller_who_left(make_client):
    async with make_client(forever, step_s=0.002) as client:
        call = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 4000, "stream": True}, headers=MINE)
        await call.first_byte.wait()
        call.leave()
        await asyncio.wait_for(call.task, 1)
        found = await record(client)
        assert (found["outcome"], found["finish_reason"]) == ("aborted", "abort")
        assert found["output_tokens"] > 0
        assert whole(found["timings"])
        assert found["timings"]["unaccounted_ms"] == 0


async def test_newest_first_and_as_many_as_asked_for(client):
    for number in range(3):
        await client.post("/v1/completions", {"prompt": "hi"}, headers={"x-request-id": f"r{number}"})

    async def ids(query):
        reply = await client.get("/v1/requests" + query)
        return [one["id"] for one in reply.json["data"]]

    assert await ids("") == ["r2", "r1", "r0"]
    assert await ids("?limit=2") == ["r2", "r1"]


async def test_a_caller_who_left_while_queueing_has_the_engines_part_too(make_client):
    async with make_client(forever, step_s=0.02, max_num_seqs=1) as client:
        first = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 4000, "stream": True})
        await first.first_byte.wait()
        call = client.start("/v1/completions", {"prompt": "ho", "max_tokens": 4000}, headers=MINE)
        await asyncio.sleep(0.05)
        call.leave()
        await asyncio.wait_for(call.task, 1)
        found = await record(client)
        timings = found["timings"]
        assert found["outcome"] == "aborted"
        assert timings["queue_ms"] > 10
        assert timings["unaccounted_ms"] == 0
        assert whole(timings)
        assert sum(timings["queue_reasons"].values()) == pytest.approx(timings["queue_ms"], abs=1e-6)
        first.leave()
        await asyncio.wait_for(first.task, 1)


async def test_what_the_stages_consist_of_and_what_was_beside_them(make_client):
    async with make_client(say("x" * 40), step_s=0.001) as client:
        await client.post("/v1/completions", {"prompt": "hi", "stop": ["xz"], "stream": True}, headers=MINE)
        timings = (await record(client))["timings"]
        assert sum(timings["queue_reasons"].values()) == pytest.approx(timings["queue_ms"], abs=1e-6)
        assert (timings["prefill_steps"], timings["decode_steps"]) == (1, 15)
        assert timings["overlapped_ms"].keys() == {"detokenize", "stop", "write"}
        assert min(timings["overlapped_ms"].values()) > 0
        assert 0 < timings["stop_ms"] < 1


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1001", "1e3", "9" * 50, "0" * 9 + "9" * 50, "1" + "0" * 5000])
async def test_a_bad_limit_is_named(client, limit):
    reply = await client.get(f"/v1/requests?limit={limit}")
    assert (reply.status, reply.error["param"]) == (400, "limit")


async def test_a_long_list_lets_others_have_their_turn(client, monkeypatch):
    for _ in range(8):
        await client.complete("hi")
    made = []
    monkeypatch.setattr(requests_module, "shown", lambda ended: made.append(time.monotonic_ns()) or {})
    turns = []

    async def others():
        while len(made) < 8:
            turns.append(len(made))
            await asyncio.sleep(0)

    await asyncio.gather(client.get("/v1/requests"), others())
    assert {0, 4} <= set(turns)


async def test_an_unknown_id(client):
    reply = await client.get("/v1/requests/" + "y" * 1000)
    assert (reply.status, reply.error["code"]) == (404, "request_not_found")
    assert len(reply.body) < 600


async def test_a_key_sees_its_own_only(make_client):
    config = ServerConfig(api_keys=("a" * 20, "b" * 20))
    async with make_client(config=config) as client:
        for key in "ab":
            headers = {"authorization": f"Bearer {key * 20}", **MINE}
            await client.post("/v1/completions", {"prompt": "hi" * (1 + (key == "b"))}, headers=headers)
        await client.post("/v1/completions", {"prompt": "x"}, headers={"authorization": f"Bearer {'b' * 20}"})
        for key, tokens, count in (("a", 2, 1), ("b", 4, 2)):
            headers = {"authorization": f"Bearer {key * 20}"}
            assert (await record(client, **headers))["prompt_tokens"] == tokens
            assert len((await client.get("/v1/requests", headers=headers)).json["data"]) == count
        assert (await client.get("/v1/requests")).status == 401


async def test_a_call_on_another_route_is_none(client):
    await client.post("/tokenize", {"prompt": "hi"})
    await client.get("/v1/models")
    assert (await client.get("/v1/requests")).json["data"] == []


async def test_a_python_caller_has_a_record_too(make_client):
    async with make_client(say("hello")) as client:
        async for _ in client.llm.generate("hi", request_id="py"):
            pass
        (ended,) = client.llm.recent.latest(5)
        assert (ended.id, ended.outcome, ended.finish_reason, ended.output_tokens) == ("py", "finished", "stop", 6)


@pytest.mark.parametrize(
    "path", ["/v1/requests?limt=1", "/v1/requests/x?whole=1", "/v1/kv?a=1", "/dashboard/live?herz=2"]
)
async def test_a_query_that_would_be_ignored_is_refused_by_name(client, path):
    reply = await client.get(path)
    assert (reply.status, reply.error["code"]) == (400, "unknown_parameter")
    assert reply.error["param"] == path.partition("?")[2].partition("=")[0]
    assert repr(reply.error["param"]) in reply.error["message"]


async def test_errors_tell_their_stages_too(make_client):
    async with make_client(lambda request: [97, Fault("boom")]) as client:
        for body in ({"prompt": "hi"}, {"prompt": 3}, {"prompt": "hi", "deadline_ms": 0.0001}):
            reply = await client.post("/v1/completions", body)
            told = dict(one.split(";dur=") for one in reply.headers["server-timing"].split(", "))
            assert reply.status >= 400
            assert sum(float(ms) for name, ms in told.items() if name != "total_ms") == pytest.approx(
                float(told["total_ms"]), abs=0.01
            )
