"""Whole answers over HTTP and TLS, each on a new connection: from the connect to the last byte, and its parts.

    python -m benchmarks.gpu.e2e_tls --quantization fp8 int4 --output e2e_tls.json [--target 387]
    python -m benchmarks.gpu.e2e_tls --model random:smollm2-135m --device cpu --quantization none --requests 10

A server of its own, with a certificate made for it, is asked one request after the other; prompts share no beginning.
``connect`` is TCP, ``handshake`` TLS, ``first_token`` from there to when the first token's bytes were read, ``gaps`` to
the last token, ``end`` to the last byte; they sum to ``e2e_ms``. ``server`` is what the server's account says of these
requests, ``captured`` the share of steps that ran as a graph. Exit code 1 when a request failed or ``--target`` (ms, of
the p99) was missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.integrations import free_port
from firsttoken.bench.http.answer import StreamedAnswer
from firsttoken.bench.http.dialect import Dialect
from firsttoken.bench.http.target import Target, request
from firsttoken.cli import report
from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.tls import client_context
from firsttoken.diagnose.connection import connect
from firsttoken.diagnose.endpoint import Endpoint
from firsttoken.diagnose.http_reader import HttpReader
from firsttoken.observability.percentiles import percentiles

START_S = 400
PREPARE_S = 90
TIMEOUT_S = 60.0
VOCABULARY = 30_000
# Requests in a row whose every step ran as a graph, before measuring; a device without graphs gets so many, too.
STEADY = 3
STAGES = ("parse_ms", "transport_ms", "queue_ms", "prefill_ms", "decode_ms", "detokenize_ms", "write_ms", "total_ms")


@dataclass(frozen=True)
class Server:
    model: str
    url: str
    context: ssl.SSLContext

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=10, context=self.context) as reply:  # noqa: S310  # our own
            body: bytes = reply.read()
        return body

    def steps(self) -> tuple[float, float]:
        """Steps so far, and those that ran as a graph."""
        found = {"firsttoken_steps_total": 0.0, "firsttoken_captured_steps_total": 0.0}
        for line in self.get("/metrics").decode().splitlines():
            name, _, value = line.partition(" ")
            if name in found:
                found[name] = float(value)
        steps, captured = found.values()
        return steps, captured


@dataclass(frozen=True)
class Answer:
    """Instants in ns; ``error`` is None for a whole answer."""

    id: str
    began: int
    connected: int
    secured: int
    tokens: tuple[int, ...]
    ended: int
    error: str | None

    @property
    def parts(self) -> dict[str, float]:
        ends = (self.connected, self.secured, self.tokens[0], self.tokens[-1], self.ended)
        names = ("connect", "handshake", "first_token", "gaps", "end")
        starts = (self.began, *ends)
        return {name: (end - start) / NS_PER_MS for name, start, end in zip(names, starts, ends, strict=False)}


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, of elliptic curves: the file and its key."""
    file, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(file)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True, timeout=30)
    key.chmod(0o600)
    return file, key


@contextmanager
def serving(options: argparse.Namespace, quantization: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        file, key = make_certificate(Path(folder))
        port = free_port()
        words = ["serve", options.model, "--port", str(port), "--ssl-certfile", str(file), "--ssl-keyfile", str(key)]
        words += ["--quantization", quantization, "--device", options.device, "--log-level", "warning"]
        words += ["--max-model-len", str(options.input + options.output_tokens + 16), "--flight-dir", "none"]
        words += ["--max-num-seqs", "8", *options.serve]
        process = subprocess.Popen([sys.executable, "-m", "firsttoken.cli.main", *words], stdout=subprocess.DEVNULL)
        server = Server(options.model, f"https://127.0.0.1:{port}", client_context(str(file)))
        try:
            wait_until_ready(server, process)
            yield server
        finally:
            process.terminate()
            process.wait(60)


def wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode}: its last words are above")
        try:
            server.get("/health/ready")
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"the server was not ready within {START_S} s")


def ask(server: Server, prompt: list[int], tokens: int, request_id: str) -> Answer:
    """One request on a connection of its own."""
    target = Target.parse(server.url)
    dialect = Dialect(server.model, continuous_usage_stats=False, return_token_ids=True)  # a chunk for each token
    head = target.head("POST", "/completions", None) + b"x-request-id: %b\r\n" % request_id.encode()
    sent = request(head, dialect.body(prompt, tokens))
    reader, answer = HttpReader(), StreamedAnswer()
    gc.disable()
    connection = connect(Endpoint.parse(server.url), server.context, TIMEOUT_S)
    try:
        connection.socket.sendall(sent)
        ended = now_ns()
        while not reader.complete and (data := connection.socket.recv(1 << 16)):
            ended = now_ns()
            reader.feed(data)
            answer.feed(ended, reader.take())
    finally:
        connection.close()
        gc.enable()
    arrivals, _ = answer.arrivals()
    stamps = tuple(at for at, count in arrivals for _ in range(count))
    error = answer.error
    if error is None and (reader.status != 200 or not answer.complete or len(stamps) != tokens):
        error = f"HTTP {reader.status}, {len(stamps)} tokens, finish_reason {answer.finish_reason}"
    return Answer(
        request_id, connection.resolved_ns, connection.connected_ns, connection.secured_ns, stamps, ended, error
    )


def prepare(server: Server, options: argparse.Namespace, rng: random.Random) -> float:
    """Ask until all steps run as graphs; gives the seconds that this took."""
    began, steady = time.monotonic(), 0
    while steady < STEADY and time.monotonic() - began < PREPARE_S:
        before = server.steps()
        answer = ask(server, draw(rng, options.input), options.output_tokens, f"prepare-{rng.getrandbits(32):x}")
        if answer.error is not None:
            raise SystemExit(f"a request failed: {answer.error}")
        time.sleep(0.5)  # the engine captures while it is idle
        steps, captured = (now - then for now, then in zip(server.steps(), before, strict=True))
        steady = steady + 1 if captured in (0.0, steps) and (captured or options.device == "cpu") else 0
    return time.monotonic() - began


def draw(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


def measure(options: argparse.Namespace, quantization: str) -> dict[str, Any]:
    rng = random.Random(options.seed)
    with serving(options, quantization) as server:
        prepared_s = prepare(server, options, rng)
        before = server.steps()
        prompts = [draw(rng, options.input) for _ in range(options.requests)]
        answers = [ask(server, p, options.output_tokens, f"e2e-{number}") for number, p in enumerate(prompts)]
        steps, captured = (now - then for now, then in zip(server.steps(), before, strict=True))
        whole = [one for one in answers if one.error is None]
        accounts = [json.loads(server.get(f"/v1/requests/{one.id}")) for one in whole]
        model = json.loads(server.get("/v1/models"))["data"][0]
    return {
        "quantization": quantization,
        "model_card": model,
        "prepared_s": round(prepared_s, 1),
        "captured": captured / steps if steps else None,
        "requests": {"sent": len(answers), "ok": len(whole)},
        "errors": sorted({one.error for one in answers if one.error is not None}),
        "e2e_ms": percentiles((one.ended - one.began) / NS_PER_MS for one in whole),
        "parts_ms": {
            name: percentiles(one.parts[name] for one in whole)
            for name in ("connect", "handshake", "first_token", "gaps", "end")
        },
        "itl_ms": percentiles((b - a) / NS_PER_MS for one in whole for a, b in pairwise(one.tokens)),
        "server": {stage: percentiles(_stage(one, stage) for one in accounts) for stage in STAGES},
    }


def _stage(account: dict[str, Any], stage: str) -> float:
    return float(account.get("timings", account).get(stage, 0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--quantization", nargs="+", default=["fp8", "int4"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=float, help="of e2e_ms.p99")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more options of serve, the last here")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    head = report.header(model=options.model, input=options.input, output=options.output_tokens, seed=options.seed)
    results = []
    for quantization in options.quantization:
        results.append(measure(options, quantization))
        print(json.dumps({key: results[-1][key] for key in ("quantization", "e2e_ms", "parts_ms")}), flush=True)
        if options.output:
            options.output.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
    failed = any(one["requests"]["ok"] < one["requests"]["sent"] for one in results)
    missed = options.target and any(one["e2e_ms"].get("p99", 1e9) > options.target for one in results)
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
