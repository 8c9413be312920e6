"""One streamed completion over a connection, with a stamp behind each phase.

Stamps are taken right after the system call that brought the bytes, before anything is parsed.
"""

from __future__ import annotations

import gc
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.diagnose.connection import Connection, connect
from firsttoken.diagnose.dialect import CHAT, Dialect, Told, error_text, finish_of, proxy_ms, server_timing, text_of
from firsttoken.diagnose.endpoint import Endpoint
from firsttoken.diagnose.errors import ProbeFailed
from firsttoken.diagnose.events import EventReader
from firsttoken.diagnose.http_reader import HttpReader
from firsttoken.diagnose.sample import Chunk, Sample

_READ = 1 << 16
_MOST_BODY = 1 << 20  # of an answer that is no stream


@dataclass(frozen=True)
class Ask:
    """What one request asks for."""

    model: str
    prompt: str
    max_tokens: int
    request_id: str


@dataclass(frozen=True)
class Probe:
    """How a server is reached: everything that all requests share."""

    endpoint: Endpoint
    context: ssl.SSLContext | None
    api_key: str | None = None
    timeout_s: float = 120.0
    dialect: Dialect = CHAT[0]

    def open(self, session: ssl.SSLSession | None = None) -> Connection:
        """Raises `ProbeFailed`."""
        return connect(self.endpoint, self.context, self.timeout_s, session)

    def once(self, ask: Ask) -> Sample:
        """On a connection of its own. Raises `ProbeFailed`."""
        request = self._request(ask)  # made before, or the making would count as waiting
        connection = self.open()
        try:
            return self._timed(connection, ask, request, connection.secured_ns)
        finally:
            connection.close()

    def ask(self, connection: Connection, ask: Ask, at: Callable[[], object] | None = None) -> Sample:
        """Over a connection that is open; if it was used before, the set-up takes no time. ``at`` is called right
        before the request is sent: it may wait. The sample begins then, unless the connection was made for it.
        Raises `ProbeFailed`."""
        request = self._request(ask)
        if at is not None:
            at()
        fresh = at is None and not connection.used
        return self._timed(connection, ask, request, connection.secured_ns if fresh else now_ns())

    def _request(self, ask: Ask) -> bytes:
        body = self.dialect.body(ask.model, ask.prompt, ask.max_tokens)
        return self._head("POST", self.dialect.path, ask.request_id, len(body)) + body

    def _timed(self, connection: Connection, ask: Ask, request: bytes, began: int) -> Sample:
        # A pause of the collector would look like one of the server's.
        collecting = gc.isenabled()
        gc.disable()
        try:
            answer = self._exchange(connection, request)
        finally:
            if collecting:
                gc.enable()
        sample = _sample(connection, answer, ask, began)
        if began == connection.secured_ns:
            sample = replace(
                sample,
                began_ns=connection.began_ns,
                resolved_ns=connection.resolved_ns,
                connected_ns=connection.connected_ns,
            )
        connection.used = True
        return sample

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a short answer, on a connection of its own. Raises `ProbeFailed`."""
        connection = self.open()
        answer = _Answer()
        try:
            self._send(connection, self._head("GET", path, "diagnose", 0))
            while not answer.http.complete and len(answer.body) < _MOST_BODY:
                answer.receive(connection, self.timeout_s)
        finally:
            connection.close()
        return answer.http.status, answer.body

    def _exchange(self, connection: Connection, request: bytes) -> _Answer:
        answer = _Answer()
        self._send(connection, request)
        answer.sent_ns = now_ns()
        while not answer.http.complete:
            answer.receive(connection, self.timeout_s)
            if answer.http.has_headers and not answer.streams and len(answer.body) > _MOST_BODY:
                break
        if answer.http.status >= 400:
            raise self.refusal(self.dialect.path, answer.http.status, answer.body)
        answer.check()
        return answer

    def refusal(self, path: str, status: int, body: bytes) -> ProbeFailed:
        """What a status of 400 or more says."""
        told = error_text(body).rstrip(". ") or "without a word"
        if status == 401 and self.api_key is None:
            text = f"{self.endpoint} asks for a key (401): give it with --api-key"
        elif status in (401, 403):
            which = "callers without a key" if self.api_key is None else "this key"
            text = f"{self.endpoint} refuses {which} ({status}): {told}; give the right one with --api-key"
        elif status == 404:
            text = f"{self.endpoint}{path} answered 404: {told}. Is this the API's address, and the model's name right?"
        elif status == 429:
            text = f"{self.endpoint} turned the request away (429): {told}"
        else:
            text = f"the server answered {status}: {told}"
        return ProbeFailed("ttfb", text, status=status)

    def _send(self, connection: Connection, request: bytes) -> None:
        try:
            connection.socket.sendall(request)
        except OSError as error:
            raise ProbeFailed("ttfb", f"the request could not be sent: {error.strerror or error}") from None

    def _head(self, method: str, path: str, request_id: str, length: int) -> bytes:
        lines = [
            f"{method} {self.endpoint.base}{path} HTTP/1.1",
            f"Host: {self.endpoint.authority}",
            "User-Agent: firsttoken-diagnose",
            "Accept: text/event-stream, application/json",
            "Accept-Encoding: identity",
            f"X-Request-Id: {request_id}",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


@dataclass
class _Answer:
    """What has come so far."""

    http: HttpReader = field(default_factory=HttpReader)
    events: EventReader = field(default_factory=EventReader)
    told: Told = field(default_factory=Told)
    chunks: list[Chunk] = field(default_factory=list)
    body: bytes = b""
    done: bool = False
    sent_ns: int = 0
    first_byte_ns: int = 0
    ended_ns: int = 0

    @property
    def streams(self) -> bool:
        kind = self.http.headers.get("content-type", "")
        return self.http.status == 200 and kind.partition(";")[0].strip().lower() == "text/event-stream"

    @property
    def phase(self) -> str:
        if not self.first_byte_ns:
            return "ttfb"
        if not self.chunks:
            return "first_token"
        return "transfer" if self.told.finished else "gaps"

    def receive(self, connection: Connection, timeout_s: float) -> None:
        """Wait for bytes and take them in."""
        try:
            data = connection.socket.recv(_READ)
        except TimeoutError:
            raise ProbeFailed(self.phase, f"nothing came for {timeout_s:g} s{self._so_far()}") from None
        except OSError as error:
            text = f"the connection broke ({error.strerror or error}){self._so_far()}"
            raise ProbeFailed(self.phase, text) from None
        now = self.ended_ns = now_ns()
        if data:
            self.first_byte_ns = self.first_byte_ns or now
            self._take(data, now)
            return
        self.http.end()
        if not self.http.complete:
            raise ProbeFailed(self.phase, f"the server closed the connection{self._so_far()}")

    def check(self) -> None:
        """Is it the answer that was asked for? Raises `ProbeFailed`."""
        http = self.http
        if http.status != 200:
            text = error_text(self.body) or "without a word"
            raise ProbeFailed("ttfb", f"the server answered {http.status}: {text}", status=http.status)
        if not self.streams:
            kind = http.headers.get("content-type") or "no content type"
            if "json" in kind:
                text = "a whole answer in JSON came although a stream was asked for: this endpoint does not stream"
            else:
                text = f"{kind} came instead of a stream of events: is this the API, or a web page or a proxy's?"
            raise ProbeFailed("first_token", text, status=200)
        if not self.chunks:
            raise ProbeFailed("first_token", "the stream ended without any text")
        if not self.done and not self.told.finished:
            raise ProbeFailed("gaps", f"the stream ended half-way, before [DONE]{self._so_far()}")

    def _so_far(self) -> str:
        if self.chunks:
            return f" after {len(self.chunks)} events with text, before the stream's end"
        return " before the headers were complete" if not self.http.has_headers else ""

    def _take(self, data: bytes, now: int) -> None:
        try:
            self.http.feed(data)
        except ValueError as error:
            raise ProbeFailed("ttfb", f"what came is not HTTP ({error}): {data[:60]!r}") from None
        body = self.http.take()
        if not self.streams:
            self.body += body
            return
        for event in self.events.feed(body):
            self._event(event, now)

    def _event(self, raw: bytes, now: int) -> None:
        if raw == b"[DONE]":
            self.done = True
            return
        event = _as_object(raw, self.phase)
        if "error" in event:
            raise ProbeFailed(self.phase, f"the server ended the stream with an error: {error_text(raw)}")
        before = self.told.output_tokens
        self.told.read(event)
        text, answer = text_of(event)
        if text:
            count = self.told.output_tokens
            tokens = count - (before or 0) if count is not None and count > (before or 0) else None
            self.chunks.append(Chunk(now, tokens, answer))
        self.told.finished = self.told.finished or finish_of(event)


def _as_object(raw: bytes, phase: str) -> dict[str, Any]:
    try:
        event = json.loads(raw)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ProbeFailed(phase, f"an event is no JSON object: {raw[:80]!r}")
    return event


def _sample(connection: Connection, answer: _Answer, ask: Ask, began: int) -> Sample:
    http, told, link = answer.http, answer.told, connection.link()
    account = told.account
    if account is None and "total_ms" in (stages := server_timing(http.headers.get("server-timing", ""))):
        account = stages
    first_byte_ms = (answer.first_byte_ns - began) / NS_PER_MS
    return Sample(
        request_id=http.headers.get("x-request-id", ask.request_id)[:200],
        began_ns=began,
        resolved_ns=began,
        connected_ns=began,
        secured_ns=began,
        sent_ns=answer.sent_ns,
        first_byte_ns=answer.first_byte_ns,
        chunks=tuple(answer.chunks),
        ended_ns=answer.ended_ns,
        reused=connection.used,
        keep_alive=http.keep_alive,
        http_version=http.http_version,
        prompt_tokens=told.prompt_tokens or len(ask.prompt.split()),
        output_tokens=told.output_tokens,
        cached_tokens=told.cached_tokens,
        account=account or {},
        run_queue_ms=told.run_queue_ms,
        proxy_ms=proxy_ms(http.headers, first_byte_ms, link.rtt_ms or 0.0),
        link=link,
        tls=connection.tls,
    )
