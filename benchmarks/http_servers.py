"""What ``--server granian`` costs beside uvicorn with our own protocol: both serve at once, and are asked in turns.

    python benchmarks/http_servers.py --json

The API processes serve the scripted engine, each in a process of its own, as `http_streaming` has it. **First token**:
one caller, and what is added to the engine's own time (`http_streaming`). **A token**: CPU time of the API process for
each token that it streams (`http_costs`). Ratios are of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.http_costs import Place, server, token_cost
from benchmarks.http_streaming import ALONE_TOKENS, Caller, request_bytes
from firsttoken.cli.report import header
from firsttoken.observability.percentiles import percentiles

SERVERS = {"uvicorn": "api", "granian": "granian"}


async def first_tokens(port: int, count: int) -> list[float]:
    """What was added to the first token of so many requests that came one by one, in ms."""
    transport, caller = await asyncio.get_running_loop().create_connection(Caller, "127.0.0.1", port)
    request = request_bytes(ALONE_TOKENS)
    await caller.ask(request)
    samples = [await caller.ask(request) for _ in range(count)]
    transport.close()
    return [sample.ttft - sample.engine for sample in samples]


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    added: dict[str, list[float]] = {name: [] for name in SERVERS}
    cost: dict[str, list[float]] = {name: [] for name in SERVERS}
    with server(options.step_ms, "api") as uvicorn, server(options.step_ms, "granian") as granian:
        places = {"uvicorn": uvicorn, "granian": granian}
        for _ in range(options.rounds):
            for name, (port, pid) in places.items():
                added[name] += await first_tokens(port, options.requests)
                us, _ = await token_cost(Place(port, pid, "chat"), options.streams)
                cost[name].append(us)
    told: dict[str, Any] = {
        name: {"first_token_added_ms": percentiles(added[name]), "us_per_token": statistics.median(cost[name])}
        for name in SERVERS
    }
    told["ratio"] = {
        "first_token_added": statistics.median(added["granian"]) / statistics.median(added["uvicorn"]),
        "us_per_token": statistics.median(cost["granian"]) / statistics.median(cost["uvicorn"]),
    }
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--streams", type=int, default=32, help="while a token's cost is measured (default: 32)")
    parser.add_argument("--requests", type=int, default=50, help="of one caller in a round (default: 50)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of the scripted engine's step")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(options))
    if options.json:
        print(
            json.dumps({**header(device_name="cpu"), "streams": options.streams, "step_ms": options.step_ms, **found})
        )
        return 0
    for name in SERVERS:
        added, cost = found[name]["first_token_added_ms"], found[name]["us_per_token"]
        print(f"{name:8} first token + {added['p50']:.2f} ms (p99 {added['p99']:.2f})   {cost:.1f} us a token")
    print("granian / uvicorn: " + "   ".join(f"{name} {ratio:.2f}" for name, ratio in found["ratio"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
