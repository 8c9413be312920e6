"""What it takes to restore a prompt's KV from host memory or from files, against computing it.

    python -m benchmarks.gpu.tiers random:llama-3.1-8b --input 8192 [--disk FOLDER] [--output tiers.json]

A prompt is computed (``cold``), others take its place on the device, and it is sent again: ``restored`` is its time to
first token then. The same while ``--rows`` requests decode, whose gaps are told with and without restores beside them.
With ``--disk`` the engine is started anew on the folder, so that only files can help: where they would be slower than
computing the engine should decline, and ``restored`` be as long as ``cold``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

from firsttoken.bench.requests import Timed, random_prompt, run_request
from firsttoken.bench.session import Session, open_session
from firsttoken.core.clock import now_ns
from firsttoken.core.engine_args import EngineArgs

GIB = 1 << 30
PREPARE_S = 60
SPILL_S = 0.5


def engine_args(options: argparse.Namespace) -> EngineArgs:
    return EngineArgs(
        model=options.model,
        device=options.device,
        kv_memory=options.kv_memory,
        kv_host_memory=options.kv_host_memory,
        kv_disk=str(options.disk) if options.disk else None,
        max_model_len=options.input + 2048,
        max_num_seqs=16,
    )


async def send(session: Session, prompt: array[int], output: int = 4) -> Timed:
    timed = await run_request(session.llm, prompt, output)
    if timed.error is not None:
        raise RuntimeError(timed.error)
    return timed


async def crowd_out(session: Session, rng: random.Random, options: argparse.Namespace) -> None:
    """Prompts that fill the device's KV twice."""
    info = session.llm.info
    capacity = info.kv_blocks * info.block_tokens
    for _ in range(2 * capacity // options.input + 1):
        await send(session, random_prompt(rng, options.input, info.vocab_size), 1)


async def round_trip(session: Session, rng: random.Random, options: argparse.Namespace) -> tuple[Timed, Timed]:
    prompt = random_prompt(rng, options.input, session.llm.info.vocab_size)
    cold = await send(session, prompt)
    await asyncio.sleep(SPILL_S)
    await crowd_out(session, rng, options)
    await asyncio.sleep(SPILL_S)
    return cold, await send(session, prompt)


async def beside_decode(session: Session, rng: random.Random, options: argparse.Namespace) -> dict[str, Any]:
    """Gaps of ``rows`` requests that decode, alone and while prompts are restored one after the other."""
    info = session.llm.info
    prompts = [random_prompt(rng, options.input, info.vocab_size) for _ in range(3)]
    for prompt in prompts:
        await send(session, prompt)
    await asyncio.sleep(SPILL_S)
    await crowd_out(session, rng, options)
    found: dict[str, Any] = {"rows": options.rows}
    decoding = [
        asyncio.ensure_future(run_request(session.llm, random_prompt(rng, 64, info.vocab_size), 1000))
        for _ in range(options.rows)
    ]
    await asyncio.sleep(1.0)
    restored: list[tuple[int, int]] = []
    cached = []
    for prompt in prompts:
        began = now_ns()
        one = await send(session, prompt, 1)
        restored.append((began, now_ns()))
        cached.append(one.cached)
        found.setdefault("restored_ms", []).append(round(one.ttft_ms, 2))
        await asyncio.sleep(0.3)
    rows = await asyncio.gather(*decoding)
    for name, inside in (("itl_ms_beside", True), ("itl_ms_alone", False)):
        gaps = [
            (at - before) / 1e6
            for one in rows
            for (before, _), (at, _) in pairwise(one.arrivals)
            if any(begin <= at <= end for begin, end in restored) == inside
        ]
        found[name] = {"p50": statistics.median(gaps), "p99": sorted(gaps)[len(gaps) * 99 // 100], "gaps": len(gaps)}
    return found | {"cached": cached}


def medians(trips: list[tuple[Timed, Timed]]) -> dict[str, Any]:
    cold = statistics.median(cold.ttft_ms for cold, _ in trips)
    warm = statistics.median(warm.ttft_ms for _, warm in trips)
    return {
        "cold_ttft_ms": cold,
        "restored_ttft_ms": warm,
        "part": warm / cold,
        "cached": [warm.cached for _, warm in trips],
        "kv_ms": statistics.median(warm.stages["kv_ms"] for _, warm in trips),
        "stages": trips[-1][1].stages,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    result: dict[str, Any] = {"model": options.model, "input": options.input}
    async with open_session(engine_args(options), now_ns()) as session:
        result["device_name"] = session.llm.info.device_name
        await session.prepare(PREPARE_S)
        await asyncio.sleep(options.grow_s)
        await round_trip(session, rng, options)  # what is done for the first time
        result["host"] = medians([await round_trip(session, rng, options) for _ in range(options.repeat)])
        if options.rows:
            result["beside_decode"] = await beside_decode(session, rng, options)
        last = random_prompt(rng, options.input, session.llm.info.vocab_size)
        cold = await send(session, last)
        await asyncio.sleep(5 if options.disk else 0)
    if options.disk:
        async with open_session(engine_args(options), now_ns()) as session:
            await session.prepare(PREPARE_S)
            await send(session, random_prompt(rng, options.input, session.llm.info.vocab_size))
            result["disk"] = medians([(cold, await send(session, last))])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--input", type=int, default=8192)
    parser.add_argument("--kv-memory", type=int, default=4 * GIB)
    parser.add_argument("--kv-host-memory", type=int, default=16 * GIB)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--rows", type=int, default=8, help="requests that decode beside restores, 0 for none")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--grow-s", type=float, default=8.0, help="until host memory is pinned")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
