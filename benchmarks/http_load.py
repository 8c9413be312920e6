"""What ``bench load URL`` itself takes, and how late it sees a token: many streams at once on one core.

    python benchmarks/http_load.py                              # a table
    python benchmarks/http_load.py --json                       # one object
    python benchmarks/http_load.py --client httpx2 --streams 64 # the same load by a client library, to compare

A server process on one core writes an event for each stream and step, and remembers when; the client, on another core,
has ``--streams`` requests open at once. ``late_ms`` is the client's stamp of a token less the instant before the server
wrote it: the way through the kernel, the client's waking up, and what it did meanwhile. ``spread``: each stream has
steps of its own, as with many engines. ``together``: all of them step at once, as in a batch of one engine, so that the
last of them is read after all others; what the server takes to write them one by one is told beside it
(``writing_ms``) and is no part of it.

``skew_ms`` is what a figure is off by: the client's gap between two tokens less the server's. ``cpu_us_per_token`` is
all CPU time of the client process over the tokens it got; ``cpu_share`` of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import uvloop

from firsttoken.bench.arrivals import Arrival
from firsttoken.bench.http.overhead import Overhead, allow_open_files, undisturbed
from firsttoken.bench.http.server import Server, find_server
from firsttoken.bench.http.target import Target
from firsttoken.cli.report import cpu_name, header
from firsttoken.core.clock import NS_PER_MS, NS_PER_S, now_ns
from firsttoken.observability.percentiles import percentiles

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
# As long as a chunk of a completion of ours with its usage.
FRAME = (
    b'data: {"id":"cmpl-487da1410a0241ea6ef4142e","object":"text_completion","created":1796054115,"model":"m",'
    b'"service_tier":"default","choices":[{"index":0,"text":" x","logprobs":null,"finish_reason":%b}],"usage":'
    b'{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
)
Ask = Callable[[int, int], Awaitable[list[int]]]
"""(number of the stream, tokens) -> instants of its tokens."""


# --------------------------------------------------------------------- the server


class Steps:
    """All streams of the server. ``written`` are the instants before each write, by the number of the stream."""

    def __init__(self, step_s: float, together: bool) -> None:
        self.written: dict[int, list[int]] = {}
        self._step_s = step_s
        self._together = together
        self._streams: list[tuple[asyncio.Transport, int, int]] = []
        self._began = asyncio.get_running_loop().time()

    def begin(self, transport: asyncio.Transport, number: int, tokens: int) -> None:
        transport.write(HEAD)
        self.written[number] = []
        loop = asyncio.get_running_loop()
        # To the next common step, or to one at a place of its own (the golden ratio spreads numbers evenly).
        passed = (loop.time() - self._began) / self._step_s
        phase = 0.0 if self._together else number * 0.6180339887 % 1.0
        at = self._began + self._step_s * (int(passed) + 1 + phase)
        loop.call_at(at, self._write, transport, number, tokens, 1, at)

    def _write(self, transport: asyncio.Transport, number: int, tokens: int, count: int, at: float) -> None:
        last = count == tokens
        event = FRAME % (b'"length"' if last else b"null", count, count + 1)
        end = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" if last else b""
        self.written[number].append(now_ns())
        transport.write(b"%x\r\n%b\r\n%b" % (len(event), event, end))
        if not last:
            at += self._step_s
            asyncio.get_running_loop().call_at(at, self._write, transport, number, tokens, count + 1, at)


class ServerProtocol(asyncio.Protocol):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._read = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._read += data
        head, mark, body = self._read.partition(b"\r\n\r\n")
        if not mark:
            return
        if head.startswith(b"GET"):
            answer = json.dumps(self._steps.written).encode()
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )
        else:
            try:
                fields = json.loads(body)
            except ValueError:
                return  # the rest is to come
            prompt = fields["prompt"]
            self._steps.begin(self._transport, prompt if isinstance(prompt, int) else prompt[0], fields["max_tokens"])
        self._read = b""


def serve(step_ms: float, together: bool) -> int:
    async def go() -> None:
        loop = asyncio.get_running_loop()
        steps, stop = Steps(step_ms / 1000, together), asyncio.Event()
        server = await loop.create_server(lambda: ServerProtocol(steps), "127.0.0.1", 0, backlog=4096)
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        gc.collect()
        gc.disable()
        print(server.sockets[0].getsockname()[1], flush=True)
        await stop.wait()

    allow_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(go())
    return 0


# --------------------------------------------------------------------- the clients


async def own_client(port: int, streams: int) -> tuple[Server, Ask]:
    target = Target.parse(f"http://127.0.0.1:{port}")
    server = await find_server(target, model="m", chat=False, text=False, api_key=None, timeout_s=120)
    await server.pool.open(streams)

    async def ask(number: int, tokens: int) -> list[int]:
        found = await server.ask(server.encode([number], tokens), Arrival(0.0, 1, tokens))
        if found.error is not None:
            raise RuntimeError(found.error)
        return [at for at, _ in found.arrivals]

    return server, ask


def httpx2_client(port: int, streams: int) -> Ask:
    import httpx2

    client = httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=120, limits=httpx2.Limits(max_connections=streams)
    )

    async def ask(number: int, tokens: int) -> list[int]:
        body = {"prompt": [number], "max_tokens": tokens, "stream": True}
        stamps = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    stamps.append(now_ns())
                    json.loads(line[6:])
        return stamps

    return ask


async def measure(options: argparse.Namespace, port: int) -> dict[str, Any]:
    server, own = await own_client(port, options.streams if options.client == "own" else 1)
    ask = own if options.client == "own" else httpx2_client(port, options.streams)
    tokens = max(2, round(options.seconds * 1000 / options.step_ms))
    with undisturbed():
        await asyncio.gather(*(ask(10_000 + number, 2) for number in range(options.streams)))  # warm
        overhead = Overhead(server.pool)
        overhead.start()
        began, cpu = time.monotonic_ns(), time.process_time_ns()
        stamps = await asyncio.gather(*(ask(number, tokens) for number in range(options.streams)))
        wall, cpu = time.monotonic_ns() - began, time.process_time_ns() - cpu
        client = overhead.figures(0, 0)
    server.pool.close()
    written = await asyncio.to_thread(read_written, port)
    return {
        **figures(stamps, [written[number] for number in range(options.streams)], options.step_ms),
        "tokens_per_s": options.streams * tokens / (wall / NS_PER_S),
        "cpu_share": cpu / wall,
        "cpu_us_per_token": cpu / 1e3 / (options.streams * tokens),
        "loop_lag_ms": client["loop_lag_ms"],
    }


def read_written(port: int) -> dict[int, list[int]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
        return {int(number): found for number, found in json.load(answer).items()}


def figures(stamps: list[list[int]], written: list[list[int]], step_ms: float) -> dict[str, Any]:
    late: list[float] = []
    skew: list[float] = []
    for came, wrote in zip(stamps, written, strict=True):
        late += [(one - other) / NS_PER_MS for one, other in zip(came, wrote, strict=True)]
        pairs = zip(pairwise(came), pairwise(wrote), strict=True)
        skew += [abs((b - a) - (d - c)) / NS_PER_MS for (a, b), (c, d) in pairs]
    writing = [(max(step) - min(step)) / NS_PER_MS for step in steps_of(written, step_ms)]
    return {
        "late_ms": percentiles(late),
        "skew_ms": percentiles(skew),
        "mean_gap_off": mean_gap(stamps) / mean_gap(written) - 1,
        "writing_ms": percentiles(writing),
    }


def steps_of(written: list[list[int]], step_ms: float) -> list[list[int]]:
    """The instants of writing by the server's steps, the first of which began with the first of them."""
    steps: dict[int, list[int]] = {}
    began = min(one[0] for one in written)
    for one in written:
        for at in one:
            steps.setdefault(round((at - began) / NS_PER_MS / step_ms), []).append(at)
    return list(steps.values())


def mean_gap(instants: list[list[int]]) -> float:
    gaps = [(one[-1] - one[0]) / (len(one) - 1) for one in instants]
    return sum(gaps) / len(gaps)


def run_one(options: argparse.Namespace, how: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--serve", how, "--step-ms", str(options.step_ms)]
    cores = sorted(os.sched_getaffinity(0))
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        os.sched_setaffinity(server.pid, {cores[-1]})
        os.sched_setaffinity(0, {cores[0]})
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(measure(options, port))
    finally:
        os.sched_setaffinity(0, cores)
        server.terminate()
        server.wait(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--client", choices=("own", "httpx2"), default="own")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=50.0, help="between a stream's tokens")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of an answer")
    parser.add_argument("--serve", choices=("spread", "together"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.step_ms, options.serve == "together")
    allow_open_files()
    load_before = os.getloadavg()[0]
    result = {how: run_one(options, how) for how in ("spread", "together")}
    if options.json:
        setup = {"client": options.client, "streams": options.streams, "step_ms": options.step_ms}
        print(json.dumps({**header(), "cpu": cpu_name(), "load_before": load_before, **setup, **result}))
        return 0
    for how, found in result.items():
        print(
            f"{how:9} {found['tokens_per_s']:8,.0f} tokens/s, {found['cpu_us_per_token']:5.1f} us each, "
            f"{found['cpu_share']:4.0%} of a core; mean gap off by {found['mean_gap_off']:+.3%}"
        )
        for name in ("late_ms", "skew_ms", "writing_ms", "loop_lag_ms"):
            print(f"  {name:12}" + "  ".join(f"{key} {found[name][key]:7.2f}" for key in ("p50", "p90", "p99", "max")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
