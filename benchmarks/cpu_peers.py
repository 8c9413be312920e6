"""firsttoken, transformers and llama.cpp on the same file and the same cores, in one run.

    python benchmarks/cpu_peers.py            # a table
    python benchmarks/cpu_peers.py --json     # one object

Each peer runs in a process of its own and keeps its model loaded; only one of them works at a time. The measures are
interleaved round by round, so that a machine that drifts slows all peers alike, and medians over the rounds are told.
Every prompt is fresh random tokens (nobody's prefix cache helps) and decoding is greedy without an end token.

Measures: ``decode_1`` and ``decode_8`` are output tokens/s (summed over the batch) while the context grows around 128
tokens; ``prefill_512`` is prompt tokens/s until the first token is known; ``ttft_32`` and ``ttft_512`` are the ms until
then, for prompts of 32 and 512 tokens.
firsttoken is measured through the whole engine, as a caller of `AsyncLLM` sees it; the peers by their own forward
calls with an argmax behind, without any server around them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from firsttoken.cli import report
from firsttoken.core.engine_args import DEFAULT_MODEL, EngineArgs

WORKER = Path(__file__).with_name("cpu_peer_worker.py")
CONTEXT = 64  # with 128 tokens of output the context grows from 64 to 192: 128 on average
MEASURES = ("decode_1", "decode_8", "prefill_512", "ttft_512", "ttft_32")
TITLES = ("decode, batch 1\ntok/s", "decode, batch 8\ntok/s", "prefill 512\ntok/s", "TTFT 512\nms", "TTFT 32\nms")
PEERS = ("firsttoken", "transformers-bf16", "transformers-fp32", "llama.cpp")
NEEDS = {"transformers-bf16": "transformers", "transformers-fp32": "transformers", "llama.cpp": "llama_cpp"}


class Peer:
    """A worker process that measures on request: one JSON object a line, each way."""

    def __init__(self, name: str, path: str, threads: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), name, "--model", path, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.info = self._receive()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}: its last words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure_round(peer: Peer, tokens: int, seed: int) -> dict[str, float]:
    """One round of all measures of one peer."""
    one = peer.ask(do="decode", batch=1, context=CONTEXT, tokens=tokens, seed=seed)
    eight = peer.ask(do="decode", batch=8, context=CONTEXT, tokens=tokens, seed=seed + 1)
    long = peer.ask(do="first_token", context=512, seed=seed + 2)
    short = peer.ask(do="first_token", context=32, seed=seed + 3)
    return {
        "decode_1": one["tokens_per_s"],
        "decode_8": eight["tokens_per_s"],
        "prefill_512": 512 / long["seconds"],
        "ttft_512": long["seconds"] * 1e3,
        "ttft_32": short["seconds"] * 1e3,
    }


def run(
    path: str, names: list[str], rounds: int, threads: int, tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Results by peer: medians, all rounds, and what each peer says of itself."""
    peers = []
    for name in names:
        say(f"starting {name}")
        peers.append(Peer(name, path, threads))
    try:
        for peer in peers:
            say(f"warming {peer.name}")
            measure_round(peer, tokens, seed=1)
        taken: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in peers}
        for number in range(rounds):
            for peer in peers:
                say(f"round {number + 1} of {rounds}: {peer.name}")
                taken[peer.name].append(measure_round(peer, tokens, seed=1000 * (number + 1)))
    finally:
        for peer in peers:
            peer.close()
    return {
        peer.name: {
            **{key: statistics.median(one[key] for one in taken[peer.name]) for key in MEASURES},
            "rounds": taken[peer.name],
            **peer.info,
        }
        for peer in peers
    }


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['model']}, {result['threads']} thread(s), medians of {result['rounds']} round(s)")
    table.add_column("", no_wrap=True)
    for title in TITLES:
        table.add_column(title, justify="right")
    for name, found in result["peers"].items():
        table.add_row(name, *(f"{found[key]:,.0f}" if found[key] >= 100 else f"{found[key]:.1f}" for key in MEASURES))
    console = Console()
    console.print(table)
    for name, why in result["skipped"].items():
        console.print(f"{name} was skipped: {why}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="an alias or a .gguf file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=int, default=128, help="tokens that each prompt decodes")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="measure only these")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    if min(options.rounds, options.threads, options.output) < 1:
        parser.error("--rounds, --threads and --output must be 1 or more")

    from firsttoken.checkpoint.locate import open_checkpoint

    checkpoint = open_checkpoint(options.model)
    if checkpoint.source != "gguf":
        parser.error(f"--model must be a GGUF file, the one form that all peers read; got a {checkpoint.source}")
    skipped = {
        name: f"the package {NEEDS[name]} is not installed (pip install -e '.[peers]')"
        for name in options.peers
        if name in NEEDS and find_spec(NEEDS[name]) is None
    }
    names = [name for name in options.peers if name not in skipped]
    peers = run(
        checkpoint.path,
        names,
        options.rounds,
        options.threads,
        options.output,
        lambda text: print(text, file=sys.stderr),
    )
    ours = peers.get("firsttoken", {})
    head = report.header(EngineArgs(model=options.model, device="cpu"))
    head.update({key: ours[key] for key in ("model", "dtype", "quantization", "kv_dtype") if key in ours})
    head["versions"] = report.versions("transformers", "llama-cpp-python")
    result = {
        **head,
        "threads": options.threads,
        "rounds": options.rounds,
        "context": CONTEXT,
        "output": options.output,
        "peers": peers,
        "skipped": skipped,
    }
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
