"""What the API process spends on a streamed token, and what a prompt of 5 MB costs it and everybody else.

    python benchmarks/http_costs.py --json

The API process serves the scripted engine, which is a process of its own and computes nothing, as `http_streaming` has
it. **Tokens**: callers stream answers of two lengths in turns, and the process's CPU time (of all its threads, with the
kernel's share) is read around each: the difference over the difference in tokens is what a token costs, without what a
request does. *Floor* is the same of `http_streaming`'s bare relay, which parses nothing and writes bytes made
beforehand: a message read, and a write to a socket for each stream. **Large prompts**: a process of its own sends them
one by one, in windows that alternate with quiet ones, while callers stream; gaps between a stream's pieces are
compared, and each refusal is timed from the first byte sent. Exit code 1 when the median of one is over its target.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from firsttoken.cli.report import header
from firsttoken.observability.percentiles import percentiles

SERVER = Path(__file__).with_name("http_streaming.py")
SHORT, LONG = 32, 288
FLOOR = "floor"
TOKEN_TARGET_US, REFUSAL_TARGET_MS = 40.0, 50.0
PROMPT_BYTES = 5_000_000
MESSAGES = [{"role": "user", "content": "Tell me something about streaming."}]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "completion": ("/v1/completions", {"prompt": "Tell me"}),
    "chat with a stop string": ("/v1/chat/completions", {"messages": MESSAGES, "stop": ["never"]}),
    "response": ("/v1/responses", {"input": MESSAGES, "store": False}),
    "message": ("/v1/messages", {"messages": MESSAGES}),
}


@contextmanager
def server(step_ms: float, what: str = "api") -> Iterator[tuple[int, int]]:
    """Port and pid of an API process on the scripted engine, or of the floor's relay."""
    command = [sys.executable, str(SERVER), "--serve", what, "--step-ms", str(step_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=SERVER.parent)
    assert process.stdout is not None
    try:
        banner = process.stdout.readline()
        port = int(banner.rpartition("127.0.0.1:")[2].split()[0].rstrip("/"))
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(10)


def cpu_ns(pid: int) -> int:
    """CPU time of a process's threads, without its children's."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


async def stream(port: int, form: str, tokens: int) -> list[float]:
    """When the pieces of one answer came, in seconds."""
    path, fields = FORMS[form]
    length = "max_output_tokens" if form == "response" else "max_tokens"
    body = json.dumps({**fields, length: tokens, "stream": True, "temperature": 0, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body))
    times, tail = [], b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        piece = await reader.read(1 << 16)
        if not piece:
            raise ConnectionError(f"the server closed the connection after {tail!r}")
        times.append(time.perf_counter())
        tail = (tail + piece)[-16:]
    writer.close()
    return times


# ------------------------------------------------------------------------- a token


class Place(NamedTuple):
    port: int
    pid: int
    form: str


async def token_cost(place: Place, streams: int) -> tuple[float, float]:
    """CPU time of a token in us, and of a request beside its tokens in ms."""
    spent = {}
    for tokens in (SHORT, LONG):
        before = cpu_ns(place.pid)
        await asyncio.gather(*(stream(place.port, place.form, tokens) for _ in range(streams)))
        spent[tokens] = (cpu_ns(place.pid) - before) / 1e3
    cost = (spent[LONG] - spent[SHORT]) / (streams * (LONG - SHORT))
    return cost, (spent[SHORT] / streams - SHORT * cost) / 1e3


async def token_costs(places: dict[str, Place], streams: int, rounds: int) -> dict[str, Any]:
    """`token_cost` of each, and as a multiple of the floor's in the same round. All have their turn in each round: what
    the machine does meanwhile meets them alike."""
    found = [{name: await token_cost(place, streams) for name, place in places.items()} for _ in range(rounds)]
    return {
        name: {
            "us_per_token": _spread([one[name][0] for one in found]),
            "of_floor": _spread([one[name][0] / one[FLOOR][0] for one in found]),
            "ms_per_request": _spread([one[name][1] for one in found]),
        }
        for name in places
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"p50": statistics.median(values), "min": min(values), "max": max(values)}


# ------------------------------------------------------------------- large prompts


def send_large(port: int, seconds: float) -> list[float]:
    """Send prompts that are too long for so many seconds; how long each refusal took, in ms."""
    body = b'{"messages":[{"role":"user","content":"' + b"x" * PROMPT_BYTES + b'"}],"stream":true}'
    took, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body)
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        took.append(1e3 * (time.perf_counter() - began))
        connection.close()
        if answer.status != 400 or error["code"] != "context_length_exceeded":
            raise SystemExit(f"a prompt that is too long was answered with {answer.status}: {error}")
        time.sleep(0.1)
    return took


async def refusals(port: int, streams: int, windows: int, step_ms: float) -> dict[str, Any]:
    """Gaps of streams in windows with large prompts and without, in turns, and how long refusals took."""
    gaps: dict[bool, list[float]] = {True: [], False: []}
    took: list[float] = []
    seconds = LONG * step_ms / 1e3
    for number in range(2 * windows):
        large = number % 2 == 1
        sender = None
        if large:
            command = [sys.executable, __file__, "--send", str(port), str(0.7 * seconds)]
            sender = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        for times in await asyncio.gather(*(stream(port, "chat", LONG) for _ in range(streams))):
            gaps[large] += [1e3 * (after - before) for before, after in pairwise(times)]
        if sender is not None:
            out, _ = await sender.communicate()
            took += json.loads(out)
    return {"refused": len(took), "refusal_ms": percentiles(took)} | {
        name: percentiles(gaps[large]) for name, large in (("gap_quiet_ms", False), ("gap_large_ms", True))
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with server(options.step_ms) as (port, pid), server(options.step_ms, FLOOR) as (floor_port, floor_pid):
        places = {form: Place(port, pid, form) for form in FORMS} | {FLOOR: Place(floor_port, floor_pid, "chat")}
        await asyncio.gather(*(stream(place.port, place.form, SHORT) for place in places.values()))  # what is done once
        tokens = await token_costs(places, options.streams, options.rounds)
    with server(options.step_ms) as (port, _):
        large = await refusals(port, options.others, options.rounds, options.step_ms)
    checks = {
        **{
            f"us of a token, {form}": (one["us_per_token"]["p50"], TOKEN_TARGET_US)
            for form, one in tokens.items()
            if form in FORMS
        },
        "ms of a refusal": (large["refusal_ms"]["p50"], REFUSAL_TARGET_MS),
    }
    return {
        "tokens": tokens,
        "large_prompt": large,
        "checks": {
            name: {"value": value, "target": most, "pass": value < most} for name, (value, most) in checks.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--streams", type=int, default=32, help="while a token's cost is measured (default: 32)")
    parser.add_argument("--others", type=int, default=8, help="streams beside large prompts (default: 8)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of the scripted engine's step")
    parser.add_argument("--send", nargs=2, metavar=("PORT", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        print(json.dumps(send_large(int(options.send[0]), float(options.send[1]))))
        return 0
    found = asyncio.run(measure(options))
    if options.json:
        setup = {"streams": options.streams, "others": options.others, "step_ms": options.step_ms}
        print(json.dumps({**header(device_name="cpu"), **setup, **found}))
    else:
        for name, check in found["checks"].items():
            print(f"{name:40} {check['value']:8.1f}  below {check['target']:g}  {'' if check['pass'] else 'MISSED'}")
        print(f"{'us of a token, floor':40} {found['tokens'][FLOOR]['us_per_token']['p50']:8.1f}")
        for name in ("gap_quiet_ms", "gap_large_ms"):
            figures = found["large_prompt"][name]
            print(f"{name:40} " + "  ".join(f"{key} {figures[key]:.1f}" for key in ("p50", "p99", "max")))
    return 0 if all(check["pass"] for check in found["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
