"""Pages of other origins: which may read answers, and that nobody else is told anything."""

from __future__ import annotations

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.server.call import WRITE
from firsttoken.server.config import ServerConfig

ORIGIN = "https://app.example.com"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
ALLOWED = "access-control-allow-origin"


def config(**fields: object) -> ServerConfig:
    return ServerConfig(api_keys=("k",), **fields)


async def test_a_browser_asks_without_a_key_and_calls_with_one(make_client):
    async with make_client(config=config(allow_origin=("http://other", ORIGIN))) as client:
        asked = await client.post(CHAT, method="OPTIONS", headers={"origin": ORIGIN, **ASKED})
        assert (asked.status, asked.headers[ALLOWED]) == (200, ORIGIN)
        assert asked.headers["access-control-allow-headers"] == ASKED["access-control-request-headers"]
        key = {"authorization": "Bearer k"}
        for fields in ({}, {"stream": True}):
            reply = await client.post(CHAT, {**BODY, **fields}, headers={"origin": ORIGIN, **key})
            assert (reply.status, reply.headers[ALLOWED]) == (200, ORIGIN)
            assert reply.headers["access-control-expose-headers"] == "*"
            assert "origin" in reply.headers["vary"].lower()
            assert "access-control-allow-credentials" not in reply.headers
        # What is wrong can be read, too.
        refused = await client.post(CHAT, BODY, headers={"origin": ORIGIN})
        assert (refused.status, refused.headers[ALLOWED]) == (401, ORIGIN)
        assert ALLOWED not in (await client.post(CHAT, BODY, headers=key)).headers


async def test_other_origins_are_told_nothing(make_client):
    async with make_client(config=config(allow_origin=(ORIGIN,))) as client:
        for origin in ("https://evil.example.com", ORIGIN + ".evil.com", "null", "http://app.example.com"):
            asked = await client.post(CHAT, method="OPTIONS", headers={"origin": origin, **ASKED})
            assert asked.status == 400
            assert ALLOWED not in asked.headers
            reply = await client.post(CHAT, BODY, headers={"origin": origin, "authorization": "Bearer k"})
            assert ALLOWED not in reply.headers
    async with make_client(config=config()) as client:
        asked = await client.post(CHAT, method="OPTIONS", headers={"origin": ORIGIN, **ASKED})
        assert asked.status == 401
        assert not any(name.startswith("access-control") for name in asked.headers)


async def test_any_origin_is_a_star(make_client):
    async with make_client(config=ServerConfig(allow_origin=("*",))) as client:
        assert (await client.post(CHAT, BODY, headers={"origin": "http://x"})).headers[ALLOWED] == "*"


@pytest.mark.parametrize(
    "origin", ["", "app.example.com", ORIGIN + "/", ORIGIN + "/a", "https://App.com", "http://*.x"]
)
def test_what_no_browser_sends_is_refused(origin):
    with pytest.raises(ConfigError, match="allow_origin"):
        ServerConfig(allow_origin=(origin,))
    for good in (ORIGIN, "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc", "*"):
        ServerConfig(allow_origin=(good,))


async def test_tokens_do_not_pass_what_answers_browsers(make_client):
    """Where the server has a way for pieces of a body (`exchange.write`) it is theirs; the head goes by `send`."""
    written = []
    async with make_client(lambda _: [ord("x")] * 20, ServerConfig(allow_origin=(ORIGIN,)), step_s=0.005) as client:
        app = client.app

        async def with_write(scope, receive, send):
            await app({**scope, WRITE: written.append}, receive, send)

        client.app = with_write
        fields = {"stream": True, "max_tokens": 20, "ignore_eos": True}
        reply = await client.post(CHAT, {**BODY, **fields}, headers={"origin": ORIGIN})
        assert reply.headers[ALLOWED] == ORIGIN
        assert len(written) > 5
        assert len(reply.chunks) <= 3
