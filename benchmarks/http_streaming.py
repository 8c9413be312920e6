"""What the API process adds to the first token when 64 callers stream at once, over real HTTP.

    python benchmarks/http_streaming.py            # a table
    python benchmarks/http_streaming.py --json     # one object

Three processes: the scripted engine (no model; a step takes ``--step-ms``), the API process as it serves, and this
one with the callers. What is *added* to the first token is the caller's time to it less the engine's part: from the
moment at which the request is in the socket to the engine to the stamp of the first token. The engine reads between
steps, so most of that part is the wait for the running step's end. Added are then, on the way in, the caller's write,
parsing, template, tokenising and the hand-over; on the way back the engine's message, detokenising, the write to the
caller and the caller's reading. ``in`` is the API process's share of the way in, by its own account from the first byte
read to the hand-over.

``alone``: one caller. ``steady``: each of 64 callers asks again after a pause of up to a step (so that arrivals do not
keep time with the steps): requests arrive one by one among the live streams. ``burst``: all 64 send at the same
instant; the median then waits for half of the others' parsing as well.

*Floor* is the same for a bare relay in the API process's place, which parses nothing and answers with bytes made
beforehand: the sockets between the three processes, their waking up, the engine's message and the callers' own time,
which no server can do without. What is added beyond it is the API's *own*.

The callers share the machine's cores with the API process: with two cores, what else runs on it shows at once in the
upper percentiles, and in the median when it takes a whole core.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from firsttoken.cli.report import header
from firsttoken.core.clock import NS_PER_MS, NS_PER_S, now_ns
from firsttoken.core.request import EngineRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.timeline import Mark
from firsttoken.observability.percentiles import percentiles
from firsttoken.transport.messages import FromEngine, RequestDelta, StepOutputs, Submit, ToEngine

if TYPE_CHECKING:
    from firsttoken.transport.channel import ClientEnd

CALLERS = 64
ALONE, ALONE_TOKENS = 100, 2
END = b"data: [DONE]\n\n"
TARGET_MS = 1.0


# --------------------------------------------------------------------- the server


def script(request: EngineRequest) -> list[int]:
    """What the engine says: letters, up to the length asked for."""
    return [ord("x")] * request.max_tokens


class HandOver:
    """The API process's end of the channel, which also notes when each request was in the socket: as a first stamp of
    its arrival, so that the account's way to the engine ends there and not when the engine comes to read."""

    def __init__(self, end: ClientEnd) -> None:
        self._end = end
        self._sent: dict[int, int] = {}

    def send(self, message: ToEngine) -> None:
        self._end.send(message)
        if isinstance(message, Submit):
            self._sent.update(dict.fromkeys((request.id for request in message.requests), now_ns()))

    def listen(self, on_message: Callable[[FromEngine], None], on_close: Callable[[], None]) -> None:
        def stamped(message: FromEngine) -> None:
            if self._sent and isinstance(message, StepOutputs):
                for delta in message.deltas:
                    if delta.stamps and delta.id in self._sent:
                        delta.stamps.insert(0, (Mark.ARRIVED, self._sent.pop(delta.id)))
            on_message(message)

        self._end.listen(stamped, on_close)

    def close(self) -> None:
        self._end.close()


def serve(step_ms: float, http: str = "uvicorn") -> int:
    """The API process, with the scripted engine in a child process of its own."""
    from firsttoken.engine.stub import StubProcess
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.server.config import ServerConfig
    from firsttoken.server.run import run_server
    from firsttoken.text.chat_template import ChatTemplate
    from tests.support.byte_tokenizer import GENERATION, TEMPLATE, VOCAB_SIZE, byte_tokenizer

    async def launch() -> AsyncLLM:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = byte_tokenizer(Path(folder))
        engine = StubProcess("http_streaming:script", vocab_size=VOCAB_SIZE, step_s=step_ms / 1000)
        engine.client = HandOver(engine.client)
        llm = AsyncLLM(
            engine,
            tokenizer=tokenizer,
            chat_template=ChatTemplate(TEMPLATE),
            generation_config=GENERATION,
            model_name="stub",
        )
        await llm.start()
        return llm

    return run_server(msgspec.convert({"port": 0, "server": http}, ServerConfig), launch)


# --------------------------------------------------------------------- the floor

PROMPT_TOKENS = 632  # of `request_bytes` with the byte tokenizer
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"data: " + b"-" * 200 + b"\n\n"  # as long as a chunk of a chat
MAX_TOKENS = re.compile(rb'"max_tokens": (\d+)')


class Relay:
    """What is left of an API process without HTTP, JSON and text: a request's id to the engine, an event to the caller
    for each token; first tokens first, one in a turn of the loop, as the front end has it."""

    def __init__(self, engine: ClientEnd) -> None:
        self._engine = engine
        self._callers: dict[int, tuple[asyncio.Transport, int]] = {}  # by id: whom to write to, when it was sent
        self._fresh: set[int] = set()
        self._stamps: dict[int, dict[int, int]] = {}
        self._later: deque[RequestDelta] = deque()
        self._turn_due = False
        self._ids = 0

    def listen(self, on_ready: Callable[[], None]) -> None:
        def on_message(message: FromEngine) -> None:
            if isinstance(message, StepOutputs):
                self._later.extend(sorted(message.deltas, key=lambda delta: delta.id not in self._fresh))
                if not self._turn_due:
                    self._turn()
            else:
                on_ready()

        self._engine.listen(on_message, lambda: None)

    def ask(self, transport: asyncio.Transport, data: bytes) -> None:
        found = MAX_TOKENS.search(data)
        assert found is not None
        self._ids += 1
        params = SamplingParams(max_tokens=int(found.group(1)))
        prompt = bytes(4 * PROMPT_TOKENS)
        request = EngineRequest(id=self._ids, prompt=prompt, params=params, seed=0, max_tokens=int(found.group(1)))
        self._engine.send(Submit([request]))
        self._callers[self._ids] = (transport, now_ns())
        self._fresh.add(self._ids)

    def _turn(self) -> None:
        if self._later:
            self._write(self._later.popleft())
        self._turn_due = bool(self._later)
        if self._turn_due:
            asyncio.get_running_loop().call_soon(self._turn)

    def _write(self, delta: RequestDelta) -> None:
        transport, sent_ns = self._callers[delta.id]
        head = HEAD if delta.id in self._fresh else b""
        self._fresh.discard(delta.id)
        stamps = self._stamps.setdefault(delta.id, {})
        stamps.update(delta.stamps)
        if delta.finish_reason is None:
            transport.write(head + b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            return
        del self._callers[delta.id], self._stamps[delta.id]
        engine_ms = (stamps[Mark.FIRST_TOKEN] - sent_ns) / NS_PER_MS
        account = {"parse_ms": 0, "template_ms": 0, "tokenize_ms": 0, "queue_ms": 0, "prefill_ms": engine_ms}
        last = json.dumps({"timings": account | {"transport": {"to_engine_ms": 0}}}).encode().replace(b" ", b"")
        last = b"data: %b\n\n%b" % (last, END)
        transport.write(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))


class RelayProtocol(asyncio.Protocol):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)  # to the socket at once

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._relay.ask(self._transport, data)  # a request is one write of the caller's, and comes as one


def serve_floor(step_ms: float) -> int:
    """The relay, with the same engine."""
    from firsttoken.engine.stub import StubProcess
    from tests.support.byte_tokenizer import VOCAB_SIZE

    engine = StubProcess("http_streaming:script", vocab_size=VOCAB_SIZE, step_s=step_ms / 1000)

    async def go() -> None:
        loop = asyncio.get_running_loop()
        ready, stop = asyncio.Event(), asyncio.Event()
        relay = Relay(engine.client)
        relay.listen(ready.set)
        await ready.wait()
        server = await loop.create_server(lambda: RelayProtocol(relay), "127.0.0.1", 0)
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        gc.collect()
        gc.freeze()
        print(f"relay on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await stop.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(go())
    engine.stop()
    return 0


# --------------------------------------------------------------------- the callers


class Sample(NamedTuple):
    """Of one request, in ms: the caller's time to first token, the engine's part of it, the API process's way in."""

    ttft: float
    engine: float
    inward: float


class Caller(asyncio.Protocol):
    """One keep-alive connection: sends a request, notes when the first event came and what the engine took."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._asked_ns = 0
        self._first_ns = 0
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        if not self._first_ns and b"data: " in data:
            self._first_ns = now_ns()
        self._received += data
        if self._received.endswith(END + b"\r\n0\r\n\r\n") and self._done is not None:
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes) -> Sample:
        assert self._transport is not None
        self._received.clear()
        self._first_ns = 0
        self._done = asyncio.get_running_loop().create_future()
        self._asked_ns = now_ns()
        self._transport.write(request)
        await self._done
        found = re.search(rb'"timings":(\{.*\})\}\n\ndata: \[DONE\]', bytes(self._received))
        if found is None:
            raise RuntimeError(f"an answer without timings: {bytes(self._received[:300])!r}")
        timings = json.loads(found.group(1))
        inward = sum(timings[f"{stage}_ms"] for stage in ("parse", "template", "tokenize"))
        inward += timings["transport"]["to_engine_ms"]
        return Sample(
            (self._first_ns - self._asked_ns) / NS_PER_MS, timings["queue_ms"] + timings["prefill_ms"], inward
        )


def request_bytes(tokens: int) -> bytes:
    """A chat request of about 600 characters."""
    messages = [{"role": "system", "content": "You are a helpful assistant. " * 10}]
    messages.append({"role": "user", "content": "Tell me something about streaming. " * 9})
    fields = {"messages": messages, "max_tokens": tokens, "stream": True, "timings": True, "temperature": 0}
    body = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def steady(callers: list[Caller], request: bytes, seconds: float, answer_s: float, step_s: float) -> list[Sample]:
    """Samples of closed loops, started evenly over one answer's time."""
    pauses = random.Random(0)
    samples: list[Sample] = []
    until = now_ns() + int(seconds * NS_PER_S)

    async def loop(caller: Caller, delay: float) -> None:
        await asyncio.sleep(delay)
        await caller.ask(request)  # the first one only brings the callers out of step
        while now_ns() < until:
            await asyncio.sleep(pauses.uniform(0, step_s))
            samples.append(await caller.ask(request))

    await asyncio.gather(*(loop(one, answer_s * rank / len(callers)) for rank, one in enumerate(callers)))
    return samples


async def burst(callers: list[Caller], request: bytes, rounds: int) -> list[Sample]:
    samples: list[Sample] = []
    for _ in range(rounds):
        samples += await asyncio.gather(*(caller.ask(request) for caller in callers))
        await asyncio.sleep(0.05)
    return samples


def summary(samples: list[Sample]) -> dict[str, Any]:
    return {
        "requests": len(samples),
        "ttft_ms": percentiles(sample.ttft for sample in samples),
        "engine_ms": percentiles(sample.engine for sample in samples),
        "added_ms": percentiles(sample.ttft - sample.engine for sample in samples),
        "in_ms": percentiles(sample.inward for sample in samples),
    }


async def measure(port: int, options: argparse.Namespace) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    callers = [(await loop.create_connection(Caller, "127.0.0.1", port))[1] for _ in range(options.callers)]
    request = request_bytes(options.tokens)
    await burst(callers, request, 1)  # warm
    short = request_bytes(ALONE_TOKENS)
    alone = [await callers[0].ask(short) for _ in range(ALONE)]
    step_s = options.step_ms / 1000
    flowing = await steady(callers, request, options.seconds, options.tokens * step_s, step_s)
    together = await burst(callers, request, options.rounds)
    return {"alone": summary(alone), "steady": summary(flowing), "burst": summary(together)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the API process, each with the floor beside it."""
    floor = run_one("floor", options)
    found = run_one("api", options)
    for name, figures in found.items():
        figures["floor_ms"] = floor[name]["added_ms"]
        figures["own_ms"] = {"p50": figures["added_ms"]["p50"] - figures["floor_ms"]["p50"]}  # of the medians
    return found


def run_one(what: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--serve", what, "--step-ms", str(options.step_ms)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    assert server.stdout is not None
    try:
        banner = server.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", banner)
        if found is None:
            raise RuntimeError(f"the server did not start: {banner!r}")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(measure(int(found.group(1)), options))
    finally:
        server.terminate()
        server.wait(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--callers", type=int, default=CALLERS)
    parser.add_argument("--tokens", type=int, default=64, help="length of an answer")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of the scripted engine's step")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of the steady part")
    parser.add_argument("--rounds", type=int, default=5, help="bursts")
    parser.add_argument("--serve", choices=("api", "granian", "floor"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve == "floor":
        return serve_floor(options.step_ms)
    if options.serve:
        return serve(options.step_ms, "granian" if options.serve == "granian" else "uvicorn")
    result = run(options)
    reached = result["steady"]["added_ms"]["p50"] < TARGET_MS
    if options.json:
        setup = {"callers": options.callers, "output": options.tokens, "step_ms": options.step_ms}
        print(json.dumps({**header(), **setup, **result, "target_ms": TARGET_MS, "reached": reached}))
    else:
        for name, found in result.items():
            for share in ("added_ms", "in_ms", "floor_ms"):
                figures = "  ".join(f"{key} {found[share][key]:6.2f}" for key in ("p50", "p90", "p99", "max"))
                print(f"{name:7} {found['requests']:5} requests, first token's {share:8}: {figures}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
