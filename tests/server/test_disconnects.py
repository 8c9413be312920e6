"""A caller who leaves ends the request within a step, wherever it is; one who stays causes no abort."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.conftest import forever

LONG = {"prompt": "hi", "max_tokens": 4000}


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_it_runs(make_client, stream):
    async with make_client(forever, step_s=0.002) as client:
        call = client.start("/v1/completions", {**LONG, "stream": stream})
        while not client.llm.stats.running:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        call.leave()
        await asyncio.wait_for(call.task, 1)
        await client.quiet()
        assert client.llm.stats.aborted == 1
        assert not call.reply.complete


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue(make_client, stream):
    async with make_client(forever, step_s=0.002, max_num_seqs=1) as client:
        first = client.start("/v1/completions", {**LONG, "stream": True})
        await first.first_byte.wait()
        prompt_tokens = client.llm.stats.prompt_tokens
        second = client.start("/v1/completions", {**LONG, "stream": stream})
        while not client.llm.stats.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        second.leave()
        await asyncio.wait_for(second.task, 1)
        first.leave()
        await client.quiet()
        assert client.llm.stats.prompt_tokens == prompt_tokens  # it never began
        assert client.llm.stats.aborted == 2


async def test_leaving_one_of_several_prompts_frees_all(make_client):
    async with make_client(forever, step_s=0.002) as client:
        call = client.start("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 4000, "stream": True})
        await call.first_byte.wait()
        call.leave()
        await asyncio.wait_for(call.task, 1)
        await client.quiet()
        assert client.llm.stats.aborted == 6


async def test_staying_sends_no_abort(client):
    for stream in (False, True):
        await asyncio.gather(*(client.chat(stream=stream, n=2) for _ in range(5)))
    await client.quiet()
    assert client.llm.stats.aborted == 0
    assert client.llm.stats.finished == 20


async def test_many_leave_over_real_connections_and_nothing_leaks(make_client, serve_http):
    async with make_client(forever, step_s=0.002) as client, serve_http(client.app) as url:
        port = int(url.rpartition(":")[2])
        before = len(asyncio.all_tasks())

        async def leave_early() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"prompt":"hi","max_tokens":512,"stream":true}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await reader.readuntil(b"data: ")
            writer.close()

        for _ in range(6):
            await asyncio.gather(*(leave_early() for _ in range(25)))
        await client.quiet()
        metrics = (await client.get("/metrics")).body.decode()
        assert "firsttoken_requests_running 0.0" in metrics
        assert "firsttoken_requests_waiting 0.0" in metrics
        assert 'firsttoken_kv_blocks{state="used"} 0.0' in metrics
        assert client.llm.stats.aborted == 150
        assert (await client.complete()).status == 200
        await asyncio.sleep(0.05)
        assert len(asyncio.all_tasks()) <= before + 2
        assert len(client.app.live) == 0
