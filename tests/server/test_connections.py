"""What clients and others do to an HTTP/1 connection, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from contextlib import asynccontextmanager

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from firsttoken.server import call, run
from firsttoken.server.call import WATCH
from firsttoken.server.exchange import Exchange
from firsttoken.server.protocol import MAX_HEAD_BYTES, Protocol
from tests.server.conftest import forever

BODY = b'{"prompt":"hi","max_tokens":2}'
ENDLESS = b'{"prompt":"hi","max_tokens":512,"stream":true}'
JAVA = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


def post(body=BODY, headers=b"", path=b"/v1/completions"):
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%b%b\r\n%b" % (path, length, headers, body)


class Connection:
    def __init__(self, reader, writer):
        self._reader, self.writer = reader, writer

    async def send(self, *pieces):
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def reply(self):
        """(status, JSON body) of the next answer; None when the connection was closed instead."""
        async with asyncio.timeout(5):
            try:
                head = await self._reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return None
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            return int(head.split()[1]), json.loads(await self._reader.readexactly(length))

    async def until(self, mark):
        async with asyncio.timeout(5):
            await self._reader.readuntil(mark)


@pytest.fixture
def connect(make_client, serve_http):
    """``async with connect(...) as (client, open)``: ``await open()`` is a new connection to the client's server."""

    @asynccontextmanager
    async def made(*script, **options):
        async with make_client(*script, **options) as client, serve_http(client.app) as url:
            opened = []

            async def new():
                opened.append(Connection(*await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))))
                return opened[-1]

            yield client, new
            for connection in opened:
                connection.writer.close()

    return made


@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_an_offer_to_upgrade_is_not_taken_and_the_body_is_read(connect, step):
    # Three on one connection: before it, and behind it, are plain ones.
    data = post() + post(headers=JAVA) + post(headers=JAVA.replace(b"Upgrade: h2c", b"upgrade:h2c")) + post()
    async with connect() as (_, new):
        connection = await new()
        await connection.send(*(data[at : at + step] for at in range(0, len(data), step)))
        for _ in range(4):
            status, body = await connection.reply()
            assert status == 200
            assert body["usage"]["completion_tokens"] == 2


async def test_connect_is_refused(connect):
    async with connect() as (_, new):
        for line in (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"CONNECT /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            connection = await new()
            await connection.send(line)
            status, _ = await connection.reply()
            assert status in (400, 405)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"X-A: ", *[b"a" * 16_000] * 40],
        [b"X-A: b\r\n" * 400] * 40,
        [b"".join(b"X-%d: b\r\n" % number for number in range(9000)) + b"\r\n"],
    ],
    ids=["one header without an end", "headers without an end", "too many headers"],
)
async def test_a_head_is_bounded(connect, pieces):
    async with connect() as (client, new):
        connection = await new()
        try:
            await connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n", *pieces)
        except ConnectionError:
            return  # closed while we were still sending: the answer may be lost on the way
        reply = await connection.reply()
        assert reply is None or (reply[0], reply[1]["error"]["code"]) == (431, "headers_too_large")
        assert (await client.complete()).status == 200


async def test_an_answer_says_that_the_head_is_too_large(connect):
    async with connect() as (_, new):
        connection = await new()
        await connection.send(b"GET /health HTTP/1.1\r\nX-A: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
        status, body = await connection.reply()
        assert (status, body["error"]["code"]) == (431, "headers_too_large")


async def test_a_head_below_the_bound_is_read_in_pieces(connect):
    head = b"X-A: " + b"a" * (MAX_HEAD_BYTES - 2000) + b"\r\n"
    async with connect() as (_, new):
        connection = await new()
        data = post(headers=head)
        for _ in range(2):  # and the count starts anew with the next request
            await connection.send(*(data[at : at + 3000] for at in range(0, len(data), 3000)))
            assert (await connection.reply())[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        post(headers=b"Content-Length: 3\r\n"),
        post(headers=b"Transfer-Encoding: chunked\r\n"),
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["tls", "path", "two lengths", "length and chunks", "chunk size"],
)
async def test_what_is_not_http_gets_an_error_in_openai_shape(connect, data):
    async with connect() as (client, new):
        connection = await new()
        await connection.send(data)
        status, body = await connection.reply()
        assert (status, body["error"]["code"]) == (400, "invalid_http")
        assert await connection.reply() is None  # closed
        assert (await client.complete()).status == 200


async def test_what_cannot_be_read_is_answered_in_its_turn(connect):
    async with connect() as (_, new):
        connection = await new()
        await connection.send(post() + post() + b"\x16\x03\x01 not HTTP\r\n\r\n")
        assert [(await connection.reply())[0] for _ in range(3)] == [200, 200, 400]
        assert await connection.reply() is None
        connection = await new()
        await connection.send(post() + b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n")
        assert [(await connection.reply())[0] for _ in range(2)] == [200, 400]
        assert await connection.reply() is None


async def test_what_cannot_be_read_does_not_break_into_a_stream(connect):
    async with connect(forever, step_s=0.001) as (client, new):
        connection = await new()
        await connection.send(post(ENDLESS.replace(b"512", b"50")))
        await connection.until(b'"x"')
        await connection.send(b"\0\0\0 not HTTP\r\n\r\n", b"nor this")
        await connection.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert (await connection.reply())[0] == 400
        await client.quiet()


async def test_all_pipelined_calls_end_when_the_client_leaves(connect):
    async with connect(forever, step_s=0.002) as (client, new):
        connection = await new()
        await connection.send(post(ENDLESS) + post(ENDLESS) + post())
        await connection.until(b"data: ")
        connection.writer.close()
        async with asyncio.timeout(1):  # 512 steps would take longer
            while len(client.app.live):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await client.quiet()
        assert client.llm.stats.finished == 0
        assert client.llm.stats.aborted >= 1


@pytest.mark.parametrize("data", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
async def test_a_connection_that_sends_no_request_is_closed(connect, monkeypatch, data):
    monkeypatch.setattr(run, "KEEP_ALIVE_S", 0.1)
    async with connect() as (_, new):
        connection = await new()
        await connection.send(data)
        assert await connection.reply() is None


@pytest.mark.parametrize("data", [b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
async def test_a_connection_whose_next_request_does_not_come_whole_is_closed(connect, monkeypatch, data):
    monkeypatch.setattr(run, "KEEP_ALIVE_S", 0.1)
    async with connect() as (_, new):
        connection = await new()
        await connection.send(post())
        assert (await connection.reply())[0] == 200
        await connection.send(data)
        assert await connection.reply() is None


async def test_half_a_pipelined_request_does_not_cut_the_answer_before_it(connect, monkeypatch):
    monkeypatch.setattr(run, "KEEP_ALIVE_S", 0.05)
    async with connect(forever, step_s=0.01) as (_, new):
        connection = await new()
        await connection.send(post(ENDLESS.replace(b"512", b"32")) + b"GET /hea")
        await connection.until(b"data: [DONE]\n\n")


async def test_a_body_that_stops_coming_is_given_up(connect, monkeypatch):
    monkeypatch.setattr(call, "BODY_STALL_S", 0.1)
    async with connect() as (client, new):
        connection = await new()
        await connection.send(post()[:-10])
        status, body = await connection.reply()
        assert (status, body["error"]["code"]) == (408, "body_timeout")
        assert await connection.reply() is None
        assert len(client.app.live) == 0


async def test_a_compressed_body_is_refused_by_name(connect):
    async with connect() as (_, new):
        connection = await new()
        await connection.send(post(b"\x1f\x8b\x08\x00", b"Content-Encoding: gzip\r\n"))
        status, body = await connection.reply()
        assert status == 415
        assert "'gzip'" in body["error"]["message"]
        connection = await new()
        await connection.send(post(headers=b"Content-Encoding: identity\r\n"))
        assert (await connection.reply())[0] == 200


async def test_the_account_starts_with_the_first_byte(connect):
    async with connect() as (_, new):
        connection = await new()
        head, _, rest = post(b'{"prompt":"hi","max_tokens":2,"timings":true}').partition(b"Host")
        await connection.send(head)
        await asyncio.sleep(0.1)
        await connection.send(b"Host" + rest)
        _, body = await connection.reply()
        assert 100 <= body["timings"]["parse_ms"] <= body["timings"]["total_ms"]
        assert body["timings"]["unaccounted_ms"] == 0


# ----------------------------------------------------------------- what is written, piece by piece


class Socket:
    """A transport that remembers each write."""

    def __init__(self):
        self.writes = []
        self.closed = False

    def write(self, data):
        self.writes.append(bytes(data))

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_extra_info(self, name):
        return None

    def set_write_buffer_limits(self, **limits):
        pass

    def resume_reading(self):
        pass


async def answered(app, *pieces):
    """The socket after ``app`` has answered a request that came in ``pieces``, and the scopes that it saw."""
    scopes = []

    async def watched(scope, receive, send):
        scopes.append(scope)
        while (await receive())["more_body"]:
            pass
        await app(send)

    config = run._uvicorn_config(watched)
    transport = Socket()
    protocol = Protocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(transport)
    for piece in pieces:
        protocol.data_received(piece)
        for _ in range(3):
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    return transport, scopes


def exchange_over(transport, flow):
    kept = {"default_headers": [], "expects_continue": False, "keep_alive": True}
    return Exchange({"method": "POST"}, transport, flow, **kept, on_response=lambda: None)


async def stream(send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"one", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


async def test_a_head_goes_out_with_the_first_bytes_and_each_piece_at_once():
    transport, _ = await answered(stream, post())
    first, *rest = transport.writes
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert rest == [b"3\r\ntwo\r\n", b"0\r\n\r\n"]


async def test_a_piece_that_need_not_be_awaited_is_written_at_once_and_a_slow_reader_is_waited_for():
    transport = Socket()
    flow = FlowControl(transport)
    exchange = exchange_over(transport, flow)
    with pytest.raises(RuntimeError, match="out of its order"):
        exchange.write(b"early")
    await exchange.send({"type": "http.response.start", "status": 200})
    assert exchange.write(b"one") is None
    assert transport.writes[0].endswith(b"\r\n\r\n3\r\none\r\n"), "the head goes out with it"
    assert exchange.write(b"") is None
    assert exchange.write(b"two") is None
    flow.pause_writing()
    rest = asyncio.create_task(exchange.write(b"three"))
    await asyncio.sleep(0)
    assert not rest.done()
    flow.resume_writing()
    await asyncio.wait_for(rest, 1)
    assert transport.writes[1:] == [b"3\r\ntwo\r\n", b"5\r\nthree\r\n"]
    await exchange.send({"type": "http.response.body"})
    with pytest.raises(RuntimeError, match="out of its order"):
        exchange.write(b"late")
    exchange.disconnected = True
    assert exchange.write(b"gone") is None
    assert transport.writes[3:] == [b"0\r\n\r\n"]


async def test_an_answer_without_a_body_is_sent():
    async def empty(send):
        await send({"type": "http.response.start", "status": 204, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    for request in (post(), b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n"):
        transport, _ = await answered(empty, request)
        (head,) = [data for data in transport.writes if data]
        assert head.startswith(b"HTTP/1.1 204 No Content\r\n")


async def test_a_caller_who_asks_whether_to_go_on_is_told_so_at_once():
    head, _, body = post(headers=b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    transport, scopes = await answered(stream, head + b"\r\n\r\n", body)
    assert transport.writes[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert transport.writes[1].endswith(b"one\r\n")
    assert len(scopes) == 1


async def test_a_head_without_a_body_is_not_lost_when_the_answer_breaks():
    async def broken(send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("on purpose")

    transport, _ = await answered(broken, post())
    assert transport.closed
    assert transport.writes[0].startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("cut", [1, 20, len(BODY)])
async def test_a_body_is_waited_for_with_a_limit_only_while_it_is_incomplete(cut):
    async def app(send):
        pass

    data = post()
    _, (whole,) = await answered(app, data)
    _, (pieces,) = await answered(app, data[:-cut])
    assert whole[call.BODY_READ]
    assert call.BODY_READ not in pieces


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/v1/models", "/v1/models", b""),
        (b"/v1/models?a=b", "/v1/models", b"a=b"),
        (b"/v1/a%20b%2Fc", "/v1/a b/c", b""),
        (b"http://host:1/v1/models?x", "/v1/models", b"x"),
        (b"/", "/", b""),
    ],
)
async def test_a_target_is_split_into_path_and_query(target, path, query):
    _, (scope,) = await answered(stream, post(path=target))
    assert (scope["path"], scope["query_string"]) == (path, query)
    assert scope["method"] == "POST"
    assert scope["http_version"] == "1.1"
    assert (b"host", b"x") in scope["headers"]


@pytest.mark.parametrize("header", [(b"a", b"b\r\nc: d"), (b"a", b"b\nc"), (b"a\r", b"b")])
async def test_a_header_cannot_begin_another_line(header):
    async def app(send):
        await send({"type": "http.response.start", "status": 200, "headers": [header]})

    transport, _ = await answered(app, post())
    assert transport.writes[0].startswith(b"HTTP/1.1 500 ")
    assert transport.closed


@pytest.mark.parametrize("body", [b"four", b"sixsix"])
async def test_a_body_of_another_length_than_declared_ends_the_connection(body):
    async def app(send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": body})

    transport, _ = await answered(app, post())
    assert transport.closed
    assert body not in b"".join(transport.writes)


async def test_an_application_that_says_nothing_is_a_500():
    async def app(send):
        pass

    transport, _ = await answered(app, post())
    assert transport.writes[0].startswith(b"HTTP/1.1 500 ")
    assert transport.writes[0].endswith(b"Internal Server Error")


async def test_who_watches_a_caller_hears_of_his_leaving_once_and_not_after_the_end():
    left = []

    gone = exchange_over(Socket(), FlowControl(Socket()))
    gone.watch(lambda: left.append("gone"))
    gone.lost()
    gone.lost()
    gone.watch(lambda: left.append("late"))  # who comes later is told at once
    assert left == ["gone", "late"]
    assert (await gone.receive())["type"] == "http.disconnect"
    done = exchange_over(Socket(), FlowControl(Socket()))
    done.watch(lambda: left.append("done"))
    await done.send({"type": "http.response.start", "status": 200})
    await done.send({"type": "http.response.body"})
    done.lost()
    assert left == ["gone", "late"]


class Marked:
    pass


async def test_a_finished_exchange_leaves_nothing_for_the_collector():
    app_done = asyncio.Event()

    async def app(scope, receive, send):
        scope[WATCH](app_done.set)
        await stream(send)

    config = run._uvicorn_config(app)
    protocol = Protocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(Socket())
    gc.collect()
    gc.disable()
    try:
        protocol.data_received(post())
        protocol.cycle.scope["marked"] = marked = Marked()
        found = weakref.ref(marked)  # goes with the scope
        del marked
        for _ in range(3):
            await asyncio.sleep(0)
        assert protocol.cycle.response_complete
        assert found() is None
    finally:
        gc.enable()
        protocol.connection_lost(None)
