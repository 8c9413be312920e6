"""What arrives piece by piece: the same as the whole, and an end in any case."""

from __future__ import annotations

import asyncio
import json

import pytest

from firsttoken.engine.stub import Fault
from tests.server.conftest import END, forever, say

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


def text_of(events) -> str:
    choices = [one for event in events if isinstance(event, dict) for one in event.get("choices", ())]
    return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("n", [1, 3])
async def test_bb02_the_usage_comes_alone_and_last(client, path, n):
    asked = {**ASKED, "n": n} if path == CHAT else {"prompt": "hi", "max_tokens": 4, "n": n}
    whole = (await client.post(path, asked)).json
    options = {"include_usage": True}
    told = (await client.post(path, {**asked, "stream": True, "stream_options": options})).events
    *chunks, last, done = told
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    for fields in ({}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        plain = (await client.post(path, {**asked, "stream": True, **fields})).events
        assert all(chunk["choices"] and "usage" not in chunk for chunk in plain[:-1]), fields


@pytest.mark.parametrize(
    ("raw", "max_tokens"),
    [
        ("ď🔥".encode(), 16),
        ("ď🔥".encode(), 3),
        ("ď🔥".encode(), 1),
        (b"\xf0\x27x", 16),
        (b"\xf0\x9f\x94", 16),
        (b"\xff\xfe\x00\xc0\xaf", 16),
        (b"\xed\xa0\xbd\xed\xb4\xa5", 16),  # half a pair of surrogates, and the other half
    ],
)
@pytest.mark.parametrize("tokens_per_step", [1, 2, 5])
async def test_bb08_bb13_any_bytes_are_text_and_no_half_character(make_client, raw, max_tokens, tokens_per_step):
    async with make_client(lambda request: [*raw, END], tokens_per_step=tokens_per_step) as client:
        for path, asked in ((CHAT, ASKED), ("/v1/completions", {"prompt": "hi"})):
            asked = {**asked, "max_tokens": max_tokens}
            whole = await client.post(path, asked)
            stream = await client.post(path, {**asked, "stream": True})
            assert (whole.status, stream.status) == (200, 200)
            expected = raw[:max_tokens].decode("utf-8", "replace")
            assert text_of(stream.events) == expected
            choice = whole.json["choices"][0]
            assert choice.get("text", choice.get("message", {}).get("content")) == expected
            pieces = [text_of([event]) for event in stream.events[:-1]]
            # A replacement stands for bytes that never became a character, not for one that was still coming.
            assert "".join(pieces).count("\ufffd") == expected.count("\ufffd")
            named = await client.post(path, {**asked, "logprobs": True if path == CHAT else 2})
            assert named.status == 200
            named.body.decode("utf-8")
        await client.quiet()


async def test_bb13_an_error_that_quotes_the_caller_is_valid_text(client):
    for body in (
        b'{"prompt":"\xff"}',
        b'{"\xed\xa0\x80":1}',
        b'{"prompt":"\\ud800"}',
        b'{"model":"\\udfff","prompt":"a"}',
    ):
        reply = await client.post("/v1/completions", body)
        assert reply.status == 400
        json.loads(reply.body.decode("utf-8"))


@pytest.mark.parametrize("stream", [False, True])
async def test_bb09_what_is_wrong_before_the_first_token_is_a_plain_error(make_client, stream):
    for script, asked, status in [
        (None, {"n": 0}, 400),
        (None, {"max_tokens": -1}, 400),
        (lambda request: [Fault("broken")], {}, 500),
        (lambda request: [Fault("gone", fatal=True, silent=True)], {}, 503),
    ]:
        async with make_client(script) as client:
            reply = await client.post(CHAT, {**ASKED, "stream": stream, **asked})
            assert reply.status == status
            assert reply.headers["content-type"] == "application/json"
            assert reply.complete
            assert reply.error["message"]


@pytest.mark.parametrize("fault", [Fault("broken"), Fault("gone", fatal=True), Fault("gone", fatal=True, silent=True)])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_bb09_after_it_the_stream_ends_with_one_error(make_client, serve_http, fault, path):
    """Over a connection that stays open: the client must see an end, not wait for its own limit."""
    async with make_client(lambda request: [*b"abc", fault]) as client, serve_http(client.app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        asked = {**ASKED, "n": 2} if path == CHAT else {"prompt": ["a", "b"]}
        body = json.dumps({**asked, "max_tokens": 16, "stream": True}).encode()
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body))
        async with asyncio.timeout(1):
            raw = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        assert raw.count(b'"error"') == 1
        assert b"[DONE]" not in raw


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("said", "stop", "shown", "reason"),
    [
        ("DEFGHIJ", ["DEFGHIJ"], "", "stop"),
        ("DEFGHIJ", ["DEFXYZ"], "DEFGHIJ", "stop"),
        (" is Paris.\n", ["Pari"], " is ", "stop"),
        ("do|lor", ["lo"], "do|", "stop"),
        ("do|lor", ["lo", "o|"], "d", "stop"),
        ("ab🔥cd", ["🔥c"], "ab", "stop"),
        ("aaab", ["aab"], "a", "stop"),
        ("abcabd", ["abcabe"], "abcabd", "stop"),
    ],
)
async def test_bb14_bb15_nothing_of_a_stop_is_shown_and_nothing_else_is_lost(
    make_client, said, stop, shown, reason, tokens_per_step
):
    async with make_client(say(said), tokens_per_step=tokens_per_step) as client:
        for path, asked in ((CHAT, ASKED), ("/v1/completions", {"prompt": "hi"})):
            asked = {**asked, "max_tokens": 64, "stop": stop}
            stream = (await client.post(path, {**asked, "stream": True})).events
            assert text_of(stream) == shown
            whole = (await client.post(path, asked)).json["choices"][0]
            assert whole.get("text", whole.get("message", {}).get("content")) == shown
            assert whole["finish_reason"] == stream[-2]["choices"][0]["finish_reason"] == reason
        cut = await client.complete(max_tokens=max(1, len(said) - 2), stop=["nothing of this"], stream=True)
        assert text_of(cut.events) == said.encode()[: max(1, len(said) - 2)].decode("utf-8", "replace")
        await client.quiet()


async def test_bb44_gauges_are_0_when_all_have_left_and_nobody_comes_after(make_client):
    async with make_client(forever, step_s=0.001) as client:
        calls = [
            client.start("/v1/completions", {"prompt": "hi", "max_tokens": 4000, "stream": True}) for _ in range(20)
        ]
        await asyncio.gather(*(call.first_byte.wait() for call in calls))
        metrics = (await client.get("/metrics")).body.decode()
        assert "firsttoken_requests_running 20.0" in metrics
        assert 'firsttoken_kv_blocks{state="used"} 0.0' not in metrics
        for call in calls:
            call.leave()
        await asyncio.gather(*(call.task for call in calls))
        await client.quiet()
        metrics = (await client.get("/metrics")).body.decode()
        for gauge in ("firsttoken_requests_running", "firsttoken_requests_waiting", "vllm:num_requests_running"):
            found = [line for line in metrics.splitlines() if line.startswith(gauge)]
            assert found
            assert all(line.endswith(" 0.0") for line in found), found
        assert 'firsttoken_kv_blocks{state="used"} 0.0' in metrics
