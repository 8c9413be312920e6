"""``cache_hint`` of a request, from the body to the engine and back to the caller."""

from __future__ import annotations

import pytest

from firsttoken.core.retention import Retention
from firsttoken.core.service import KeyRule, ServiceClass, Targets
from firsttoken.server.config import ServerConfig
from tests.support.byte_tokenizer import EOS as END

SECOND = 10**9
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
TARGETS = Targets(keys={"batch": KeyRule(max_class=ServiceClass.P1, service_class=ServiceClass.P2)})
KEYS = ServerConfig(api_keys=("gold", "batch=b"), targets=TARGETS)


@pytest.fixture(params=list(ROUTES))
def path(request):
    return request.param


@pytest.fixture
def seen():
    return []


@pytest.fixture
def script(seen):
    def note(request):
        seen.append(request.retention)
        return [ord("x"), END]

    return note


async def test_a_hint_reaches_the_engine_and_the_caller_learns_what_came_of_it(make_client, script, seen, path):
    hint = {"ttl_s": 90, "priority": "p1", "until": "tool_result"}
    async with make_client(script) as client:
        for asked, kept in [({"cache_hint": hint}, True), ({"cache_hint": {}}, None), ({"cache_hint": None}, None)]:
            reply = await client.post(path, {**ROUTES[path], **asked, "timings": True})
            assert reply.status == 200
            assert reply.json["timings"]["kept"] is kept
        stream = await client.post(path, {**ROUTES[path], "cache_hint": hint, "timings": True, "stream": True})
        assert stream.events[-2]["timings"]["kept"] is True
    wish = Retention(90 * SECOND, ServiceClass.P1, True)
    assert seen == [wish, Retention(), None, wish]


@pytest.mark.parametrize(
    ("hint", "param"),
    [
        ({"ttl": 5}, "cache_hint.ttl"),
        ({"ttl_s": 0}, "cache_hint.ttl_s"),
        ({"ttl_s": 3601}, "cache_hint.ttl_s"),
        ({"ttl_s": "60"}, "cache_hint.ttl_s"),
        ({"priority": "gold"}, "cache_hint.priority"),
        ({"until": 60}, "cache_hint.until"),
        ({"until": "forever"}, "cache_hint.until"),
        (60, "cache_hint"),
        ([], "cache_hint"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(make_client, script, seen, path, hint, param):
    async with make_client(script) as client:
        reply = await client.post(path, {**ROUTES[path], "cache_hint": hint})
        assert (reply.status, reply.error["param"]) == (400, param)
        assert param in reply.error["message"]
    assert not seen


async def test_a_key_may_not_have_its_kv_scored_better_than_its_best_class(make_client, script, seen, path):
    async with make_client(script, KEYS) as client:

        async def ask(key, priority):
            body = {**ROUTES[path], "cache_hint": {"priority": priority}}
            return await client.post(path, body, headers={"authorization": f"Bearer {key}"})

        refused = await ask("b", "p0")
        assert (refused.status, refused.error["param"]) == (403, "cache_hint.priority")
        assert "'p1'" in refused.error["message"]
        for key, priority in (("b", "p1"), ("b", "p2"), ("gold", "p0")):
            assert (await ask(key, priority)).status == 200
    assert [wish.service for wish in seen] == [1, 2, 0]
