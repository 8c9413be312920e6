"""Which API keys share cached prefixes, and what can be learned of a key from its salt."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from concurrent.futures import Future

import pytest

from firsttoken.core.service import KeyRule, Targets
from firsttoken.core.targets_file import parse_targets
from firsttoken.server import auth
from firsttoken.server.config import ApiKey, ServerConfig
from firsttoken.server.salts import cache_salts
from tests.support.byte_tokenizer import EOS as END

TEAM = KeyRule(cache_group="team-a")


def salts(*keys: ApiKey, lasting: bool = False) -> list[str]:
    return [salt.result(10) for salt in cache_salts(keys, lasting=lasting)]


@pytest.mark.parametrize("lasting", [False, True])
def test_each_key_has_its_own_but_those_of_a_name_or_a_group(lasting):
    found = salts(
        ApiKey("", "one"), ApiKey("", "two"), ApiKey("n", "three", KeyRule()), ApiKey("n", "four", KeyRule()),
        ApiKey("a", "five", TEAM), ApiKey("b", "six", TEAM), ApiKey("c", "seven", KeyRule(cache_group="team-b")),
        lasting=lasting,
    )  # fmt: skip
    one, two, three, four, five, six, seven = found
    assert three == four
    assert five == six
    assert len({one, two, three, five, seven}) == 5
    assert all(found)


def test_a_lasting_salt_is_the_same_in_another_process():
    code = "from firsttoken.server.salts import *; print(cache_salts([ApiKey('', 'k')], lasting=True)[0].result())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == salts(ApiKey("", "k"), lasting=True)[0]


def test_else_it_is_of_this_process_alone():
    first, second = (salts(ApiKey("", "k"))[0] for _ in range(2))
    assert first != second


def test_to_try_a_key_takes_memory_and_time():
    """The costs are scrypt's, which a test of time could not tell from a slow machine."""
    [salt] = salts(ApiKey("", "k"), lasting=True)
    memory = 128 * (1 << 14) * 8
    with pytest.raises(ValueError, match="memory limit exceeded"):
        hashlib.scrypt(b"k", salt=b"firsttoken/kv-salt/1", n=1 << 14, r=8, p=1, maxmem=memory, dklen=32)
    assert (
        salt
        == hashlib.scrypt(b"k", salt=b"firsttoken/kv-salt/1", n=1 << 14, r=8, p=1, maxmem=2 * memory, dklen=32).hex()
    ), "files of earlier versions are found by it"


async def test_requests_wait_for_a_salt_that_is_not_made_yet_and_nobody_else_does(make_client, monkeypatch):
    slow = Future()
    slow.set_running_or_notify_cancel()
    quick = Future()
    quick.set_result("quick")
    monkeypatch.setattr(auth, "cache_salts", lambda keys, *, lasting: [slow, quick])
    asked = []

    def script(request):
        asked.append(request.salt)
        return [END]

    async with make_client(script, ServerConfig(api_keys=("slow", "quick"))) as client:
        body = {"prompt": "x"}
        waiting = [client.start("/v1/completions", body, headers={"authorization": "Bearer slow"}) for _ in range(3)]
        assert (await client.post("/v1/completions", body, headers={"authorization": "Bearer quick"})).status == 200
        waiting[0].task.cancel()
        await asyncio.sleep(0.01)
        assert asked == ["quick"]
        slow.set_result("made")
        for exchange in waiting[1:]:
            await asyncio.wait_for(exchange.task, 5)
            assert exchange.reply.status == 200
        assert (await client.post("/v1/completions", body, headers={"authorization": "Bearer slow"})).status == 200
    assert asked == ["quick", "made", "made", "made"]


async def test_a_group_in_the_file_of_targets_shares(make_client):
    targets = parse_targets({"keys": {"a": {"cache_group": "team"}, "b": {"cache_group": "team"}, "c": {}}}, "t.toml")
    asked = []

    def script(request):
        asked.append((request.salt, request.tenant))
        return [END]

    config = ServerConfig(api_keys=("a=1", "b=2", "c=3", "4"), targets=targets)
    async with make_client(script, config) as client:
        for key in "1234":
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post("/v1/completions", {"prompt": "x"}, headers=headers)).status == 200
            await client.post("/v1/completions", {"prompt": "x", "cache_salt": "own"}, headers=headers)
    plain, own = asked[::2], asked[1::2]
    assert plain[0][0] == plain[1][0]
    assert len({salt for salt, _ in plain}) == 3
    assert [salt for salt, _ in own] == [f"{salt}/own" for salt, _ in plain]
    assert len({tenant for _, tenant in plain}) == 4, "each pays its own share"


async def test_no_salt_of_a_caller_without_key_is_that_of_a_key(make_client):
    """Where a server without keys finds the files of one with keys."""
    asked = []

    def script(request):
        asked.append(request.salt)
        return [END]

    group = salts(ApiKey("a", "1", TEAM))[0]
    async with make_client(script) as client:
        for own in (group, f"/{group}", salts(ApiKey("", "1"), lasting=True)[0]):
            await client.complete(cache_salt=own)
    assert all(salt.startswith("/") for salt in asked)
    assert not group.startswith("/")


def test_targets_without_a_group_share_nothing():
    assert Targets(keys={"a": KeyRule()}).keys["a"].cache_group == ""
