"""Callers who come too slowly, or too many at once, over plain sockets and TLS."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
from contextlib import asynccontextmanager, closing

import pytest

from firsttoken.server import call, connections, listener, run
from firsttoken.server.config import ServerConfig
from firsttoken.server.connections import Connections, make_room
from firsttoken.server.protocol import MAX_HEADERS
from tests.server.conftest import forever
from tests.server.test_connections import Connection, post


@pytest.fixture
def contexts(certificate):
    """Of the server, and of a caller who trusts it; None and None for plain sockets."""
    caller = ssl.create_default_context(cafile=str(certificate.file))
    return {"plain": (None, None), "tls": (certificate.context, caller)}


@pytest.fixture
def connect(make_client, serve_http, contexts):
    @asynccontextmanager
    async def made(kind: str = "plain", limit: Connections | None = None, **options):
        tls, trusted = contexts[kind]
        async with make_client(**options) as client, serve_http(client.app, tls, limit) as url:
            opened = []

            async def new() -> Connection:
                port = int(url.rpartition(":")[2])
                opened.append(Connection(*await asyncio.open_connection("127.0.0.1", port, ssl=trusted)))
                return opened[-1]

            yield client, new
            for one in opened:
                one.writer.close()

    return made


async def _drip(connection: Connection, data: bytes) -> None:
    for at in range(len(data)):
        await connection.send(data[at : at + 1])
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["plain", "tls"])
async def test_a_body_that_drips_is_given_up(connect, monkeypatch, kind: str) -> None:
    monkeypatch.setattr(call, "BODY_STALL_S", 0.15)
    async with connect(kind) as (client, new):
        connection = await new()
        head, _, body = post(b'{"prompt":"hi","max_tokens":2,"stop":"' + b"x" * 900 + b'"}').partition(b"\r\n\r\n")
        await connection.send(head + b"\r\n\r\n")
        dripping = asyncio.create_task(_drip(connection, body))
        status, answer = await connection.reply()
        dripping.cancel()
        assert (status, answer["error"]["code"]) == (408, "body_timeout")
        assert "too slowly" in answer["error"]["message"]
        assert len(client.app.live) == 0


@pytest.mark.parametrize("kind", ["plain", "tls"])
async def test_a_head_that_drips_is_given_up(connect, monkeypatch, kind: str) -> None:
    monkeypatch.setattr(run, "KEEP_ALIVE_S", 0.1)
    async with connect(kind) as (_, new):
        connection = await new()
        dripping = asyncio.create_task(_drip(connection, post()))
        assert await connection.reply() is None
        dripping.cancel()


async def test_what_drips_on_after_the_answer_ends_too(connect, monkeypatch) -> None:
    monkeypatch.setattr(run, "KEEP_ALIVE_S", 0.1)
    async with connect(config=ServerConfig(api_keys=("secret",))) as (_, new):
        connection = await new()
        head, _, body = post(b"x" * 900).partition(b"\r\n\r\n")
        await connection.send(head + b"\r\n\r\n")
        dripping = asyncio.create_task(_drip(connection, body))
        assert (await connection.reply())[0] == 401
        assert await connection.reply() is None
        dripping.cancel()


async def test_headers_are_counted(connect) -> None:
    async with connect() as (_, new):
        for more, status in ((MAX_HEADERS - 2, 200), (MAX_HEADERS - 1, 431)):
            connection = await new()
            await connection.send(post(headers=b"x: y\r\n" * more))
            assert (await connection.reply())[0] == status


@pytest.mark.parametrize("kind", ["plain", "tls"])
@pytest.mark.parametrize(("limit", "named"), [((2, None), "--max-connections"), ((9, 2), "--max-connections-per-ip")])
async def test_connections_are_counted(connect, kind: str, limit, named: str) -> None:
    async with connect(kind, Connections(*limit)) as (_, new):
        first, second, third = [await new() for _ in range(3)]
        status, answer = await third.reply()
        assert (status, answer["error"]["code"]) == (503, "too_many_connections")
        assert named in answer["error"]["message"]
        assert await third.reply() is None
        for one in (first, second):
            await one.send(post())
            assert (await one.reply())[0] == 200
        first.writer.close()
        await first.writer.wait_closed()
        async with asyncio.timeout(5):
            while True:
                fourth = await new()
                await fourth.send(post())
                if (reply := await fourth.reply()) is not None and reply[0] == 200:
                    break


async def test_who_never_reads_his_stream_frees_what_it_holds(make_client, monkeypatch) -> None:
    monkeypatch.setattr(listener, "UNREAD_S", 1)
    ask = post(b'{"prompt":"hi","max_tokens":4000,"n":30,"stream":true,"logprobs":5}')
    config = ServerConfig(port=0)
    async with make_client(forever) as client:
        with closing(listener.bind(config)) as listening, socket.socket() as caller:
            server = run._Uvicorn(run._uvicorn_config(client.app))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await asyncio.to_thread(caller.connect, listening.getsockname())
            caller.send(ask)
            async with asyncio.timeout(10):
                while not client.llm.stats.aborted or len(client.app.live):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await client.quiet()
            assert client.llm.stats.aborted == 30
            server.should_exit = True
            await serving


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(monkeypatch, caplog) -> None:
    raised = []
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, limits: raised.append(limits))
    for soft, hard, wanted, told in (
        (1024, 4096, 100, None),
        (1024, 4096, 2000, (2128, 4096)),
        (1024, 4096, 9000, (4096, 4096)),
        (1024, resource.RLIM_INFINITY, 9000, (9128, resource.RLIM_INFINITY)),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 9000, None),
    ):
        raised.clear()
        caplog.clear()
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        make_room(wanted)
        assert raised == ([told] if told else [])
        assert ("ulimit -n" in caplog.text) == (wanted == 9000 and hard == 4096)


def test_one_holder_of_ipv6_has_many_addresses() -> None:
    limit = Connections(9, 1)
    assert limit.enter("2001:db8:1:2::3%eth0") is None
    assert limit.enter("2001:db8:1:2:ffff::4") is not None
    assert limit.enter("2001:db8:1:3::4") is None
    assert limit.enter("10.0.0.1") is None
    assert limit.enter("::ffff:10.0.0.1") is not None
    assert limit.enter("::ffff:10.0.0.2") is None
    limit.leave("2001:db8:1:2:aaaa::")
    assert limit.enter("2001:db8:1:2:ffff::4") is None


def test_an_answer_to_one_too_many_says_when_to_come_back() -> None:
    limit = Connections(1)
    assert limit.enter("a") is None
    error = limit.enter("b")
    assert error is not None
    assert dict(error.headers)[b"retry-after"] == b"5"
    assert json.loads(error.body())["error"]["type"] == "service_unavailable"
    limit.leave("a")
    assert limit.enter("b") is None
