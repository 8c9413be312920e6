"""Quotas of API keys: what each may ask for, what is given back, and what callers are told of it."""

from __future__ import annotations

import asyncio
import hashlib
import logging

import pytest

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import KeyRule, Targets
from firsttoken.core.targets_file import parse_targets
from firsttoken.server import auth
from firsttoken.server.config import ServerConfig
from firsttoken.server.errors import ApiError
from firsttoken.server.key_file import read_keys
from firsttoken.server.quota import Quota
from tests.server.conftest import forever, say

KEY = {"authorization": "Bearer secret"}


def config(*keys: str, **rule) -> ServerConfig:
    return ServerConfig(api_keys=keys or ("team=secret",), targets=Targets(keys={"team": KeyRule(**rule)}))


def left(reply) -> int:
    return int(reply.headers["x-ratelimit-remaining-tokens"])


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> int:
        return int(self.s * NS_PER_S)


@pytest.fixture
def frozen(monkeypatch) -> None:
    """Time does not go on, so nothing comes back but what is given back."""
    monkeypatch.setattr(auth, "Quota", lambda rule: Quota(rule, Clock()))


# --------------------------------------------------------------------- the buckets


def test_requests_a_minute_come_back_evenly() -> None:
    clock = Clock()
    quota = Quota(KeyRule(requests_per_minute=3), clock)
    for _ in range(3):
        quota.enter().close(0)
    with pytest.raises(ApiError) as caught:
        quota.enter()
    headers = dict(caught.value.headers)
    assert (caught.value.status, caught.value.code, caught.value.type) == (429, "rate_limit_exceeded", "requests")
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (b"20", b"20000")
    assert headers[b"x-ratelimit-limit-requests"] == b"3"
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert headers[b"x-ratelimit-reset-requests"] == b"1m0s"
    clock.s = 20
    quota.enter()


def test_tokens_are_taken_for_the_most_and_given_back() -> None:
    clock = Clock()
    quota = Quota(KeyRule(tokens_per_minute=600), clock)
    grant = quota.enter()
    grant.reserve(100, 400, asked=True)
    other = quota.enter()
    with pytest.raises(ApiError) as caught:
        other.reserve(50, 100, asked=True)
    assert (caught.value.status, caught.value.type) == (429, "tokens")
    assert dict(caught.value.headers)[b"retry-after"] == b"5"
    grant.close(110)
    other.reserve(50, 440, asked=True)
    with pytest.raises(ApiError) as caught:
        other.reserve(1, 600, asked=True)
    assert (caught.value.status, caught.value.param) == (400, "max_tokens")
    with pytest.raises(ApiError) as caught:
        other.reserve(601, 1, asked=False)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_a_request_without_max_tokens_takes_what_there_is_and_owes_the_rest() -> None:
    clock = Clock()
    quota = Quota(KeyRule(tokens_per_minute=600), clock)
    grant = quota.enter()
    grant.reserve(100, 100_000, asked=False)
    grant.close(900)
    late = quota.enter()
    with pytest.raises(ApiError) as caught:
        late.reserve(10, 10, asked=False)
    assert dict(caught.value.headers)[b"retry-after"] == b"32"  # the 300 that are owed, and 11 to begin with
    assert dict(caught.value.headers)[b"x-ratelimit-remaining-tokens"] == b"0"
    clock.s = 32
    late.reserve(10, 10, asked=False)


# ---------------------------------------------------------------------- over HTTP


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_used_is_what_the_answers_say(make_client, frozen, stream: bool) -> None:
    async with make_client(say("Hello"), config(tokens_per_minute=100_000, requests_per_minute=100)) as client:

        async def ask(path: str, **fields):
            return await client.post(path, {"stream": stream, "max_tokens": 50, **fields}, headers=KEY)

        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body in (
            ("/v1/chat/completions", {**chat, "n": 3}),
            ("/v1/completions", {"prompt": ["some words", "x"], "n": 2}),
            ("/v1/completions", {"prompt": "w" * 500}),
        ):
            assert (await ask(path, **body)).status == 200
        ended = (await client.get("/v1/requests", headers=KEY)).json["data"]
        used = sum(one["prompt_tokens"] + one["output_tokens"] for one in ended)
        assert [one["answers"] for one in ended] == [1, 4, 3]
        after = await client.post("/tokenize", {"prompt": "x"}, headers=KEY)
        assert left(after) == 100_000 - used
        assert used > 500
        assert after.headers["x-ratelimit-remaining-requests"] == "96"
        assert after.headers["x-ratelimit-limit-tokens"] == "100000"


async def test_callers_who_leave_and_requests_that_fail_give_back(make_client, frozen) -> None:
    async with make_client(forever, config(tokens_per_minute=60_000, max_concurrent=1), step_s=0.001) as client:
        body = {"prompt": "hi", "max_tokens": 2000}
        exchange = client.start("/v1/completions", {**body, "stream": True}, headers=KEY)
        await exchange.first_byte.wait()
        reply = await client.post("/v1/completions", body, headers=KEY)
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        assert "max_concurrent" in reply.error["message"]
        assert int(reply.headers["retry-after"]) >= 1
        assert left(reply) == 60_000 - 2002  # the whole of what was asked for is taken
        exchange.leave()
        await exchange.task
        after = left(await client.post("/tokenize", {"prompt": "x"}, headers=KEY))
        await client.quiet()  # then it is recorded
        ended = next(one for one in (await client.get("/v1/requests", headers=KEY)).json["data"] if one["answers"])
        assert 0 < ended["output_tokens"] < 2000
        assert after == 60_000 - ended["prompt_tokens"] - ended["output_tokens"]
        for bad in ({"temperature": -1}, {"prompt": "x" * 4096 * 9}, {"nope": 1}):
            assert (await client.post("/v1/completions", body | bad, headers=KEY)).status == 400
        assert left(await client.post("/tokenize", {"prompt": "x"}, headers=KEY)) == after


async def test_keys_of_one_name_share_a_quota_and_others_have_none(make_client) -> None:
    keys = ("team=one", "team=two", "free")
    async with make_client(config=config(*keys, requests_per_minute=2)) as client:

        async def ask(key: str) -> int:
            return (await client.post("/tokenize", {"prompt": "x"}, headers={"authorization": f"Bearer {key}"})).status

        assert [await ask(key) for key in ("one", "two", "one", "two")] == [200, 200, 429, 429]
        assert [await ask("free") for _ in range(3)] == [200] * 3
        assert (await client.get("/v1/models", headers={"authorization": "Bearer one"})).status == 200


async def test_many_at_once_never_get_more_than_there_is(make_client, frozen) -> None:
    async with make_client(say("Hello"), config(tokens_per_minute=1000)) as client:
        body = {"prompt": "0123456789", "max_tokens": 190}
        asked = (client.post("/v1/completions", body, headers=KEY) for _ in range(20))
        replies = await asyncio.gather(*asked)
        statuses = [reply.status for reply in replies]
        assert set(statuses) == {200, 429}
        used = sum(reply.json["usage"]["total_tokens"] for reply in replies if reply.status == 200)
        assert left(await client.post("/tokenize", {"prompt": "x"}, headers=KEY)) == 1000 - used


# --------------------------------------------------------------------------- keys


async def test_a_key_may_be_given_by_its_hash(make_client) -> None:
    hashed = "team=sha256:" + hashlib.sha256(b"secret").hexdigest()
    async with make_client(config=config(hashed, requests_per_minute=1)) as client:
        assert [(await client.post("/tokenize", {"prompt": "x"}, headers=KEY)).status for _ in "ab"] == [200, 429]
        wrong = {"authorization": "Bearer " + hashed.partition("=")[2]}
        assert (await client.post("/tokenize", {"prompt": "x"}, headers=wrong)).status == 401


def test_hashes_that_are_none_and_keys_under_two_names_are_refused() -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    for bad in ("sha256:", "sha256:abc", f"sha256:{digest}0", f"sha256:{digest[:-1]}g"):
        with pytest.raises(ConfigError, match="64 digits"):
            ServerConfig(api_keys=(bad,))
    with pytest.raises(ConfigError, match="two names"):
        config("team=secret", f"sha256:{digest}")


def test_keys_from_a_file(tmp_path, caplog) -> None:
    path = tmp_path / "keys"
    path.write_text("# comment\n\nteam=secret\r\n  other  \n")
    path.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        assert read_keys(str(path)) == ("team=secret", "other")
    assert not caplog.records
    path.chmod(0o644)
    read_keys(str(path))
    assert "chmod o-rw" in caplog.text
    for text, words in (("# none\n", "has no key"), ("good\nmy secret\n", "line 2"), ("schlüssel\n", "line 1")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            read_keys(str(path))
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(str(tmp_path / "none"))
    path.write_bytes(b"x" * (1 << 21))
    with pytest.raises(ConfigError, match="more than"):
        read_keys(str(path))


def test_a_file_of_targets_has_quotas() -> None:
    table = {"keys": {"a": {"requests_per_minute": 60, "tokens_per_minute": 1000, "max_concurrent": 4}, "b": {}}}
    keys = parse_targets(table, "t").keys
    assert keys["a"] == KeyRule(requests_per_minute=60, tokens_per_minute=1000, max_concurrent=4)
    assert (keys["a"].has_quota, keys["b"].has_quota) == (True, False)
    for bad in (0, 1.5, "60", True):
        with pytest.raises(ConfigError, match="requests_per_minute"):
            parse_targets({"keys": {"a": {"requests_per_minute": bad}}}, "t")
