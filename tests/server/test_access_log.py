"""One line a call in the log ``firsttoken.server.access``: how it ended, never what was said or which key was used."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from firsttoken.observability.logging import HumanFormatter, JSONFormatter, setup_logging
from firsttoken.server import access
from firsttoken.server.config import ServerConfig
from tests.server.conftest import forever

NAME = "firsttoken.server.access"
LONG = {"prompt": "secret words", "max_tokens": 4000, "stream": True}


@pytest.fixture
def lines(caplog):
    """The records so far, DEBUG included, each as the fields of its JSON line."""
    caplog.set_level(logging.DEBUG, NAME)

    def read() -> list[dict]:
        return [json.loads(JSONFormatter().format(one)) for one in caplog.records if one.name == NAME]

    return read


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer(client, lines, stream):
    await client.chat("secret words", stream=stream, n=2)
    await client.post("/v1/completions", {"prompt": ["hi", "ho"], "stream": stream}, headers={"x-request-id": "mine"})
    chat, completion = lines()
    assert (chat["level"], chat["logger"], chat["message"]) == ("debug", NAME, "answered")
    assert (chat["method"], chat["path"], chat["status"]) == ("POST", "/v1/chat/completions", 200)
    assert chat["request_id"].startswith("req-")
    assert (chat["output_tokens"], chat["cached_tokens"]) == (28, 0)
    assert chat["prompt_tokens"] > 12
    assert chat["service_class"] == "p2"
    assert 0 <= chat["ttft_ms"] <= chat["total_ms"]
    assert (completion["request_id"], completion["output_tokens"]) == ("mine", 28)
    assert "secret" not in str(lines())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "level"),
    [
        ("POST", "/v1/chat/completions", {"messages": "secret"}, 400, "info"),
        ("POST", "/v1/completions", {"prompt": "x", "model": "other"}, 404, "info"),
        ("POST", "/tokenize", {"prompt": "x"}, 200, "debug"),
        ("GET", "/v1/completions", None, 405, "info"),
        ("GET", "/v1/models", None, 200, "debug"),
        ("GET", "/nope", None, 404, "info"),
        ("GET", "/health", None, 200, "debug"),
    ],
)
async def test_every_route_has_a_line(client, lines, method, path, body, status, level):
    reply = await client.post(path + "?api_key=secret", body, method=method, headers={"x-request-id": "mine"})
    assert reply.status == status
    (line,) = lines()
    assert (line["level"], line["status"], line["method"], line["path"]) == (level, status, method, path)
    assert line["request_id"] == "mine"
    assert "secret" not in str(line)


async def test_a_rejected_key(make_client, lines):
    async with make_client(config=ServerConfig(api_keys=("right",))) as client:
        await client.post("/v1/completions", {"prompt": "x"}, headers={"authorization": "Bearer secret"})
    (line,) = lines()
    assert (line["level"], line["status"], line["path"]) == ("info", 401, "/v1/completions")
    assert "secret" not in str(line)


@pytest.mark.parametrize("why", ["gone", "stopping"])
async def test_a_call_that_was_cut(make_client, lines, why):
    async with make_client(forever, step_s=0.002) as client:
        call = client.start("/v1/completions", LONG)
        await call.first_byte.wait()
        if why == "gone":
            call.leave()
        else:
            client.app.live.end_all()
        await asyncio.wait_for(call.task, 1)
    (line,) = lines()
    assert (line["level"], line["status"]) == ("info", why)
    assert line["output_tokens"] >= 1
    assert "secret" not in str(line)


async def test_a_stream_that_fails_is_not_a_success(make_client, lines):
    async with make_client(forever, step_s=0.002) as client:
        call = client.start("/v1/completions", LONG)
        await call.first_byte.wait()
        await client.llm.shutdown()
        await asyncio.wait_for(call.task, 2)
    (line,) = lines()
    assert (line["level"], line["status"], line["message"]) == ("info", 200, "failed"), "as it was sent"
    assert (line["outcome"], line["code"]) == ("failed", "engine_dead")


async def test_what_is_no_request_has_a_line_without_a_path(client, serve_http, lines):
    async with serve_http(client.app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"secret\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
    (line,) = lines()
    assert line["status"] == 400
    assert not {"path", "method"} & set(line)


async def test_a_path_cannot_look_like_another_field(client, caplog):
    caplog.set_level(logging.DEBUG, NAME)
    await client.get("/x%20status=200%0a" + "y" * 1000)
    (record,) = [one for one in caplog.records if one.name == NAME]
    text = HumanFormatter().format(record)
    assert "\n" not in text
    assert text.split().count("status=404") == 1
    assert "status=200" not in text.split()
    assert len(text) < 500


async def test_at_the_usual_level_only_trouble_is_told(client):
    stream = io.StringIO()
    before = logging.getLogger("firsttoken").level
    handler = setup_logging("info", stream=stream)
    try:
        await client.chat()
        await client.get("/health")
        await client.chat(nonsense=1)
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger("firsttoken").setLevel(before)
    (line,) = stream.getvalue().splitlines()
    assert "server.access: refused  method=POST path=/v1/chat/completions status=400 request_id=req-" in line


async def test_nothing_is_gathered_when_the_level_is_off(client, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, NAME)
    monkeypatch.setattr(access, "_log", lambda *_: pytest.fail("a line was made"))
    monkeypatch.setattr(access, "now_ns", lambda: pytest.fail("the clock was read"))
    for body in ({}, {"messages": [{"role": "user", "content": "hi"}]}):
        await client.post("/v1/chat/completions", body)
    assert (await client.get("/version")).status == 200


async def test_probes_of_a_server_that_drains_are_no_news(client, lines):
    await client.llm.drain(0.01)
    for path in ("/health/ready", "/ping", "/v1/nope"):
        await client.get(path)
    assert [(one["path"], one["status"], one["level"]) for one in lines()] == [
        ("/health/ready", 503, "debug"),
        ("/ping", 200, "debug"),
        ("/v1/nope", 404, "info"),
    ]
