"""``--server granian``: the same answers over HTTP/1 and HTTP/2, and callers who leave, slow ones, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from contextlib import asynccontextmanager

import httpx2
import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.core.tls import client_context
from firsttoken.server import call
from firsttoken.server.config import ServerConfig
from firsttoken.server.granian_server import GranianServer
from tests.server.conftest import forever


@asynccontextmanager
async def served(app, config: ServerConfig, keep_alive_s: float = 75):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        server = GranianServer(app, config, keep_alive_s)
        task = asyncio.create_task(server.serve([listener]))
        try:
            await asyncio.sleep(0.01)
            assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "first tokens would wait for 40 ms"
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 5)


async def idle(client) -> None:
    await client.quiet()
    assert client.llm.stats.aborted > 0


async def test_http2_over_tls_and_callers_who_leave(make_client, certificate):
    config = ServerConfig(ssl_certfile=str(certificate.file), ssl_keyfile=str(certificate.key))
    async with make_client(forever, config, step_s=0.001) as client, served(client.app, config) as port:
        url = f"https://127.0.0.1:{port}/v1/completions"
        async with httpx2.AsyncClient(http2=True, http1=False, verify=client_context(str(certificate.file))) as caller:
            body = {"prompt": "hi", "max_tokens": 20, "stream": True}
            replies = await asyncio.gather(*(caller.post(url, json=body) for _ in range(20)))
            assert {(one.http_version, one.status_code) for one in replies} == {("HTTP/2", 200)}
            assert all(one.text.endswith("data: [DONE]\n\n") for one in replies)
            assert {"".join(re.findall(r'"text":"(x*)"', one.text)) for one in replies} == {20 * "x"}
            # What would close a connection of HTTP/1 has no place in a shared one.
            refused = await caller.post(url, content=b"{}", headers={"content-encoding": "gzip"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_encoding")
            assert "connection" not in refused.headers
            async with caller.stream("POST", url, json=body | {"max_tokens": 4000}) as stream:
                await anext(stream.aiter_bytes())
        await idle(client)  # only this stream was left, and the connection went on until the end
        async with httpx2.AsyncClient(verify=client_context(str(certificate.file))) as caller:
            assert (await caller.get(f"https://127.0.0.1:{port}/health")).http_version == "HTTP/1.1"


async def test_a_caller_who_leaves_before_the_first_byte(make_client):
    async with make_client(forever, ServerConfig(), step_s=0.02) as client, served(client.app, ServerConfig()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": "hi", "max_tokens": 4000}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(5):
            while not client.llm.stats.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.close()
        await idle(client)
        del reader


async def test_heads_and_bodies_that_drip_are_given_up(make_client, monkeypatch):
    monkeypatch.setattr(call, "BODY_STALL_S", 0.15)
    config = ServerConfig()
    async with make_client(forever, config) as client, served(client.app, config, 0.2) as port:
        for sent, dripping, answer in (
            (b"POST /v1/completions HTTP/1.1\r\nx: ", b"y" * 900, b""),
            (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n", b"x" * 900, b"408"),
            (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"", b"200"),  # idle behind an answer
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            drip = asyncio.create_task(_drip(writer, dripping))
            async with asyncio.timeout(5):
                assert (await reader.readline())[9:12] == answer
                if answer != b"408":  # where it is the body, the caller learns of the end by his next byte, or later
                    await reader.read()
            drip.cancel()
            writer.close()


async def _drip(writer, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("signals", [1, 2])
def test_it_drains_and_stops(start, signals):
    server = start(server="granian")
    stream = server.stream(80 if signals == 1 else 4000)
    server.signal()
    while server.ask("GET", "/health/ready").status != 503:
        time.sleep(0.01)
    refused = server.ask("POST", "/v1/completions", {"prompt": "hi"})
    assert (refused.status, int(refused.headers["Retry-After"]) > 0) == (503, True)
    if signals == 2:
        server.signal()
    rest = stream.read()
    if signals == 1:
        assert rest.endswith(b"data: [DONE]\n\n")
    else:
        assert b'"code":"server_stopping"' in rest
    assert server.wait(5) == signals - 1


def test_what_it_cannot_do_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="max_connections_per_ip is not for the server granian"):
        ServerConfig(server="granian", max_connections_per_ip=5)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    from firsttoken.server.run import run_server

    with pytest.raises(ConfigError, match=r"granian is not installed: pip install 'firsttoken\[granian\]'"):
        run_server(ServerConfig(server="granian", port=0), lambda: pytest.fail("the engine was started"))
