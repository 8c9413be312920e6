"""What the KV cache's book-keeping costs a request with a long prompt, in CPU time of one thread.

A pool of ``--blocks`` blocks of 16 tokens is full of other chains; a prompt of ``--tokens`` tokens is cached but for
its last one. Told are the look-up (`probe`), an admission that finds all of it (look-up included), its release, an
admission that finds nothing and evicts as much as it takes, and the registration of the prompt (`commit`). The least
of ``--rounds``, as others' work on the machine only adds.

    python -m benchmarks.kv_index --json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import thread_time_ns
from typing import Any

from firsttoken.core.kv_format import KVFormat
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kvcache import KVCache
from firsttoken.version import __version__

FORMAT = KVFormat(dtype="bfloat16", layers=32, kv_heads=8, head_dim=128)
OTHER_TOKENS = 4096
VOCABULARY = 128_000


class Best:
    """The least time of each thing that is measured, in ms."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = thread_time_ns()
        yield
        took = (thread_time_ns() - began) / 1e6
        self.ms[name] = min(self.ms.get(name, took), took)


def numbered() -> Callable[[list[int]], Request]:
    """Makes requests with ids of their own."""
    count = 0

    def request(tokens: list[int]) -> Request:
        nonlocal count
        count += 1
        prompt = array("I", tokens).tobytes()
        return Request(EngineRequest(id=count, prompt=prompt, params=SamplingParams(), seed=0, max_tokens=10))

    return request


def chain(number: int, tokens: int) -> list[int]:
    """A prompt that shares no beginning with other numbers."""
    return [(number * 7919 + place) % VOCABULARY for place in range(tokens)]


def measure(tokens: int, blocks: int, shard_tokens: int, rounds: int) -> dict[str, float]:
    """Least times in ms."""
    kv = KVCache(FORMAT, blocks, model="none", shard_tokens=lambda request: shard_tokens)
    request, best = numbered(), Best()

    def serve(one: Request, name: str = "") -> None:
        with best.of(f"admit_{name}_ms"):
            admission = kv.admit(one)
        if admission is None:
            raise SystemExit(f"{tokens} tokens do not fit into {blocks} blocks: give more --blocks")
        one.num_computed = one.num_tokens
        with best.of(f"commit_{name}_ms"):
            kv.commit(one)
        with best.of(f"release_{name}_ms"):
            kv.release(one)

    others = 0
    for others in range(blocks * FORMAT.block_tokens // OTHER_TOKENS + 1):
        serve(request(chain(others, OTHER_TOKENS)))
    best.ms.clear()
    for number in range(others + 1, others + 1 + rounds):
        serve(request(chain(number, tokens)), "miss")
        for _ in range(4):
            again = request([*chain(number, tokens - 1), VOCABULARY])
            with best.of("lookup_ms"):
                probe = kv.probe(again)
            if probe.match.num_blocks != (tokens - 1) // FORMAT.block_tokens:
                raise RuntimeError(f"of {tokens} tokens only {probe.match.num_blocks} blocks were found")
            serve(again, "hit")
    kv.check()
    return {name: round(ms, 4) for name, ms in sorted(best.ms.items())}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 32_768, 131_072])
    parser.add_argument("--blocks", type=int, default=60_000)
    parser.add_argument("--shard-tokens", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there too")
    args = parser.parse_args(argv)
    figures = {
        f"shards_{size}": {
            f"tokens_{tokens}": measure(tokens, args.blocks, size, args.rounds) for tokens in args.tokens
        }
        for size in args.shard_tokens
    }
    result: dict[str, Any] = {
        "benchmark": "kv_index",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "python": platform.python_version(),
        "blocks": args.blocks,
        "figures": figures,
    }
    text = json.dumps(result, indent=1)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n", encoding="utf-8")
    if args.json:
        print(text)
    else:
        for size, by_tokens in figures.items():
            for tokens, times in by_tokens.items():
                print(size, tokens, *(f"{name}={ms:.3f}" for name, ms in times.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
