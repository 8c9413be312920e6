"""Gaps of a stream while the prompt of another request is computed beside it, by how much context that prompt has.

Two engines are compared: the default step budget, and a cap of ``--cap`` prompt tokens (``--mixed-prefill-tokens``).
For each context a prompt of that length is in the prefix cache, and a request brings ``--tokens`` more: while they are
computed, every chunk attends to that context. ``ratio`` is the median of these gaps over that of the same stream's
gaps just before, so that what else the machine does counts in both; the two engines take turns, and the medians of all
runs are told with the least and the most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from itertools import pairwise
from typing import Any

import msgspec

from firsttoken import AsyncEngineArgs, AsyncLLM, SamplingParams
from firsttoken.core.clock import NS_PER_MS, now_ns

PLAIN = 40  # gaps
VOCABULARY = 40_000  # token ids to choose from; SmolLM2 has some more


class Stream:
    """Goes on until it is cancelled, and keeps when its tokens came."""

    def __init__(self, llm: AsyncLLM, prompt: list[int]) -> None:
        self.times: list[int] = []
        self._task = asyncio.create_task(self._read(llm, prompt))

    async def _read(self, llm: AsyncLLM, prompt: list[int]) -> None:
        params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
        async for _ in llm.generate(prompt, params):
            self.times.append(now_ns())

    async def reach(self, count: int) -> None:
        while len(self.times) < count:  # noqa: ASYNC110  # a generator has no event for that
            await asyncio.sleep(0.002)

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def gaps(self, begin: int, end: int) -> list[float]:
        """In ms, those that began at token ``begin`` or later and ended before token ``end``."""
        times = self.times[begin:end]
        return [(after - before) / NS_PER_MS for before, after in pairwise(times)]


async def one_run(llm: AsyncLLM, beginning: list[int], tokens: int, rng: random.Random) -> dict[str, float]:
    stream = Stream(llm, ids(rng, 64))
    await stream.reach(PLAIN + 8)
    begin = len(stream.times)
    asked = now_ns()
    await first_token(llm, beginning + ids(rng, tokens))
    took = (now_ns() - asked) / NS_PER_MS
    end = len(stream.times)
    await stream.leave()
    plain = statistics.median(stream.gaps(begin - PLAIN, begin))
    # The gap in which the request came has a plain part, and so has that of its first token.
    beside = stream.gaps(begin, end - 1)
    if not beside:
        raise SystemExit(f"{tokens} tokens were computed in fewer than three steps: give more --tokens")
    return {
        "plain_ms": plain,
        "ratio": statistics.median(beside) / plain,
        "ratio_p90": sorted(beside)[len(beside) * 9 // 10] / plain,
        "chunk": tokens / (end - begin),
        "ttft_ms": took,
    }


async def first_token(llm: AsyncLLM, prompt: list[int]) -> None:
    async for _ in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)):
        pass


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    contexts = [int(text) for text in options.contexts.split(",")]
    args = AsyncEngineArgs(model=options.model, device="cpu", threads=options.threads)
    capped = msgspec.structs.replace(args, mixed_prefill_tokens=options.cap)
    engines = {"default": await AsyncLLM.launch(args), f"cap {options.cap}": await AsyncLLM.launch(capped)}
    beginnings = {context: ids(rng, context) for context in contexts}
    runs: dict[tuple[str, int], list[dict[str, float]]] = {(name, at): [] for name in engines for at in contexts}
    try:
        for llm in engines.values():
            for beginning in beginnings.values():
                if beginning:
                    await first_token(llm, beginning)
            await one_run(llm, [], options.tokens, rng)  # the model of step times is learned
        for number in range(options.repeat):
            for context in contexts:
                for name, llm in list(engines.items())[:: -1 if number % 2 else 1]:
                    runs[name, context].append(await one_run(llm, beginnings[context], options.tokens, rng))
    finally:
        for llm in engines.values():
            await llm.shutdown()
    errors = {name: msgspec.to_builtins(llm.stats.step_time_errors) for name, llm in engines.items()}
    return {
        "command": "benchmarks/cpu_gaps.py",
        "model": options.model,
        "threads": options.threads,
        "tokens": options.tokens,
        "repeat": options.repeat,
        "step_time_errors": errors,  # of each kind: steps, median, p90
        "results": [{"budget": name, "context": at, **_summary(found)} for (name, at), found in runs.items()],
    }


def _summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
    ratios = [run["ratio"] for run in runs]
    return {**found, "ratio_least": round(min(ratios), 2), "ratio_most": round(max(ratios), 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--contexts", default="0,2048,4096")
    parser.add_argument("--tokens", type=int, default=768, help="of the prompt behind its cached context")
    parser.add_argument("--cap", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, help="as of serve; one is the steadiest beside other programs")
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
