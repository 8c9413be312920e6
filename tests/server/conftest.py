"""The server on the real front end and the scripted engine."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

import pytest

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.engine.stub import StubEngine
from firsttoken.frontend.async_engine import NO_RESTARTS
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.frontend.restarts import RestartPolicy
from firsttoken.server.app import build_app
from firsttoken.server.config import ServerConfig
from firsttoken.server.run import _Uvicorn, _uvicorn_config
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.pieces import CallArguments, CallStart, Content, Reasoning
from tests.support.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer
from tests.support.stub_process import Server

END = EOS
TEMPLATE = (
    "{% if shout %}SHOUT {% endif %}"
    "{% for m in messages %}<|bos|>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
    "{% if messages[0]['content'] == 'boom' %}{{ raise_exception('no boom here') }}{% endif %}"
    "{% if add_generation_prompt %}<|eot|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


# An answer that thinks, speaks and calls two tools.
PIECES = [
    Reasoning("Let me "),
    Reasoning("think."),
    Content("I'll ask"),
    Content(" twice."),
    CallStart(0, "call_a", "add"),
    CallArguments(0, '{"x":'),
    CallArguments(0, "1}"),
    CallStart(1, "call_b", "now"),
    CallArguments(1, "{}"),
]


def say(text: str | bytes):
    """A script: these bytes, then the end token."""
    raw = text.encode() if isinstance(text, str) else text
    return lambda request: [*raw, END]


def forever(request):
    return [ord("x")] * request.max_tokens


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self):
        return json.loads(self.body.decode("utf-8"), parse_constant=lambda word: pytest.fail(f"{word} in the body"))

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self) -> list:
        """The parsed data of all server-sent events; "[DONE]" as it is."""
        found = []
        for block in self.body.decode("utf-8").split("\n\n"):
            if block:
                assert block.startswith("data: "), block
                data = block.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
        return found

    @property
    def named_events(self) -> list[tuple[str, dict]]:
        """The name and the parsed data of all events, of a stream whose events have names."""
        found = []
        for block in self.body.decode("utf-8").split("\n\n"):
            if block:
                name, data = block.split("\n")
                assert name.startswith("event: "), block
                assert data.startswith("data: "), block
                found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
                assert found[-1][1]["type"] == found[-1][0]
        return found


class Exchange:
    """One request at the ASGI level; the client may leave at any time."""

    def __init__(self, app, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        self.reply = Reply()
        self.first_byte = asyncio.Event()
        self._body = body
        self._sent = False
        self._gone = asyncio.Event()
        self._done = asyncio.Event()
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path.partition("?")[0]),
            "raw_path": path.encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self):
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        waits = [asyncio.create_task(event.wait()) for event in (self._gone, self._done)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        return {"type": "http.disconnect"}

    async def _send(self, message) -> None:
        if message["type"] == "http.response.start":
            assert not self.reply.status
            self.reply.status = message["status"]
            self.reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        assert self.reply.status
        assert not self.reply.complete
        if message.get("body"):
            self.reply.chunks.append(message["body"])
            self.first_byte.set()
        if not message.get("more_body"):
            self.reply.complete = True
            self._done.set()


class Client:
    """Asks an app in this process."""

    def __init__(self, app, llm, engine) -> None:
        self.app, self.llm, self.engine = app, llm, engine

    def start(self, path: str, body=None, *, method: str = "POST", headers: dict[str, str] | None = None) -> Exchange:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return Exchange(self.app, method, path, raw, headers or {})

    async def post(self, path: str, body=None, **options) -> Reply:
        exchange = self.start(path, body, **options)
        await asyncio.wait_for(exchange.task, 10)
        return exchange.reply

    async def get(self, path: str, **options) -> Reply:
        return await self.post(path, method="GET", **options)

    async def chat(self, content="hi", **fields) -> Reply:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    async def complete(self, prompt="hi", **fields) -> Reply:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def quiet(self) -> None:
        """Wait until the engine's gauges are back to 0; fails after 2 s."""
        async with asyncio.timeout(2):
            while self.llm.stats.running or self.llm.stats.waiting or self.llm.stats.kv_used:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
def make_client(tokenizer):
    """``async with make_client(script, config, **stub options) as client``; a restarted engine takes 0.1 s."""

    @asynccontextmanager
    async def make(
        script=None,
        config: ServerConfig | None = None,
        *,
        generation=None,
        template=TEMPLATE,
        tokenizer=tokenizer,
        restarts: RestartPolicy = NO_RESTARTS,
        **options,
    ):
        def launch(**other) -> StubEngine:
            return StubEngine(script or say("Hello, world!"), **{"vocab_size": VOCAB_SIZE, **options, **other})

        engine = launch()
        llm = AsyncLLM(
            engine,
            tokenizer=tokenizer,
            chat_template=ChatTemplate(template) if template else None,
            generation_config=generation or GenerationConfig(eos_token_ids=(END,)),
            model_name="stub",
            launch_engine=lambda: launch(start_s=0.1),
            restarts=restarts,
        )
        await llm.start()
        try:
            yield Client(build_app(llm, config or ServerConfig()), llm, engine)
        finally:
            await llm.shutdown()

    return make


@pytest.fixture
async def client(make_client):
    async with make_client() as made:
        yield made


@pytest.fixture
def serve_http():
    """``async with serve_http(app) as url``: a real uvicorn on a free port, over TLS with a context for it, and with a
    limit of ``connections``."""

    @asynccontextmanager
    async def serve(app, tls=None, connections=None):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        server = _Uvicorn(_uvicorn_config(app, tls, connections))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task

    return serve


@pytest.fixture
def start():
    """``start(**config)`` gives a serving process."""
    servers: list[Server] = []

    def make(**config) -> Server:
        servers.append(Server(**config))
        return servers[-1]

    yield make
    for server in servers:
        server.end()
