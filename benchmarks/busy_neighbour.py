"""What a busy program on the same cores costs: decoding alone and beside one busy loop.

    python benchmarks/busy_neighbour.py --json

One engine for each way to choose threads (as many as others leave, one, all cores), in a process of its own; batch 1,
greedy. The busy loop is one Python process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from firsttoken.cli.report import header

BUSY_LOOP = "import time\nend = time.time() + 120\nwhile time.time() < end: pass"
SETTLE_S = 1.5  # the governor of threads looks twice a second


def measure(threads: int | None, tokens: int) -> dict[str, Any]:
    """Gaps (ms) and tokens/s of one engine, alone and beside the busy loop."""
    from firsttoken import LLM, SamplingParams

    def decode(count: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        began = time.perf_counter()
        metrics = llm.generate("The sea was calm that day, and", params)[0].metrics
        seconds = time.perf_counter() - began
        return {"itl_ms": metrics["itl_ms"], "tokens_per_s": round(count / seconds, 1)}

    with LLM("smollm2", offline=True, **({} if threads is None else {"threads": threads})) as llm:
        decode(tokens)
        alone = decode(tokens)
        with subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) as neighbour:
            try:
                until = time.time() + SETTLE_S
                while time.time() < until:
                    decode(8)
                beside = decode(tokens)
            finally:
                neighbour.kill()
    return {"alone": alone, "beside": beside}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.threads, options.tokens)))
        return 0
    cores = len(os.sched_getaffinity(0))
    results: dict[str, Any] = {}
    for name, threads in (("as others leave", None), ("one", 1), ("all cores", cores)):
        command = [sys.executable, __file__, "--one", "--tokens", str(options.tokens)]
        command += [] if threads is None else ["--threads", str(threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results[name] = json.loads(done.stdout)
    if options.json:
        print(
            json.dumps({**header(model="smollm2", batch=1, output=options.tokens), "cores": cores, "threads": results})
        )
        return 0
    for name, found in results.items():
        for when, figures in found.items():
            gaps = figures["itl_ms"]
            shown = f"gap p50 {gaps['p50']:.1f} p99 {gaps['p99']:.1f} ms"
            print(f"{name:16} {when:7} {figures['tokens_per_s']:6.1f} tokens/s, {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
