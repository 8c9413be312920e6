"""What observing costs: servers with everything on, with the defaults, and with nothing, side by side.

    python -m benchmarks.observability_cost                     # a tiny random model: little but HTTP and observing
    python -m benchmarks.observability_cost --model smollm2 --callers 4 --pairs 20

``bare`` is `firsttoken serve` whose front end observes nothing at all (no series, no records of requests and steps, no
flight recorder); ``default`` is what everybody runs; ``everything`` exports traces and metrics to a receiver on this
machine, is scraped every 5 s, and gives each answer its account. The three run at once and are asked in turns, each
with the same requests, in an order that changes every round.

``tokens_per_s_ratio`` is a server's rate over that of ``bare`` in the same round: the mean, and its confidence interval
of 95 % (t of the logarithms). ``cpu_us_per_request`` is the CPU time of a server's processes over its requests, which a
busy machine disturbs less. ``exporting`` is what one request takes by itself, at the median: for its series
(``series_us``) and its account (``offer_us``) on the event loop, to hand it over in a thread (``thread_us``), and for
its spans in the process that exports them (``process_us``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.integrations import free_port, wait_until_ready
from firsttoken.cli import report
from firsttoken.core.timeline import Mark

SERVERS = ("bare", "default", "everything")
# Prometheus scrapes every 15 s by default, and OpenTelemetry exports every 60.
METRICS_EVERY_S = 5.0
# Student's t of 95 %, two-sided, by degrees of freedom; above them it is that of the normal distribution, nearly.
_T95 = {5: 2.57, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04, 60: 2.0}


# --------------------------------------------------------------------- the servers


def serve_bare(options: list[str]) -> int:
    """``firsttoken serve`` whose front end observes nothing."""
    from firsttoken.cli.main import main as firsttoken
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.observability.flight import FlightRecorder
    from firsttoken.observability.metrics import FrontendMetrics
    from firsttoken.server.recorder import Recorder

    def nothing(*_: Any, **__: Any) -> None:
        return None

    class Unobserved:
        def __getattr__(self, name: str) -> Any:
            return nothing

    for owner, names in ((Recorder, ["keep"]), (AsyncLLM, ["_on_steps"]), (FlightRecorder, ["submitted", "left"])):
        for name in names:
            getattr(owner, name)  # it is there to be replaced
            setattr(owner, name, nothing)
    setattr(FrontendMetrics, "of", lambda *_: Unobserved())  # noqa: B010
    return firsttoken(["serve", *options])


@contextmanager
def server(kind: str, model: str, collector: str) -> Iterator[tuple[str, int]]:
    """Its address and process id."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = [model, "--port", str(port), "--threads", "1", "--log-level", "warning"]
    if kind == "bare":
        command = [sys.executable, "-m", "benchmarks.observability_cost", "--bare", *options]
    else:
        command = [sys.executable, "-m", "firsttoken.cli.main", "serve", *options]
    environ = os.environ | {"OTEL_METRIC_EXPORT_INTERVAL": str(int(METRICS_EVERY_S * 1000))}
    if kind == "everything":
        command += ["--otlp-endpoint", collector]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environ)
    try:
        wait_until_ready(url, process)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def receive(port: int) -> None:
    """A collector that takes everything and looks at nothing, as a process of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


@contextmanager
def collector() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.observability_cost", "--receive", str(port)])
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def cpu_ns(pid: int) -> int:
    """CPU time of a process and its children's, in ns."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
        for child in (task / "children").read_text().split():
            total += cpu_ns(int(child))
    return total


# ------------------------------------------------------------------------ the load


async def _ask(port: int, body: bytes, requests: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    for _ in range(requests):
        writer.write(head + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"a request was answered with {status.decode().strip()}")
        await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


async def _load(port: int, body: bytes, callers: int, each: int) -> None:
    await asyncio.gather(*(_ask(port, body, each) for _ in range(callers)))


def burst(url: str, options: argparse.Namespace, *, account: bool) -> float:
    """Tokens a second of one server."""
    prompt = [1 + i % 200 for i in range(options.input)]
    asked = {"prompt": prompt, "max_tokens": options.output, "ignore_eos": True, "stream": True, "temperature": 0}
    body = json.dumps(asked | ({"timings": True} if account else {})).encode()
    each = max(options.requests // options.callers, 1)
    began = time.perf_counter()
    asyncio.run(_load(int(url.rpartition(":")[2]), body, options.callers, each))
    tokens: int = options.callers * each * options.output
    return tokens / (time.perf_counter() - began)


def _scrape(url: str, ending: threading.Event) -> None:
    while not ending.wait(METRICS_EVERY_S):
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:  # noqa: S310  # our own address
            reply.read()


def compare(options: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {kind: [] for kind in SERVERS}
    spent = dict.fromkeys(SERVERS, 0)
    ending = threading.Event()
    with ExitStack() as stack:
        sink = stack.enter_context(collector())
        running = {kind: stack.enter_context(server(kind, options.model, sink)) for kind in SERVERS}
        scraping = threading.Thread(target=_scrape, args=(running["everything"][0], ending), daemon=True)
        scraping.start()
        for round_ in range(options.pairs + 1):
            turn = round_ % len(SERVERS)
            for kind in (*SERVERS[turn:], *SERVERS[:turn]):
                url, pid = running[kind]
                before = cpu_ns(pid)
                rate = burst(url, options, account=kind == "everything")
                # What is left to do for these requests is theirs, too.
                time.sleep(options.rest_s)
                if round_:  # the first warms up
                    rates[kind].append(rate)
                    spent[kind] += cpu_ns(pid) - before
        ending.set()
        scraping.join()
    asked = options.pairs * options.callers * max(options.requests // options.callers, 1)
    told: dict[str, Any] = {}
    for kind in SERVERS:
        told[kind] = {
            "tokens_per_s_median": statistics.median(rates[kind]),
            "cpu_us_per_request": spent[kind] / asked / 1e3,
        }
        if kind != "bare":
            told[kind]["tokens_per_s_ratio"] = ratio(rates[kind], rates["bare"])
            told[kind]["cpu_ratio"] = spent[kind] / spent["bare"]
    return told


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """The mean of the rounds' ratios and the bounds of its confidence interval of 95 %."""
    logs = [math.log(one / other) for one, other in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(logs)
    t = next((value for free, value in sorted(_T95.items(), reverse=True) if len(logs) - 1 >= free), 12.7)
    half = t * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return {"mean": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}


# ----------------------------------------------------------------- exporting alone


def exporting_alone(tokens: int, count: int = 2000) -> dict[str, float]:
    """Microseconds of the serving process for each request that is exported."""
    from prometheus_client import CollectorRegistry

    from firsttoken.core.timeline import Timeline
    from firsttoken.observability.account import timings
    from firsttoken.observability.otlp.export import OtlpExport, _record
    from firsttoken.observability.otlp.settings import OtlpSettings
    from firsttoken.observability.otlp.wire import ENCODER, Requests
    from firsttoken.observability.recent import EndedRequest
    from firsttoken.observability.request_metrics import RequestMetrics

    marks = [mark for mark in Mark if mark not in (Mark.PREEMPTED, Mark.RESTORING, Mark.FAILED)]
    stamps = [(int(mark), 1_000_000 * index) for index, mark in enumerate(marks)]
    times = array("q", [6_000_000 + 10_000 * index for index in range(tokens)])

    def ended() -> EndedRequest:
        account = partial(timings, Timeline(stamps), token_times=times)
        return EndedRequest(
            id="req-1", route="/v1/completions", model="m", outcome="finished", received_ns=0, received_unix_ns=0,
            ended_ns=stamps[-1][1], make_account=account, timeline=tuple(stamps), engine_ids=(1,), service_class="p2",
            prompt_tokens=64, output_tokens=tokens, status=200, ttft_ns=6_000_000, token_times=times,
        )  # fmt: skip

    requests = [ended() for _ in range(count)]
    export = OtlpExport(OtlpSettings("http", "http", "http://x"), CollectorRegistry(), queue_requests=count)
    metrics = RequestMetrics()
    results = {}
    for name, step in (
        ("series_us", metrics.observe),
        ("offer_us", export.offer),
        ("thread_us", lambda one: ENCODER.encode(Requests([_record(one)]))),
    ):
        took = []
        for one in requests:
            began = time.perf_counter_ns()
            step(one)
            took.append(time.perf_counter_ns() - began)
        results[name] = statistics.median(took) / 1e3
    results["process_us"] = _spans_us(_record(requests[0]))
    return results


def _spans_us(record: Any, count: int = 500) -> float:
    """What spans of a request take to be made and encoded, in the process that exports."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import TracerProvider

    from firsttoken.observability.otlp.process import Collected
    from firsttoken.observability.otlp.spans import record_request

    collected = Collected()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(collected)
    tracer = provider.get_tracer("benchmark")
    took = []
    for _ in range(count):
        began = time.perf_counter_ns()
        record_request(tracer, record)
        encode_spans(collected.take()).SerializeToString()
        took.append(time.perf_counter_ns() - began)
    return statistics.median(took) / 1e3


def main() -> int:
    if sys.argv[1:2] == ["--bare"]:
        return serve_bare(sys.argv[2:])
    if sys.argv[1:2] == ["--receive"]:
        receive(int(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:tiny-llama")
    parser.add_argument("--pairs", type=int, default=30, help="rounds that count (default: 30)")
    parser.add_argument("--callers", type=int, default=8, help="at once (default: 8)")
    parser.add_argument("--requests", type=int, default=64, help="of a burst (default: 64)")
    parser.add_argument("--input", type=int, default=64, metavar="TOKENS", help="prompt tokens (default: 64)")
    parser.add_argument("--output", type=int, default=64, metavar="TOKENS", help="tokens of an answer (default: 64)")
    parser.add_argument("--rest-s", type=float, default=0.3, help="after each burst (default: 0.3)")
    parser.add_argument("--output-json", type=Path, help="write the result here, too")
    options = parser.parse_args()
    asked = {name: getattr(options, name) for name in ("pairs", "callers", "requests", "input", "output")}
    result = {
        **report.header(model=options.model, cpu=report.cpu_name(), **asked),
        "servers": compare(options),
        "exporting": exporting_alone(options.output),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output_json is not None:
        options.output_json.parent.mkdir(parents=True, exist_ok=True)
        options.output_json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
