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

from firsttoken.bench.arrivals import TRACE_BLOCK_TOKENS, Arrival, Mix, endless, poisson
from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.figures import latency_figures, target_figures, within_targets
from firsttoken.bench.requests import Timed, random_prompt, run_request
from firsttoken.bench.session import Session
from firsttoken.bench.shape import Load
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
class LoadConfig(Load):
    """A load on an engine. ``beside`` are further streams, whose requests are told apart. Before all the engine has
    ``prepare_s`` to capture its steps."""

    prepare_s: float = 60.0
    beside: tuple[Stream, ...] = ()


@dataclass(frozen=True)
class _Run:
    """``late_ms`` is how much later than planned each request was sent (the measuring program's own fault);
    ``beside`` are the requests of further streams, by name."""

    requests: list[Timed]
    beside: dict[str, list[Timed]]
    late_ms: list[float]
    wall_s: float


async def measure_load(
    session: Session, config: LoadConfig, say: Say = lambda text: None, *, prompts: int = 0
) -> dict[str, Any]:
    """The figures under their public names; measurements of one session need other ``prompts``, since the engine may
    still have their KV. Raises `BenchFailed` when no request got an answer."""
    session.check_length(config.longest)
    for stream in config.beside:
        session.check_length(max(stream.mix.inputs) + max(stream.mix.outputs))
    say("waiting for the engine to be prepared")
    prepared_s = await session.prepare(config.prepare_s)
    if config.warmup_s > 0:
        say(f"warming up for {config.warmup_s:g} s")
        await _run(session.llm, config, config.warmup_s, config.seed + 1, prompts)
    say(f"measuring for {config.seconds:g} s")
    before = session.llm.stats
    run = await _run(session.llm, config, config.seconds, config.seed, prompts)
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
        "targets": target_figures(config.target_ttft_ms, config.target_itl_ms, figures),
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


async def _run(llm: AsyncLLM, config: LoadConfig, seconds: float, seed: int, prompts: int) -> _Run:
    # Prompts have random numbers of their own: the lengths' must not depend on them.
    prompt = _Prompts(llm.info.vocab_size, f"prompts/{seed}" + (f"/{prompts}" if prompts else "")).make
    streams = [
        asyncio.create_task(_open_loop(llm, stream.arrivals(seconds, seed), prompt, stream.service))
        for stream in config.beside
    ]
    if config.concurrency is not None:
        run = await _closed_loop(llm, config, seconds, seed, prompt)
    else:
        run = await _open_loop(llm, config.arrivals(seconds, seed), prompt)
    beside = await asyncio.gather(*streams)
    names = [stream.name for stream in config.beside]
    return replace(run, beside={name: found.requests for name, found in zip(names, beside, strict=True)})


class _Prompts:
    """Random token ids; blocks of one id are the same ids."""

    def __init__(self, vocab_size: int, seed: str) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._rng = random.Random(seed)

    def make(self, arrival: Arrival) -> array[int]:
        if not arrival.blocks:
            return random_prompt(self._rng, arrival.input, self._vocab_size)
        ids = array("I")
        for block in arrival.blocks:
            ids += random_prompt(random.Random(f"{self._seed}/{block}"), TRACE_BLOCK_TOKENS, self._vocab_size)
        return ids[: arrival.input]


async def _open_loop(
    llm: AsyncLLM,
    arrivals: Sequence[Arrival],
    prompt: Callable[[Arrival], array[int]],
    service: ServiceClass = ServiceClass.P2,
) -> _Run:
    # Before the first is sent: to make one takes longer than some gaps.
    prompts = [prompt(arrival) for arrival in arrivals]
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
    llm: AsyncLLM, config: LoadConfig, seconds: float, seed: int, prompt: Callable[[Arrival], array[int]]
) -> _Run:
    assert config.concurrency is not None
    wanted = endless(config.mix, seed)
    began = time.monotonic()
    requests: list[Timed] = []

    async def caller() -> None:
        while time.monotonic() - began < seconds:
            arrival = next(wanted)
            requests.append(await run_request(llm, prompt(arrival), arrival.output))
            if requests[-1].error is not None:
                await asyncio.sleep(0.01)  # an engine that refuses all must not be asked as fast as it can refuse

    await asyncio.gather(*(caller() for _ in range(config.concurrency)))
    return _Run(requests, {}, [], time.monotonic() - began)
