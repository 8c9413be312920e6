"""Keys guard everything but the health checks, and keep their holders' caches apart."""

from __future__ import annotations

import pytest

from firsttoken.core.errors import ConfigError, EngineDead
from firsttoken.core.service import KeyRule, Targets
from firsttoken.server.auth import OPEN_BELOW, OPEN_PATHS
from firsttoken.server.config import ServerConfig
from firsttoken.server.run import run_server
from tests.support.byte_tokenizer import EOS as END

KEYS = ServerConfig(api_keys=("first-key", "second-key"))
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_the_whole_route_table_is_closed(make_client):
    async with make_client(config=KEYS) as client:
        paths = {path for _, path in client.app.routes}
        assert paths >= {"/v1/chat/completions", "/v1/models/{name}", "/metrics", "/health"}
        odd = ["/", "/nope", "//v1/chat/completions", "/v1/chat/completions/", "/health/", "/health/nope", "//health"]
        odd += ["/dashboard/live", "/dashboard/live/", "/dashboard/statics", "/dashboard/static", "/dashboard/nope"]
        odd += ["/HEALTH", "/health%2e", "/v1/%63hat/completions", "/docs", "/openapi.json"]
        for path in [*paths, *odd]:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"):
                reply = await client.post(path, BODY, method=method)
                is_open = method in ("GET", "HEAD") and (path in OPEN_PATHS or path.startswith(OPEN_BELOW))
                assert (reply.status in (200, 308, 404)) if is_open else (reply.status == 401), (method, path)


async def test_keys(make_client):
    async with make_client(config=KEYS) as client:
        for key in KEYS.api_keys:
            assert (await client.post("/v1/chat/completions", BODY, headers=bearer(key))).status == 200
        basic = {"authorization": "Basic abc"}
        for more in ({}, basic):  # where Anthropic's clients send it
            reply = await client.post("/v1/chat/completions", BODY, headers={"x-api-key": "second-key", **more})
            assert reply.status == 200
        wrong = ["", "first-ke", "first-keyx", "FIRST-KEY", "first-key second-key"]
        for headers in [
            *(bearer(key) for key in wrong),
            {"authorization": "first-key"},
            {"authorization": "Basic first-key"},
            {"x-api-key": "second-ke"},
            {"x-api-key": "second-key", **bearer("wrong")},
        ]:
            reply = await client.post("/v1/chat/completions", BODY, headers=headers)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
        assert (await client.post("/v1/nope", BODY, headers=bearer("first-key"))).status == 404
        reply = await client.post("/v1/messages", BODY, headers={"x-request-id": "mine"})
        error = {"type": "authentication_error", "message": reply.error["message"]}
        assert (reply.status, reply.json) == (401, {"type": "error", "error": error, "request_id": "mine"})
        assert "x-api-key" in error["message"]


async def test_prefix_caches_are_apart(make_client):
    salts = []

    def script(request):
        salts.append(request.salt)
        return [END]

    async with make_client(script, config=KEYS) as client:
        for key, own in [("first-key", {}), ("first-key", {}), ("second-key", {}), ("first-key", {"cache_salt": "x"})]:
            await client.post("/v1/chat/completions", {**BODY, **own}, headers=bearer(key))
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert all(salts)
    assert not any("key" in salt for salt in salts)


async def test_without_keys_the_salt_is_the_callers(make_client):
    salts = []

    def script(request):
        salts.append(request.salt)
        return [END]

    async with make_client(script) as client:
        await client.chat()
        await client.chat(cache_salt="x")
    assert salts == ["", "/x"]


@pytest.mark.parametrize("key", ["", " ", "a b ", "ключ", "a\n"])
def test_keys_that_could_let_others_in_are_refused(key):
    with pytest.raises(ConfigError):
        ServerConfig(api_keys=(key,))


@pytest.mark.parametrize("options", [{"port": -1}, {"port": 70000}, {"max_body_bytes": 0}, {"drain_s": float("nan")}])
def test_other_options_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("team=s3cret", "team"),
        ("gold=s3cret", None),
        ("s3cret", None),
        ("s3cret==", None),  # base64: the key itself would be told
        ("=s3cret", None),
        ("a b=s3cret", None),
    ],
)
def test_a_name_without_a_rule_is_told_at_the_start_but_never_a_key(text, name, caplog):
    async def launch():
        raise EngineDead("no engine here")

    def start(targets):
        caplog.clear()
        with pytest.raises(EngineDead):
            run_server(ServerConfig(port=0, api_keys=("gold=g", text), targets=targets), launch)
        return caplog.text

    said = start(Targets(keys={"gold": KeyRule()}))
    assert ("given as team=..., but the targets have no rule of that name" in said) == (name is not None)
    assert "s3cret" not in said
    assert not start(Targets()), "without targets nobody can have meant a name"
