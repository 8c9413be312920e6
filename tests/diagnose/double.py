"""Servers that take known times, and note what they really took: sleeps on a busy machine are never exact."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

MS = 1e-3


@dataclass
class Double:
    """A streaming server. All times in ms; ``tokens`` are the texts of the events.

    ``mode``: stream, html, json (a whole answer), half (the stream stops), error (500), refuse (400 to all extras),
    silent (never answers), bare (no extras, no usage), burst (all tokens at once).
    """

    tls_ms: float = 0.0
    think_ms: float = 0.0  # to the headers
    first_ms: float = 0.0  # from the headers to the first token
    token_ms: float = 0.0  # of the prompt, each
    gap_ms: float = 0.0
    gaps_ms: Sequence[float] | None = None  # instead, one by one
    end_ms: float = 0.0
    keep_alive: bool = True
    mode: str = "stream"
    chat_refused: int = 0  # with this status, where completions are answered
    refuses_with: int = 401  # the status in mode "refusal"
    tokens: int = 8
    headers: tuple[str, ...] = ()
    events: Sequence[dict[str, Any]] | None = None  # instead of the tokens
    serial: bool = False  # one request at a time thinks
    context: ssl.SSLContext | None = None
    took: list[dict[str, float]] = field(default_factory=list)
    stamps: list[list[float]] = field(default_factory=list)  # when each event was sent, s on the one clock
    handshakes: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    port: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"{'https' if self.context else 'http'}://localhost:{self.port}"

    @contextmanager
    def running(self) -> Iterator[Double]:
        with listening(self._connection) as self.port:
            yield self

    def _connection(self, raw: socket.socket) -> None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.context is not None:
            began = time.monotonic()
            time.sleep(self.tls_ms * MS)
            raw = self.context.wrap_socket(raw, server_side=True)
            self.handshakes.append((time.monotonic() - began) / MS)
        with raw, raw.makefile("rb") as reader:
            while self._answer(raw, reader):
                pass

    def _answer(self, connection: socket.socket, reader: BufferedReader) -> bool:
        line = reader.readline()
        got = time.monotonic()
        if not line.endswith(b"HTTP/1.1\r\n"):
            return False
        self.paths.append(line.split()[1].decode())
        headers = {}
        while (head := reader.readline().strip()) != b"":
            name, _, value = head.partition(b":")
            headers[name.lower()] = value.strip()
        body = reader.read(int(headers.get(b"content-length", b"0")))
        if line.startswith(b"GET"):
            return self._get(connection, self.paths[-1])
        self.bodies.append(json.loads(body))
        return self._post(connection, self.bodies[-1], got)

    def _get(self, connection: socket.socket, path: str) -> bool:
        if self.mode == "html":
            return self._whole(connection, 200, "text/html", b"<!doctype html><title>hello</title>")
        if self.mode == "refusal":
            return self._refuse(connection)
        if path != "/v1/models":
            return self._whole(connection, 404, "application/json", b'{"error":{"message":"no such route"}}')
        return self._whole(connection, 200, "application/json", b'{"data":[{"id":"double"}]}')

    def _post(self, connection: socket.socket, asked: dict[str, Any], got: float) -> bool:
        if self.chat_refused and self.paths[-1] == "/v1/chat/completions":
            error = b'{"error":{"message":"the model has no chat template"}}'
            return self._whole(connection, self.chat_refused, "application/json", error)
        extras = {"timings", "ignore_eos", "stream_options"} & asked.keys()
        if self.mode in ("refuse", "bare") and (self.mode == "bare" or "timings" in extras) and extras:
            return self._whole(connection, 400, "application/json", b'{"error":{"message":"unknown field"}}')
        if self.mode == "html":
            return self._whole(connection, 200, "text/html", b"<!doctype html><title>hello</title>")
        if self.mode == "json":
            return self._whole(connection, 200, "application/json", b'{"choices":[{"message":{"content":"hi"}}]}')
        if self.mode == "error":
            return self._whole(connection, 500, "application/json", b'{"error":{"message":"out of cheese"}}')
        if self.mode == "refusal":
            return self._refuse(connection)
        if self.mode == "silent":
            time.sleep(2)
            return False
        return self._stream(connection, asked, got)

    def _refuse(self, connection: socket.socket) -> bool:
        return self._whole(connection, self.refuses_with, "application/json", b'{"error":{"message":"no cheese"}}')

    def _stream(self, connection: socket.socket, asked: dict[str, Any], got: float) -> bool:
        chat = "messages" in asked
        prompt = len((asked["messages"][0]["content"] if chat else asked["prompt"]).split())
        think = (self.think_ms + self.token_ms * prompt) * MS
        if self.serial:
            with self._lock:
                time.sleep(think)
        else:
            time.sleep(think)
        close = [] if self.keep_alive else ["Connection: close"]
        head = [
            "HTTP/1.1 200 OK",
            "Content-Type: text/event-stream",
            "Transfer-Encoding: chunked",
            *close,
            *self.headers,
        ]
        headed = time.monotonic()
        if self.first_ms:
            connection.sendall("\r\n".join([*head, "", ""]).encode())
            head = []
            time.sleep(self.first_ms * MS)
        stamps = []
        events = self.events
        if events is None:
            events = [
                {"choices": [{"delta": {"content": f" w{n}"}} if chat else {"text": f" w{n}"}]}
                for n in range(min(self.tokens, asked["max_tokens"]))
            ]
        gaps = self.gaps_ms if self.gaps_ms is not None else [self.gap_ms] * (len(events) - 1)
        for number, event in enumerate(events):
            if number:
                time.sleep(gaps[number - 1] * MS)
            if self.mode == "half" and number == 3:
                return False
            stamps.append(time.monotonic())
            connection.sendall("\r\n".join([*head, "", ""]).encode() * bool(head) + _chunk(event))
            head = []
        self.stamps.append(stamps)
        time.sleep(self.end_ms * MS)
        last = _chunk({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        if self.events is None and self.mode != "bare":
            last += _chunk({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": len(events)}})
        ended = time.monotonic()
        connection.sendall(last + _data(b"[DONE]") + b"0\r\n\r\n")
        points = {
            "ttfb": headed - got if self.first_ms else stamps[0] - got,
            "first_token": stamps[0] - headed if self.first_ms else 0.0,
            "gaps": stamps[-1] - stamps[0],
            "transfer": ended - stamps[-1],
        }
        self.took.append({name: seconds / MS for name, seconds in points.items()})
        return self.keep_alive

    def _whole(self, connection: socket.socket, status: int, kind: str, body: bytes) -> bool:
        head = f"HTTP/1.1 {status} Word\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return True


def _data(raw: bytes) -> bytes:
    text = b"data: " + raw + b"\n\n"
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"


def _chunk(event: dict[str, Any]) -> bytes:
    return _data(json.dumps(event).encode())


@contextmanager
def listening(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port. So many threads accept as there may be connections at once: to start one would be a delay that nobody
    asked for. A connection that its client broke is nobody's fault."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with contextlib.closing(connection), contextlib.suppress(OSError, ValueError):
                handle(connection)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(12)]
    for thread in threads:
        thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in threads:
            thread.join(2)


@contextmanager
def delaying_proxy(port: int, delay_ms: float, took: list[float]) -> Iterator[int]:
    """Passes everything on, each piece ``delay_ms`` later, both ways; ``took`` are the delays as they were."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        pieces: queue.Queue[tuple[float, bytes]] = queue.Queue()

        def drain() -> None:
            with contextlib.suppress(OSError):
                while (piece := pieces.get())[1]:
                    time.sleep(max(piece[0] + delay_ms * MS - time.monotonic(), 0))
                    took.append((time.monotonic() - piece[0]) / MS)
                    sink.sendall(piece[1])
                sink.shutdown(socket.SHUT_WR)

        writer = threading.Thread(target=drain, daemon=True)
        writer.start()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                pieces.put((time.monotonic(), data))
        pieces.put((0.0, b""))
        writer.join(5)

    def handle(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port)) as server:
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=pump, args=(server, client), daemon=True)
            back.start()
            pump(client, server)
            back.join(5)

    with listening(handle) as front:
        yield front


@contextmanager
def own_process(certificate: Path, key: Path, **fields: float) -> Iterator[int]:
    """A double behind TLS that shares no interpreter with its client: the port."""
    command = [sys.executable, __file__, str(certificate), str(key), json.dumps(fields)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.communicate(timeout=10)


if __name__ == "__main__":
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(sys.argv[1], sys.argv[2])
    with Double(context=server_context, **json.loads(sys.argv[3])).running() as running:
        print(running.port, flush=True)
        sys.stdin.read()
