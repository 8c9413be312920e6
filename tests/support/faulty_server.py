"""An HTTP server of a few lines whose answers are written byte for byte by the test, with their delays and faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from firsttoken.core.clock import now_ns

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CLOSING_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


class Cut:
    """In an answer, in place of bytes: the connection is closed there."""


@dataclass
class Ask:
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Step = bytes | float | Cut
Answer = Callable[[Ask], Iterable[Step]]


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str = "x", finish: str | None = None, **more: Any) -> bytes:
    """An event of a completion with ``text``."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}], **more)


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


def plain(status: int, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} So\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def good(ask: Ask) -> Iterable[Step]:
    """As many tokens as asked for, one a chunk, and the usage if asked for."""
    wanted = ask.body["max_tokens"]
    yield HEAD
    for number in range(wanted):
        yield chunk(token("x", "length" if number == wanted - 1 else None))
    if ask.body.get("stream_options"):
        yield chunk(usage(len(ask.body.get("prompt", "")), wanted))
    yield chunk(DONE) + END


@dataclass
class FaultyServer:
    """Answers ``/v1/models`` by itself, and everything else with the steps that ``answer`` gives: bytes are written at
    once, a number is a pause in seconds. ``written`` are the instants of writing, by request."""

    answer: Answer = good
    models: tuple[str, ...] = ("faulty",)
    asks: list[Ask] = field(default_factory=list)
    written: list[list[int]] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None):
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            self.connections += 1
            try:
                while (ask := await _read(reader)) is not None and await self._reply(ask, writer):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass  # the caller has gone, or the test is over
            finally:
                tasks.discard(task)
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _reply(self, ask: Ask, writer: asyncio.StreamWriter) -> bool:
        if ask.path.endswith("/models"):
            cards = {"data": [{"id": name} for name in self.models]}
            writer.write(plain(200, json.dumps(cards).encode()))
            return True
        self.asks.append(ask)
        written: list[int] = []
        self.written.append(written)
        for step in self.answer(ask):
            if isinstance(step, Cut):
                await writer.drain()
                return False
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                written.append(now_ns())
                writer.write(step)
        await writer.drain()
        return True


async def _read(reader: asyncio.StreamReader) -> Ask | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode().rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return Ask(method, path, headers, json.loads(raw) if raw else {})
