"""``bench load``: requests of mixed lengths that arrive by themselves, or so many at a time."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firsttoken.bench.arrivals import Arrival, Mix, endless, poisson
from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.figures import latency_figures, within_targets
from firsttoken.bench.requests import Timed, random_prompt, run_request
from firsttoken.bench.session import Session
from firsttoken.core.service import CLASS_NAMES, ServiceClass
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.observability.percentiles import percentiles

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stream:
    """Requests of one service class that arrive beside the load (Poisson)."""

    name: str
    service: ServiceClass
    rate: float
    mix: Mix

    @classmethod
    def parse(cls, text: str) -> Stream:
        """From ``car=p0,4,64:32``: a name, class, rate and mix. Raises ValueError."""
        name, equals, rest = text.partition("=")
        words = rest.split(",", 2)
        if not name or not equals or len(words) != 3 or words[0] not in CLASS_NAMES:
            raise ValueError(
                f"{text!r:.80} is no stream: write it as in car=p0,4,64:32 (name=class,rate,inputs:outputs)"
            )
        rate = float(words[1])
        if not 0 < rate < float("inf"):
            raise ValueError(f"the rate of a stream must be more than 0, got {words[1]!r:.80}")
        return cls(name, ServiceClass(CLASS_NAMES.index(words[0])), rate, Mix.parse(words[2]))

    def arrivals(self, seconds: float, seed: int) -> list[Arrival]:
        """Of a random generator of the stream's own: the load's arrivals do not depend on it."""
        return poisson(self.rate, seconds, self.mix, f"{self.name}/{seed}")


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Either ``rate`` requests a second arrive (Poisson), or ``concurrency`` callers each send their next request when
    their last one ended; for ``seconds``, after which what still runs is waited for.

    ``beside`` are further streams, whose requests are told apart. Before that the engine has ``prepare_s`` to capture
    its steps, and the same load runs for ``warmup_s`` unmeasured, with other prompts. ``target_*`` are in ms.
    """

    mix: Mix
    rate: float | None = None
    concurrency: int | None = None
    seconds: float = 12.0
    prepare_s: float = 60.0
    warmup_s: float = 2.0
    seed: int = 1
    target_ttft_ms: float | None = None
    target_itl_ms: float | None = None
    beside: tuple[Stream, ...] = ()


@dataclass(frozen=True)
class _Run:
    """``late_ms`` is how much later than planned each request was sent (the measuring program's own fault);
    ``beside`` are the requests of further streams, by name."""

    requests: list[Timed]
    beside: dict[str, list[Timed]]
    late_ms: list[float]
    wall_s: float


async def measure_load(session: Session, config: LoadConfig, say: Say = lambda text: None) -> dict[str, Any]:
    """The figures under their public names. Raises `BenchFailed` when no request got an answer."""
    for mix in (config.mix, *(stream.mix for stream in config.beside)):
        session.check_length(max(mix.inputs) + max(mix.outputs))
    say("waiting for the engine to be prepared")
    prepared_s = await session.prepare(config.prepare_s)
    if config.warmup_s > 0:
        say(f"warming up for {config.warmup_s:g} s")
        await _run(session.llm, config, config.warmup_s, config.seed + 1)
    say(f"measuring for {config.seconds:g} s")
    before = session.llm.stats
    run = await _run(session.llm, config, config.seconds, config.seed)
    answered = [one for one in run.requests if one.ok]
    reasons = Counter(one.error for one in run.requests if one.error is not None)
    if not answered:
        raise BenchFailed(f"none of {len(run.requests)} requests was answered: {dict(reasons)}")
    good = sum(within_targets(one, config.target_ttft_ms, config.target_itl_ms) for one in answered)
    figures = latency_figures(answered)
    return {
        "requests": {
            "sent": len(run.requests),
            "ok": len(answered),
            "failed": len(run.requests) - len(answered),
            "reasons": dict(reasons),
        },
        **figures,
        "requests_per_s": len(answered) / run.wall_s,
        "output_tokens_per_s": sum(one.tokens for one in run.requests) / run.wall_s,
        "goodput_rps": good / run.wall_s,
        "targets": _targets(config, figures),
        **({"beside": {name: _stream_figures(found) for name, found in run.beside.items()}} if run.beside else {}),
        "late_ms": percentiles(run.late_ms),
        "captured_share": session.captured_share(before),
        "prepared_s": prepared_s,
        "wall_s": run.wall_s,
        "start_s": session.start_s,
        "start_ms": session.start_ms,
        "peak_memory_gib": await session.peak_memory_gib(),
    }


def _stream_figures(requests: Sequence[Timed]) -> dict[str, Any]:
    answered = [one for one in requests if one.ok]
    return {"sent": len(requests), "ok": len(answered), **latency_figures(answered)}


def _targets(config: LoadConfig, figures: dict[str, Any]) -> dict[str, Any]:
    """Each stated target beside the p99 that it bounds, and whether that keeps it."""
    stated = {"ttft_ms": config.target_ttft_ms, "itl_ms": config.target_itl_ms}
    return {
        name: {"target": target, "p99": figures[name].get("p99"), "met": figures[name].get("p99", 0.0) <= target}
        for name, target in stated.items()
        if target is not None
    }


async def _run(llm: AsyncLLM, config: LoadConfig, seconds: float, seed: int) -> _Run:
    # Prompts have random numbers of their own: the lengths' must not depend on them.
    rng = random.Random(f"prompts/{seed}")

    def prompt(tokens: int) -> array[int]:
        return random_prompt(rng, tokens, llm.info.vocab_size)

    streams = [
        asyncio.create_task(_open_loop(llm, stream.arrivals(seconds, seed), prompt, stream.service))
        for stream in config.beside
    ]
    if config.rate is not None:
        run = await _open_loop(llm, poisson(config.rate, seconds, config.mix, seed), prompt)
    elif config.concurrency is not None:
        run = await _closed_loop(llm, config, seconds, seed, prompt)
    else:
        raise ValueError("a load needs a rate or a concurrency")
    beside = await asyncio.gather(*streams)
    names = [stream.name for stream in config.beside]
    return replace(run, beside={name: found.requests for name, found in zip(names, beside, strict=True)})


async def _open_loop(
    llm: AsyncLLM,
    arrivals: Sequence[Arrival],
    prompt: Callable[[int], array[int]],
    service: ServiceClass = ServiceClass.P2,
) -> _Run:
    # Before the first is sent: to make one takes longer than some gaps.
    prompts = [prompt(arrival.input) for arrival in arrivals]
    began = time.monotonic()
    late_ms = []
    tasks = []
    for arrival, tokens in zip(arrivals, prompts, strict=True):
        wait = began + arrival.at_s - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        late_ms.append(max(time.monotonic() - began - arrival.at_s, 0.0) * 1e3)
        tasks.append(asyncio.create_task(run_request(llm, tokens, arrival.output, service=service)))
    requests = await asyncio.gather(*tasks)
    return _Run(list(requests), {}, late_ms, time.monotonic() - began)


async def _closed_loop(
    llm: AsyncLLM, config: LoadConfig, seconds: float, seed: int, prompt: Callable[[int], array[int]]
) -> _Run:
    assert config.concurrency is not None
    wanted = endless(config.mix, seed)
    began = time.monotonic()
    requests: list[Timed] = []

    async def caller() -> None:
        while time.monotonic() - began < seconds:
            arrival = next(wanted)
            requests.append(await run_request(llm, prompt(arrival.input), arrival.output))
            if requests[-1].error is not None:
                await asyncio.sleep(0.01)  # an engine that refuses all must not be asked as fast as it can refuse

    await asyncio.gather(*(caller() for _ in range(config.concurrency)))
    return _Run(requests, {}, [], time.monotonic() - began)
