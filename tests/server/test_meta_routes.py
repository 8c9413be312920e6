"""Models, health, version, metrics, tokenise and detokenise."""

from __future__ import annotations

import asyncio

import pytest

from firsttoken.version import __version__
from tests.server.conftest import forever


async def test_models(client):
    body = (await client.get("/v1/models")).json
    assert body["object"] == "list"
    (card,) = body["data"]
    assert (card["id"], card["object"], card["owned_by"]) == ("stub", "model", "firsttoken")
    assert card["self_check"] is None, "the model has no reference"
    assert (await client.get("/v1/models/stub")).json == card
    missing = await client.get("/v1/models/org/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_version(client):
    assert (await client.get("/version")).json == {"version": __version__}


async def test_unknown_paths_and_methods(client):
    missing = await client.get("/v1/nope")
    assert (missing.status, missing.error["code"]) == (404, "unknown_url")
    assert all(f"{path}" in missing.error["message"] for path in ("/v1/requests", "/metrics", "/dashboard"))
    assert missing.error["message"].startswith("Unknown path: GET /v1/nope; this server answers POST /v1/chat/comple")
    for path in ("/v1/chat/completions/", "//v1/chat/completions"):
        assert (await client.post(path, {})).status == 404
    for method, path, allowed in [("GET", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET, HEAD")]:
        reply = await client.post(path, method=method)
        assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
        assert sorted(reply.headers["allow"].split(", ")) == allowed.split(", ")


@pytest.mark.parametrize("path", ["/v1/responses/resp_1/cancel", "/v1/audio/speech"])
async def test_openai_routes_that_are_not_here_name_what_is(client, path):
    reply = await client.post(path, {"input": "hi"})
    assert (reply.status, reply.error["code"]) == (404, "unknown_url")
    assert reply.error["message"] == (
        f"POST {path} is not implemented here; this server answers POST /v1/chat/completions, "
        "/v1/completions, /v1/responses, /v1/messages and /v1/embeddings"
    )


async def test_metrics(client):
    await client.chat()
    reply = await client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'firsttoken_time_to_first_token_seconds_count{service_class="p2"} 1.0' in reply.body.decode()


async def test_healthy(client):
    for path in ("/health", "/ping", "/health/live", "/health/ready"):
        assert ((await client.get(path)).status, (await client.get(path)).json) == (200, {"status": "idle"})
    progress = (await client.get("/health/progress")).json
    assert progress["state"] == "idle"
    assert progress["heartbeat_age_ms"] >= 0


async def test_busy_is_ready(make_client):
    async with make_client(forever, step_s=0.005) as client:
        call = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 1000, "stream": True})
        await call.first_byte.wait()
        progress = await client.get("/health/progress")
        assert (progress.status, progress.json["state"], progress.json["running"]) == (200, "busy", 1)
        assert (await client.get("/health/ready")).status == 200
        call.leave()


async def test_a_dead_engine_fails_all_checks(make_client, caplog):
    async with make_client() as client:
        client.engine.kill()
        async with asyncio.timeout(5):
            while (await client.get("/health")).status == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for path in ("/health", "/health/live", "/health/ready", "/health/progress"):
            assert (await client.get(path)).status == 503
        caplog.clear()
        models = await client.get("/v1/models")
        assert (models.status, models.error["code"]) == (503, "engine_dead")
        assert not [record for record in caplog.records if record.exc_info], "nothing unexpected happened"


async def test_draining(make_client):
    async with make_client(forever, step_s=0.005) as client:
        call = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 100, "stream": True})
        await call.first_byte.wait()
        drain = asyncio.create_task(client.llm.drain(10))
        await asyncio.sleep(0)
        for path, body in [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": [{}]})]:
            refused = await client.post(path, body)
            assert (refused.status, refused.error["code"]) == (503, "server_draining")
            assert int(refused.headers["retry-after"]) > 0
        assert (await client.get("/health/live")).status == 200
        ready = await client.get("/health/ready")
        assert (ready.status, ready.json["status"], ready.json["running"]) == (503, "draining", 1)
        assert 8 < ready.json["left_s"] <= 10
        await asyncio.wait_for(call.task, 10)
        assert call.reply.events[-1] == "[DONE]"
        assert await drain


async def test_ending_all_calls(make_client):
    async with make_client(forever, step_s=0.005, max_num_seqs=1) as client:
        running = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 4000, "stream": True})
        await running.first_byte.wait()
        waiting = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 4000})
        await asyncio.sleep(0.05)
        assert client.app.live.end_all() == 2
        await asyncio.wait_for(asyncio.gather(running.task, waiting.task), 2)
        assert running.reply.events[-1]["error"]["code"] == "server_stopping"
        assert running.reply.complete
        assert (waiting.reply.status, waiting.reply.error["code"]) == (503, "server_stopping")
        await client.quiet()


async def test_tokenize(client):
    body = (await client.post("/tokenize", {"prompt": "hé"})).json
    assert body == {"count": 3, "max_model_len": 4096, "tokens": [104, 195, 169], "token_strs": None}
    strings = (await client.post("/tokenize", {"prompt": "hi", "return_token_strs": True})).json["token_strs"]
    assert strings == ["h", "i"]
    messages = [{"role": "user", "content": "hi"}]
    chat = (await client.post("/tokenize", {"messages": messages})).json
    assert chat["count"] == (await client.chat("hi")).json["usage"]["prompt_tokens"]


async def test_detokenize(client):
    assert (await client.post("/detokenize", {"tokens": [104, 195, 169]})).json == {"prompt": "hé"}
    assert (await client.post("/detokenize", {"tokens": []})).json == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": [1]}),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}),
        ("/tokenize", {"prompt": "a", "model": "other"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [99999]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
async def test_bad_tokenize(client, path, body):
    reply = await client.post(path, body)
    assert reply.status == (404 if "model" in body else 400)
    assert reply.error["message"]
