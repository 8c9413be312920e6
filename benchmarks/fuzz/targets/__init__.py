"""What is fuzzed, by name. A target takes any bytes; whatever it raises is a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.fuzz.targets import answers, files, http, other_apis, requests, text, wire


@dataclass(frozen=True, slots=True)
class Target:
    """``max_bytes`` bounds inputs, ``words`` are what they are often made of."""

    run: Callable[[bytes], None]
    max_bytes: int = 512
    words: tuple[bytes, ...] = ()


_HTTP = (
    *(
        b"GET / HTTP/1.1\r\n",
        b"POST /a HTTP/1.1\r\n",
        b"HEAD / HTTP/1.0\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n",
        b"Host: x\r\n",
    ),
    *(b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n"),
    *(
        b"Connection: Upgrade\r\n",
        b"Expect: 100-continue\r\n",
        b"\r\n\r\n",
        b"3\r\nabc\r\n0\r\n\r\n",
        b"\r\n",
        b"%ff",
        b"?a=b",
    ),
)


_EVENTS = (b"data: ", b"data:", b"event: ", b"\r\n\r\n", b"\n\n", b"\r", b": ", b"[DONE]")

TARGETS = {
    "detokenizer": Target(text.detokenizer, 96),
    "stop": Target(text.stop_strings, 128),
    "tools": Target(answers.tools, 128),
    "messages": Target(text.messages),
    "request": Target(requests.request),
    "response": Target(other_apis.response),
    "message": Target(other_apis.message),
    "sse": Target(wire.written_events, 256),
    "events": Target(wire.read_events, 256, _EVENTS),
    "transport": Target(wire.transport, 1024),
    "http": Target(http.connection, 2048, _HTTP),
    "gguf": Target(files.gguf, 8192),
    "safetensors": Target(files.safetensors, 2048),
}
