"""What KV in host memory and in files saves of the time to the first token, and what keeping it costs others' tokens.

`ttft`: prompts of ``--tokens`` tokens, each asked when its KV is nowhere, then when it lies in host memory (others have
pushed it out of the device), then, by an engine that has just started, when it lies in files; the page cache is told
to forget those first. In ms, from the request to its first token. `parts` is the account of the median one.

`tpot`: ``--users`` requests at once, again and again, with tiers and without, in turns; ms from token to token.

    python -m benchmarks.kv_tiers --output benchmarks/results/kv/tiers.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

from firsttoken import LLM, SamplingParams
from firsttoken.cli.report import header

MIB = 1 << 20


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(1000, 40_000) for _ in range(tokens)] for _ in range(count)]


def ask(llm: LLM, prompt: list[int]) -> tuple[float, Any]:
    """Milliseconds to the one token that is asked for, and the output."""
    began = perf_counter()
    [output] = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=1))
    return (perf_counter() - began) * 1e3, output


def forget(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def figures(asked: list[tuple[float, Any]]) -> dict[str, Any]:
    _, output = sorted(asked, key=lambda each: each[0])[len(asked) // 2]
    parts = ("queue_ms", "kv_ms", "prefill_ms", "unaccounted_ms")
    return {
        "parts": {part: round(output.metrics[part], 1) for part in parts},
        "ttft_ms": round(median(ms for ms, _ in asked), 1),
        "all_ms": [round(ms, 1) for ms, _ in asked],
        "cached_tokens": [output.num_cached_tokens for _, output in asked],
    }


def time_to_first_token(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    wanted = prompts(options.rounds, options.tokens, seed=1)
    others = prompts(3, options.tokens, seed=2)
    engine = {
        "device": "cpu",
        "threads": options.threads,
        "offline": True,
        "kv_memory": options.kv_memory * MIB,
        "kv_host_memory": options.host_memory * MIB,
        "kv_disk": str(folder),
        "max_num_seqs": 8,
    }
    found: dict[str, Any] = {}
    with LLM(options.model, **engine) as llm:
        ask(llm, others[0])
        found["computed"] = figures([ask(llm, prompt) for prompt in wanted])
        for other in others:
            ask(llm, other)
        sleep(1)
        found["host"] = figures([ask(llm, prompt) for prompt in wanted])
    forget(folder)
    with LLM(options.model, **engine) as llm:
        ask(llm, prompts(1, 200, seed=3)[0])
        found["disk"] = figures([ask(llm, prompt) for prompt in wanted])
    for tier in ("host", "disk"):
        found[f"{tier}_speedup"] = round(found["computed"]["ttft_ms"] / found[tier]["ttft_ms"], 1)
    return found


def time_per_token(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    plain = {"device": "cpu", "threads": options.threads, "offline": True, "kv_memory": options.kv_memory * MIB}
    tiers = {"kv_host_memory": options.host_memory * MIB, "kv_disk": str(folder)}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    taken: dict[str, list[float]] = {"off": [], "on": []}
    with LLM(options.model, **plain) as off, LLM(options.model, **plain, **tiers) as on:
        for number in range(options.rounds):
            for name, llm in (("off", off), ("on", on)) if number % 2 else (("on", on), ("off", off)):
                batch = prompts(options.users, 200, seed=100 + number)
                outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params)
                taken[name] += [output.metrics["itl_ms"]["mean"] for output in outputs]
                sleep(0.5)
    found = {name: round(median(times), 2) for name, times in taken.items()}
    return {**found, "more_percent": round((found["on"] / found["off"] - 1) * 100, 1), "users": options.users}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-memory", type=int, default=160, metavar="MIB")
    parser.add_argument("--host-memory", type=int, default=1024, metavar="MIB")
    parser.add_argument("--folder", type=Path, help="where files go (default: the system's folder for such)")
    parser.add_argument("--only", choices=("ttft", "tpot"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {**header(), "model": options.model, "tokens": options.tokens}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.only != "tpot":
            found["ttft"] = time_to_first_token(options, Path(folder))
        if options.only != "ttft":
            found["tpot_ms"] = time_per_token(options, Path(folder))
    text = json.dumps(found, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
