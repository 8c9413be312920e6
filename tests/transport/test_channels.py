"""Both channels keep order, survive any cut of the byte stream and report the other end's death."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.transport.channel import ChannelClosed
from firsttoken.transport.framing import FrameError, FrameReader, frame
from firsttoken.transport.inprocess import in_process_channel
from firsttoken.transport.messages import Abort, EngineStats, Failed, Shutdown, StepOutputs
from firsttoken.transport.socket_channel import SocketClientEnd, SocketEngineEnd


def _socket_channel():
    left, right = socket.socketpair()
    return SocketEngineEnd(left), SocketClientEnd(right)


@pytest.fixture(params=["socket", "in-process"])
def ends(request):
    engine, client = _socket_channel() if request.param == "socket" else in_process_channel()
    yield engine, client
    client.close()
    engine.close()


@given(payloads=st.lists(st.binary(max_size=300), max_size=8), cuts=st.lists(st.integers(1, 50), min_size=1))
def test_frames_survive_any_cut(payloads, cuts):
    stream = b"".join(frame(payload) for payload in payloads)
    reader, got, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        got += reader.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert got == payloads


def test_an_absurd_frame_length_is_refused_before_it_is_read():
    with pytest.raises(FrameError, match="4294967295 bytes"):
        FrameReader().feed(b"\xff\xff\xff\xff")


def test_messages_to_the_engine_arrive_in_order(ends):
    engine, client = ends
    for number in range(100):
        client.send(Abort([number]))
    client.send(Shutdown())
    got = []
    while len(got) < 101:
        got += engine.receive(1.0)
    assert got == [Abort([n]) for n in range(100)] + [Shutdown()]
    assert engine.receive(0) == []


async def test_messages_to_the_front_end_arrive_in_order_on_the_loop(ends):
    engine, client = ends
    got, done, loop_thread = [], asyncio.Event(), threading.get_ident()

    def on_message(message):
        assert threading.get_ident() == loop_thread
        got.append(message)
        if len(got) == 200:
            done.set()

    client.listen(on_message, lambda: None)
    sender = threading.Thread(target=lambda: [engine.send(StepOutputs([], EngineStats(steps=n))) for n in range(200)])
    sender.start()
    await asyncio.wait_for(done.wait(), 5)
    sender.join()
    assert [message.stats.steps for message in got] == list(range(200))


def test_without_a_loop_messages_come_on_a_thread(ends):
    engine, client = ends
    got, closed = [], threading.Event()
    client.listen(got.append, closed.set)
    engine.send(Failed("x"))
    engine.close()
    assert closed.wait(5)
    assert got == [Failed("x")]


def test_the_engine_sees_the_front_end_leave(ends):
    engine, client = ends
    client.send(Abort([1]))
    client.close()
    assert engine.receive(1.0) == [Abort([1])]
    with pytest.raises(ChannelClosed):
        engine.receive(1.0)


async def test_a_large_backlog_never_blocks_the_sender_and_is_all_delivered():
    engine, client = _socket_channel()
    client.listen(lambda message: None, lambda: None)
    ids = list(range(20_000))
    start = time.monotonic()
    for _ in range(50):
        client.send(Abort(ids))
    assert time.monotonic() - start < 2
    got = []

    def read():
        while len(got) < 50:
            got.extend(engine.receive(1.0))

    await asyncio.to_thread(read)
    assert all(message == Abort(ids) for message in got)
    client.close()
    engine.close()


def test_a_look_without_waiting_is_one_call_of_the_system(monkeypatch):
    def no_select(*_: object) -> None:
        raise AssertionError("asked whether there is something before reading it")

    engine, client = _socket_channel()
    monkeypatch.setattr(select, "select", no_select)
    assert engine.receive(0) == []
    client.send(Abort([3]))
    assert engine.receive(0) == [Abort([3])]
    client.close()
    with pytest.raises(ChannelClosed):
        engine.receive(0)
    engine.close()


def test_rubbish_on_the_socket_closes_the_channel():
    left, right = socket.socketpair()
    engine = SocketEngineEnd(left)
    right.sendall(frame(b"\x81\xa4type\xa4evil"))
    with pytest.raises(ChannelClosed):
        engine.receive(1.0)
    engine.close()
    right.close()


def test_sending_to_a_dead_peer_says_so():
    engine, client = _socket_channel()
    engine.close()
    with pytest.raises(ChannelClosed):
        client.send(Shutdown())
    client.close()
