"""Sends a load to a server, in open or closed loop, and gives the figures."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from firsttoken.bench.arrivals import Arrival, endless
from firsttoken.bench.figures import latency_figures, target_figures, within_targets
from firsttoken.bench.http.overhead import Overhead, undisturbed
from firsttoken.bench.http.prompts import Prompts
from firsttoken.bench.http.server import Answered, Server
from firsttoken.bench.http.stop import Stop, until_done
from firsttoken.bench.shape import Load
from firsttoken.core.clock import NS_PER_MS
from firsttoken.observability.percentiles import percentiles

Say = Callable[[str], None]
# So many bytes of requests are made before the first is sent; those after them as soon as there is time.
_AHEAD_BYTES = 256 << 20
# A caller whose request failed waits a moment: a server that refuses all must not be asked as fast as it can refuse.
_AFTER_FAILURE_S = 0.01


@dataclass(frozen=True)
class _Run:
    """``late_ms`` is how much later than planned each request was sent."""

    requests: list[Answered]
    late_ms: list[float]
    wall_s: float


async def measure_http(server: Server, load: Load, prompts: str, say: Say = lambda text: None) -> dict[str, Any]:
    """The figures under their public names; those of no answer at all are {}. ``prompts`` seeds the prompts: a server
    may still have those of an earlier measurement in its cache.

    A load ends before its time on Ctrl-C and where the server is gone; ``stopped`` then says why, and the figures are
    those of the requests that have ended.
    """
    if load.concurrency is not None:
        await server.pool.open(load.concurrency)
    stop = Stop()
    with stop.on_interrupt():
        if load.warmup_s > 0:
            say(f"warming up for {load.warmup_s:g} s")
            unused = Overhead(server.pool)
            await _run(server, load, load.warmup_s, load.seed + 1, f"{prompts} warm-up", unused, stop)
            unused.stop()
        say(f"measuring for {load.seconds:g} s")
        with undisturbed():
            overhead = Overhead(server.pool)
            run = await _run(server, load, load.seconds, load.seed, prompts, overhead, stop)
            tokens = sum(one.tokens for one in run.requests)
            client = overhead.figures(sum(len(one.arrivals) for one in run.requests), tokens)
    answered = [one for one in run.requests if one.ok]
    good = sum(within_targets(one, load.target_ttft_ms, load.target_itl_ms) for one in answered)
    figures = latency_figures(answered)
    del figures["stages_ms"]  # the server's own, which it does not tell here
    return {
        "requests": {
            "sent": len(run.requests),
            "ok": len(answered),
            "failed": len(run.requests) - len(answered),
            "short": sum(one.short for one in answered),
            "reasons": dict(Counter(one.error for one in run.requests if one.error is not None)),
        },
        **figures,
        "requests_per_s": len(answered) / run.wall_s,
        "output_tokens_per_s": tokens / run.wall_s,
        "goodput_rps": good / run.wall_s,
        "targets": target_figures(load.target_ttft_ms, load.target_itl_ms, figures),
        "tokens": _tokens(run.requests, tokens),
        "late_ms": percentiles(run.late_ms),
        "client": client,
        "wall_s": run.wall_s,
        "stopped": stop.reason,
    }


def _tokens(requests: Sequence[Answered], output: int) -> dict[str, Any]:
    """Of all requests, and how they were counted; ``input_asked`` are of those whose server told the ``input``."""
    told = [one for one in requests if one.prompt_tokens is not None]
    return {
        "output": output,
        "input": sum(one.prompt_tokens or 0 for one in told),
        "input_asked": sum(one.input for one in told),
        "counted_by": dict(Counter(one.counted_by for one in requests if one.counted_by is not None and one.tokens)),
    }


async def _run(
    server: Server, load: Load, seconds: float, seed: int, prompts: str, overhead: Overhead, stop: Stop
) -> _Run:
    made = Prompts(server.dialect.vocab, server.words, prompts)
    if load.concurrency is not None:
        return await _closed_loop(server, load.concurrency, endless(load.mix, seed), seconds, made, overhead, stop)
    return await _open_loop(server, load.arrivals(seconds, seed), made, overhead, stop)


async def _open_loop(
    server: Server, arrivals: Sequence[Arrival], prompts: Prompts, overhead: Overhead, stop: Stop
) -> _Run:
    """Requests are sent when they are due, whatever became of those before."""
    ready: deque[bytes] = deque()
    waiting = iter(arrivals)
    ahead = 0
    for arrival in waiting:
        ready.append(server.encode(prompts.make(arrival), arrival.output))
        ahead += len(ready[-1])
        if ahead >= _AHEAD_BYTES:
            break
    overhead.start()
    began = time.monotonic()
    ended: list[tuple[Answered, float]] = []  # with when it was due
    asked: set[asyncio.Task[None]] = set()

    async def ask(encoded: bytes, arrival: Arrival) -> None:
        answered = await server.ask(encoded, arrival)
        ended.append((answered, began + arrival.at_s))
        stop.saw(answered)

    async def send() -> None:
        for arrival in arrivals:
            encoded = ready.popleft()
            due = began + arrival.at_s
            while (wait := due - time.monotonic()) > 0:  # noqa: ASYNC110  # until a time, not an event
                await asyncio.sleep(wait)  # may be early by half of the timer's millisecond
            asked.add(asyncio.create_task(ask(encoded, arrival)))
            if (later := next(waiting, None)) is not None:
                await asyncio.sleep(0)  # the request goes out first
                ready.append(server.encode(prompts.make(later), later.output))

    if stop.reason is None:
        await until_done(stop, asyncio.create_task(send()))
    await _settle(asked, stop)
    ended.sort(key=lambda one: one[1])
    late_ms = [one.sent_ns / NS_PER_MS - due * 1e3 for one, due in ended]
    return _Run([one for one, _ in ended], late_ms, time.monotonic() - began)


async def _closed_loop(
    server: Server,
    callers: int,
    wanted: Iterator[Arrival],
    seconds: float,
    prompts: Prompts,
    overhead: Overhead,
    stop: Stop,
) -> _Run:
    # The first of each caller is made before, so that all of them start together.
    first = list(islice(wanted, callers))
    ready = deque((arrival, server.encode(prompts.make(arrival), arrival.output)) for arrival in first)
    requests: list[Answered] = []
    overhead.start()
    began = time.monotonic()

    def following() -> tuple[Arrival, bytes]:
        if ready:
            return ready.popleft()
        arrival = next(wanted)
        return arrival, server.encode(prompts.make(arrival), arrival.output)

    async def caller() -> None:
        while time.monotonic() - began < seconds and stop.reason is None:
            arrival, encoded = following()
            requests.append(await server.ask(encoded, arrival))
            stop.saw(requests[-1])
            if requests[-1].error is not None:
                await asyncio.sleep(_AFTER_FAILURE_S)

    await _settle({asyncio.create_task(caller()) for _ in range(callers)}, stop)
    return _Run(requests, [], time.monotonic() - began)


async def _settle(asked: set[asyncio.Task[None]], stop: Stop) -> None:
    """Wait for requests in flight; an interrupted load lets go of them. Raises what one raised."""
    if not asked:
        return
    all_done = asyncio.create_task(asyncio.wait(asked))
    ended = asyncio.create_task(stop.wait())
    await asyncio.wait({all_done, ended}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if stop.is_interrupted:
        for task in asked:
            task.cancel()
    done, _ = await all_done
    for task in done:
        if not task.cancelled():
            task.result()
