"""What the API process adds to the first token: many streams at once on the scripted engine, through `AsyncLLM.open`.

The engine is a child process that computes nothing, so all that is left is the way: checks, messages, the event loop,
detokenising. A stream's *added* time is the way to the engine (from the moment at which its caller calls, to that at
which its message was handed to the socket) and the way back (from the engine's stamp of its first token to the text
in the caller's hands). The time that a message waits for the engine's step to end is the engine's.

Two ways to arrive: ``spread`` keeps ``--streams`` streams running, each new one at a random moment among their tokens;
``together`` lets all of them call in the same instant, so that each waits for those before it. The target is for
``spread``.

    python benchmarks/api_overhead.py --streams 64 --json

Exits 1 when the median is over ``--target-ms``. Needs the tokenizer of ``--model`` (`firsttoken pull smollm2`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from array import array
from dataclasses import dataclass
from typing import Any

import uvloop

from firsttoken.cli.report import header
from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.engine_args import DEFAULT_MODEL, EngineArgs
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.timeline import Mark
from firsttoken.engine.stub import StubConfig, StubProcess
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.frontend.loading import ModelText, load_text
from firsttoken.observability.percentiles import percentiles

TEXT = "The quick brown fox jumps over the lazy dog; then, in 2024, it went home to read a café's menu. 🦊 "


@dataclass(frozen=True)
class Stream:
    """Times of one stream in ms: ``to_engine`` + ``from_engine`` = what the API process added."""

    to_engine: float
    from_engine: float
    tokens: int

    @property
    def added(self) -> float:
        return self.to_engine + self.from_engine


@dataclass(frozen=True)
class Options:
    streams: int
    tokens: int
    step_ms: float
    repeat: int


async def run_stream(llm: AsyncLLM, prompt: array[int], tokens: int, called: int) -> Stream:
    """One caller among those who called at ``called`` ns."""
    generation = llm.open(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    sent = now_ns()
    received = 0
    async for delta in generation:
        if not received and delta.token_ids:
            received = now_ns()
    first = generation.timeline.first(Mark.FIRST_TOKEN)
    assert first is not None
    return Stream((sent - called) / NS_PER_MS, (received - first) / NS_PER_MS, generation.completion_tokens)


async def together(llm: AsyncLLM, prompt: array[int], options: Options) -> list[Stream]:
    """Bursts: all callers call in the same instant."""
    results: list[Stream] = []
    for _ in range(options.repeat):
        called = now_ns()
        callers = (run_stream(llm, prompt, options.tokens, called) for _ in range(options.streams))
        results += await asyncio.gather(*callers)
    return results


async def spread(llm: AsyncLLM, prompt: array[int], options: Options) -> list[Stream]:
    """New streams arrive at random moments, as fast as others end. Those that start before the load is full don't
    count."""
    loop = asyncio.get_running_loop()
    running: list[asyncio.Task[Stream]] = []
    count = options.streams * (options.repeat + 1)
    mean_gap = options.tokens * options.step_ms / 1e3 / options.streams

    def start(called: int) -> None:
        running.append(loop.create_task(run_stream(llm, prompt, options.tokens, called)))

    def arrivals() -> None:
        # On a thread of its own, so that a busy event loop counts as what it is: time that the caller waits.
        gaps = random.Random(0)
        for _ in range(count):
            time.sleep(gaps.uniform(0, 2 * mean_gap))
            loop.call_soon_threadsafe(start, now_ns())

    await asyncio.to_thread(arrivals)
    results = await asyncio.gather(*running)
    return results[options.streams :]


async def measure(text: ModelText, options: Options) -> dict[str, Any]:
    assert text.tokenizer is not None
    figures: dict[str, Any] = {}
    config = StubConfig(
        vocab_size=text.tokenizer.vocab_size, max_num_seqs=2 * options.streams, step_s=options.step_ms / 1e3
    )
    llm = AsyncLLM(StubProcess("firsttoken.engine.stub:echo", config), tokenizer=text.tokenizer)
    async with llm:
        prompt = await llm.tokenize(TEXT * 10)
        await asyncio.gather(*(run_stream(llm, prompt, 4, now_ns()) for _ in range(options.streams)))  # warm
        gc.collect()
        gc.freeze()
        for name, way in (("spread", spread), ("together", together)):
            cpu = time.process_time()
            results = await way(llm, prompt, options)
            cpu = time.process_time() - cpu
            figures[name] = {
                "added_ms": percentiles([stream.added for stream in results]),
                "to_engine_ms": percentiles([stream.to_engine for stream in results]),
                "from_engine_ms": percentiles([stream.from_engine for stream in results]),
                "cpu_us_per_token": cpu / sum(stream.tokens for stream in results) * 1e6,
            }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="time that the API process adds to the first token")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer to use (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=50, help="tokens a stream (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of an engine step (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--target-ms", type=float, default=1.0, help="bound on the median (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    args = parser.parse_args()
    text = load_text(EngineArgs(model=args.model, offline=True))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(measure(text, Options(args.streams, args.tokens, args.step_ms, args.repeat)))
    result = header(model=text.name, streams=args.streams, output=args.tokens, repeat=args.repeat)
    result |= {"step_ms": args.step_ms, "target_ms": args.target_ms, **figures}
    if args.json:
        print(json.dumps(result))
    else:
        for way, measured in figures.items():
            for name in ("added_ms", "to_engine_ms", "from_engine_ms"):
                shown = "  ".join(f"{key} {value:.3f}" for key, value in measured[name].items())
                print(f"{way:9} {name:15} {shown}")
            print(f"{way:9} cpu_us_per_token {measured['cpu_us_per_token']:.1f}")
    return 0 if figures["spread"]["added_ms"]["p50"] < args.target_ms else 1


if __name__ == "__main__":
    sys.exit(main())
