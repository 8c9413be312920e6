"""Starts of an engine with an empty and with a full kernel cache, and what requests feel of what goes on beside them.

    python -m benchmarks.gpu.warm random:llama-3.1-8b --output warm.json

Two engines are started on a fresh Triton cache, one after the other. Each gets short requests, some alone and some
together, from its first moment on: the slowest first token says whether anything waited for a compiler or a capture.
Then, in this process, every planned step is launched once on padding rows: nothing of it may be compiled (Triton's
listener counts), or what compiles ahead does not ask for what really runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from firsttoken.bench.requests import Timed, random_prompt, run_request
from firsttoken.bench.session import open_session
from firsttoken.core.clock import now_ns
from firsttoken.core.engine_args import EngineArgs

# (requests together, prompt tokens), in turn; lengths fall into different profiles.
LOADS = ((1, 32), (1, 200), (4, 32), (1, 700), (8, 100), (1, 17))
PAUSE_S = 0.1


async def start(args: EngineArgs, seconds: float) -> dict[str, Any]:
    """One engine's start, and the first tokens of requests over the next ``seconds``."""
    rng = random.Random(1)
    slowest: list[dict[str, float]] = []
    async with open_session(args, now_ns()) as session:
        began = time.monotonic()
        index = 0
        while (at := time.monotonic() - began) < seconds:
            together, tokens = LOADS[index % len(LOADS)]
            index += 1
            prompts = [random_prompt(rng, tokens, session.llm.info.vocab_size) for _ in range(together)]
            timed: list[Timed] = await asyncio.gather(*(run_request(session.llm, prompt, 4) for prompt in prompts))
            errors = [one.error for one in timed if one.error is not None]
            if errors:
                raise SystemExit(f"a request failed: {errors[0]}")
            slowest.append(
                {"at_s": round(at, 2), "together": together, "tokens": tokens, "ms": max(t.ttft_ms for t in timed)}
            )
            await asyncio.sleep(PAUSE_S)
        start_ms = {part: round(ms, 1) for part, ms in session.start_ms.items()}
    late = [one["ms"] for one in slowest if one["at_s"] > seconds / 2]
    return {
        "start_s": round(sum(start_ms.values()) / 1e3, 2),
        "start_ms": start_ms,
        "ttft_ms": {"median": statistics.median(late), "slowest": max(one["ms"] for one in slowest)},
        "slowest": sorted(slowest, key=lambda one: -one["ms"])[:6],
    }


def misses(model: str) -> dict[str, Any]:
    """Kernels that a real executor compiles although all were compiled ahead; and what captures take."""
    import torch
    from triton import knobs

    from firsttoken.checkpoint.locate import open_checkpoint
    from firsttoken.devices.cuda import CUDADevice
    from firsttoken.engine.resolve import resolve
    from firsttoken.executor.ahead.plan import all_keys
    from firsttoken.executor.graphs.executor import SHORT_PAUSE_NS, GraphExecutor

    seen: dict[bool, list[str]] = {True: [], False: []}

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        seen[cache_hit].append(src.name)

    knobs.compilation.listener = listen
    checkpoint = open_checkpoint(model)
    device, config = resolve(EngineArgs(model=model, device="cuda"), checkpoint, [CUDADevice()])
    executor = device.load(config.executor, checkpoint)
    assert isinstance(executor, GraphExecutor)
    halves: list[float] = []
    time.sleep(SHORT_PAUSE_NS / 1e9)
    more = True
    while more:
        began = time.perf_counter()
        more = executor.idle()
        halves.append((time.perf_counter() - began) * 1e3)
    for key in all_keys(executor.table):
        executor.rehearse(key)
    found = {
        "compiled": seen[False],
        "found": len(seen[True]),
        "graphs": len(halves) // 2,
        "idle_ms": {"median": statistics.median(halves), "longest": max(halves)},
        "reserved_gib": round(torch.cuda.memory_reserved() / (1 << 30), 2),
    }
    executor.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.1-8b")
    parser.add_argument("--seconds", type=float, default=12, help="of requests for each engine")
    parser.add_argument("--quick", action="store_true", help="a small model and few seconds")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--misses", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = "random:llama-3.2-1b" if arguments.quick else arguments.model
    if arguments.misses:
        print(json.dumps(misses(model)))
        return
    seconds = 5 if arguments.quick else arguments.seconds
    results: dict[str, Any] = {"model": model}
    with tempfile.TemporaryDirectory(prefix="firsttoken-kernels-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        args = EngineArgs(model=model, device="cuda")
        for name in ("empty", "full"):
            results[name] = asyncio.run(start(args, seconds))
            print(f"{name} cache: {json.dumps(results[name])}", flush=True)
        # So that whatever the first engine's end cut off is there.
        warm = [sys.executable, "-m", "firsttoken.cli.main", "warm", model]
        subprocess.run(warm, check=True)
        again = [sys.executable, "-m", "benchmarks.gpu.warm", model, "--misses"]
        results["ahead"] = json.loads(subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True).stdout)
    ahead = results["ahead"]
    compiled, idle = len(ahead["compiled"]), ahead["idle_ms"]
    print(f"after warming: {compiled} kernels compiled, {ahead['found']} found, an idle call takes {idle} ms")
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    if ahead["compiled"]:
        raise SystemExit(f"compiled although all should have been: {', '.join(ahead['compiled'])}")


if __name__ == "__main__":
    main()
