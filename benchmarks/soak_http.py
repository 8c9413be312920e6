"""Hundreds of streams at once for minutes, some of whose callers leave and some of whose requests are no good: nothing
may be lost, and nothing may grow.

    python benchmarks/soak_http.py --streams 500 --seconds 600 --output benchmarks/results/soak_http.json

Starts ``firsttoken serve random:tiny-llama`` on the CPU and keeps ``--streams`` callers busy, each with one request
after the other: answers of 8 to 128 tokens, of which one in four is left midway or before it begins, and one in twenty
that is malformed in one of many ways. Then all is counted: each call against what it should have got, callers' counts
against the server's own, gauges against 0, and both processes' memory over the time after ``--warm-up`` (when what is
kept of the last five minutes is full) against a straight line. Exit code 1 when a
check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.overload_http import MODEL, Address, Answer, ask, at_rest, left_over, metrics, server
from firsttoken.cli.report import header
from firsttoken.observability.percentiles import percentiles

# All streams are to run at once. By default prompts are let in as far as running streams stay quick, so on a slow
# machine half of them would wait; and a step takes some 350 tokens of prompts at most, so these are short beside the
# answers.
TARGETS = """\
[class.p2]
itl_p99 = "60s"
"""
PROMPTS, ANSWERS = (4, 16, 64), (8, 64, 128)  # tokens
LEAVE, MALFORMED = 0.25, 0.05
LOOK_S = 2.0
# Steps and ended requests are kept for five minutes, and it takes a minute or two until as many end as begin: until
# then, what is kept of them grows.
FILLED_S = 400.0
# How much a process may grow over the time that is looked at, as a part of what it has.
MOST_GROWTH = 0.01
# A machine that does other things, too, may take minutes for as many answers at once: slow is not lost.
PATIENCE_S = 300.0
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


def _sized(body: bytes) -> bytes:
    return _POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)


# What is sent in place of a request, and the statuses with which it may be answered; none where the caller says nothing
# that could be answered.
BAD: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "no JSON": (_sized(b'{"prompt": [1, 2'), (400,)),
    "no UTF-8": (_sized(b'{"prompt": "\xff"}'), (400,)),
    "unknown field": (_sized(b'{"prompt": [1], "nonsense": 1}'), (400,)),
    "out of range": (_sized(b'{"prompt": [1], "temperature": -1, "stream": true}'), (400,)),
    "unknown token": (_sized(b'{"prompt": [99999999]}'), (400,)),
    "another model": (_sized(b'{"prompt": [1], "model": "none"}'), (404,)),
    "too long": (_sized(b'{"prompt": [' + b"1, " * 400_000 + b"1]}"), (400,)),
    "unknown path": (b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", (404,)),
    "wrong method": (b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", (405,)),
    "no HTTP": (bytes(range(256)), (400,)),
    "endless header": (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, (431,)),
    "half a body": (_POST + b'content-length: 100\r\n\r\n{"prompt"', ()),
    "half a head": (b"POST /v1/compl", ()),
    "nothing": (b"", ()),
}


@dataclass(slots=True)
class Tally:
    """What callers got. ``lost``: a line for each call that got something else than it should."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    tokens: int = 0

    def note(self, answer: Answer, wanted: int) -> None:
        self.tokens += len(answer.tokens)
        if answer.left:
            self.outcomes["left"] += 1
        elif answer.complete and answer.status == 200 and len(answer.tokens) == wanted and answer.finish == "length":
            self.outcomes["whole"] += 1
            self.ttft_ms.append(answer.ttft_ms or 0.0)
        else:
            self.outcomes["lost"] += 1
            self.lost.append(
                f"status {answer.status}, {len(answer.tokens)} of {wanted} tokens, {answer.finish!r}, {answer.code!r}"
            )


async def _bad(to: Address, kind: str, tally: Tally) -> None:
    """Send what is malformed, and see that it is answered as it should be, and the connection closed."""
    raw, statuses = BAD[kind]
    reader, writer = await asyncio.open_connection("127.0.0.1", to.port)
    said = b""
    try:
        writer.write(raw)
        if statuses:
            async with asyncio.timeout(PATIENCE_S):
                said = await reader.read()
    except (ConnectionError, TimeoutError) as error:
        said = said or repr(error).encode()
    finally:
        writer.close()
    fits = not statuses or any(said.startswith(b"HTTP/1.1 %d " % status) for status in statuses)
    # A server that closes while more is on the way resets, and its answer may be lost to who still writes.
    fits = fits or (len(raw) > 65536 and said.startswith(b"ConnectionReset"))
    tally.outcomes["malformed" if fits else "lost"] += 1
    if not fits:
        tally.lost.append(f"{kind}: {said[:100]!r}")


async def _caller(to: Address, number: int, seconds: float, tally: Tally) -> None:
    rng = random.Random(number)
    until = time.monotonic() + seconds
    await asyncio.sleep(rng.random() * min(2.0, seconds / 10))
    while time.monotonic() < until:
        if rng.random() < MALFORMED:
            await _bad(to, rng.choice(list(BAD)), tally)
            continue
        wanted = rng.choice(ANSWERS)
        prompt = [rng.randrange(3, 200) for _ in range(rng.choice(PROMPTS))]
        body = {"prompt": prompt, "max_tokens": wanted, "ignore_eos": True, "temperature": rng.choice((0, 1))}
        leave = rng.choice((0, 1, wanted // 2)) if rng.random() < LEAVE else None
        tally.note(await ask(to, body, leave_after=leave, patience_s=PATIENCE_S), wanted)


@dataclass(slots=True)
class Watch:
    """Looks at the server now and then: [seconds, MiB of the API process, MiB of the engine], what has a row in the
    engine, and what is there in all."""

    looks: list[tuple[float, float, float]] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)

    began: float = field(default_factory=time.monotonic)

    async def watch(self, to: Address) -> None:
        while True:
            await self.look(to)
            await asyncio.sleep(LOOK_S)

    async def look(self, to: Address) -> None:
        found = await metrics(to)
        api = found["process_resident_memory_bytes"] / 2**20
        engine = found.get("firsttoken_engine_process_resident_memory_bytes", 0.0) / 2**20  # it may have none
        self.looks.append((time.monotonic() - self.began, api, engine))
        self.running.append(found["firsttoken_requests_running"])
        self.held.append(self.running[-1] + found["firsttoken_requests_waiting"])

    def growth(self, column: int, warm_up: float) -> dict[str, float]:
        """The straight line through the memory of one process after the warm-up: where it begins, and by what part it
        rises until the end."""
        looks = [(look[0], look[column]) for look in self.looks if look[0] >= warm_up]
        count = len(looks)
        mean_at = sum(at for at, _ in looks) / count
        mean = sum(value for _, value in looks) / count
        spread = sum((at - mean_at) ** 2 for at, _ in looks)
        slope = sum((at - mean_at) * (value - mean) for at, value in looks) / spread if spread else 0.0
        begin = mean + slope * (looks[0][0] - mean_at)
        span = looks[-1][0] - looks[0][0]
        return {
            "begin_mib": begin,
            "slope_mib_per_minute": 60 * slope,
            "growth": slope * span / begin if begin else 0.0,
        }


def _ended(found: dict[str, float], *reasons: str) -> float:
    total = "firsttoken_requests_ended_total"
    return sum(
        value for name, value in found.items() if name.startswith(total) and any(f'"{one}"' in name for one in reasons)
    )


async def soak(to: Address, streams: int, seconds: float, warm_up: float) -> dict[str, Any]:
    tally, watch = Tally(), Watch()
    watching = asyncio.create_task(watch.watch(to))
    try:
        await asyncio.gather(*(_caller(to, number, seconds, tally) for number in range(streams)))
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    await watch.look(to)  # at least once
    found = await at_rest(to)
    memory = {name: watch.growth(column, warm_up) for name, column in (("api", 1), ("engine", 2))}
    whole, left = tally.outcomes["whole"], tally.outcomes["left"]
    finished, aborted = _ended(found, "finished"), _ended(found, "aborted")
    checks = {
        "lost": _check(tally.outcomes["lost"], 0),
        # Who leaves at the last moment may leave a finished one; who leaves at once may never have been heard.
        "whole but not finished": _check(whole - finished, 0),
        "finished or aborted, and no caller's": _check(finished + aborted - whole - left, 0),
        "failed": _check(_ended(found, "failed"), 0),
        **{f"{name} growth": _check(one["growth"], MOST_GROWTH) for name, one in memory.items()},
        **{name: _check(value, 0) for name, value in left_over(found).items()},
    }
    return {
        "streams": streams,
        "seconds": seconds,
        "warm_up_s": warm_up,
        "calls": {**tally.outcomes, "all": sum(tally.outcomes.values())},
        "server": {"finished": finished, "aborted": aborted, "refused": _ended(found, "refused")},
        "lost": tally.lost[:20],
        "tokens": tally.tokens,
        "running": percentiles(watch.running),
        "running or waiting": percentiles(watch.held),
        "ttft_ms": percentiles(tally.ttft_ms),
        "memory": memory,
        "memory_looks": [
            [round(value, 1) for value in look] for look in watch.looks[:: max(1, len(watch.looks) // 60)]
        ],
        "checks": checks,
        "pass": all(one["pass"] for one in checks.values()),
    }


def _check(value: float, most: float) -> dict[str, Any]:
    return {"value": value, "most": most, "pass": value <= most}


async def measure(streams: int, seconds: float, warm_up: float) -> dict[str, Any]:
    async with server(TARGETS, "--max-num-seqs", str(streams + 12), "--kv-memory", "64MiB") as (to, _):
        return await soak(to, streams, seconds, warm_up)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500, help="at once (default: 500)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of load (default: 600)")
    parser.add_argument(
        "--warm-up", type=float, help=f"seconds before memory is looked at (default: {FILLED_S:g}, or half)"
    )
    parser.add_argument("--output", type=Path, help="write the result here, too")
    options = parser.parse_args(arguments)
    warm_up = options.warm_up
    if warm_up is None:
        warm_up = FILLED_S if options.seconds >= 1.5 * FILLED_S else options.seconds / 2
    found = asyncio.run(measure(options.streams, options.seconds, warm_up))
    text = json.dumps({**header(device_name="cpu", model=MODEL), **found}, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0 if found["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
