"""Whether a tenant can tell by the clock what another one has sent.

In each round anna sends a prompt of ``--tokens`` random token ids that nobody has sent, and again; then, in random
order, bert sends anna's prompt and one that nobody has sent. Told are the times to the first token (ms, medians), and
how well a single time tells anna's prompt from an unseen one: the share of pairs in which it is the shorter one, 0.5
if that is a toss-up (with its standard error), 1 if it always is. ``--tiers`` adds host memory.

    python -m benchmarks.kv_tenants --output benchmarks/results/kv/tenants.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import sys
from array import array
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from typing import Any

from firsttoken import AsyncEngineArgs, AsyncLLM, SamplingParams
from firsttoken.core.clock import now_ns
from firsttoken.core.service import Terms
from firsttoken.server.config import ApiKey
from firsttoken.server.salts import cache_salts
from firsttoken.version import __version__

PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


async def first_token_ms(llm: AsyncLLM, prompt: array[int], salt: str) -> float:
    began = now_ns()
    async for _ in llm.open(prompt, PARAMS, terms=Terms(salt=salt)):
        break
    return (now_ns() - began) / 1e6


async def measure(args: AsyncEngineArgs, tokens: int, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Times in ms."""
    chance = random.Random(seed)
    anna, bert = (salt.result() for salt in cache_salts([ApiKey("", "anna"), ApiKey("", "bert")], lasting=True))
    times: dict[str, list[float]] = {"own": [], "other": [], "unseen": []}
    async with await AsyncLLM.launch(args) as llm:

        def prompt() -> array[int]:
            return array("I", [chance.randrange(llm.info.vocab_size) for _ in range(tokens)])

        for number in range(rounds + 1):
            mine = prompt()
            await first_token_ms(llm, mine, anna)
            found = {"own": await first_token_ms(llm, mine, anna)}
            others = [("other", mine), ("unseen", prompt())]
            chance.shuffle(others)
            for name, asked in others:
                found[name] = await first_token_ms(llm, asked, bert)
            for name, ms in found.items() if number else ():  # the first round warms up
                times[name].append(ms)
    return {
        **{f"{name}_ms": round(statistics.median(each), 2) for name, each in times.items()},
        "told_apart": round(told_apart(times["other"], times["unseen"]), 3),
        "standard_error": round(sqrt((2 * rounds + 1) / (12 * rounds * rounds)), 3),
        "own_told_apart": round(told_apart(times["own"], times["unseen"]), 3),
    }


def told_apart(one: list[float], other: list[float]) -> float:
    """The share of pairs in which ``one`` is shorter; ties count half."""
    wins = sum((a < b) + (a == b) / 2 for a in one for b in other)
    return wins / (len(one) * len(other))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiers", action="store_true", help="64 MiB of KV on the device and 256 MiB in host memory")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    args = AsyncEngineArgs(
        model=options.model,
        threads=options.threads,
        max_model_len=options.tokens + 64,
        kv_memory=64 << 20 if options.tiers else None,
        kv_host_memory=256 << 20 if options.tiers else 0,
    )
    result = {
        "benchmark": "kv_tenants",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "firsttoken": __version__,
        "machine": platform.machine(),
        "model": options.model,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "threads": options.threads,
        "tiers": options.tiers,
        **asyncio.run(measure(args, options.tokens, options.rounds)),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
