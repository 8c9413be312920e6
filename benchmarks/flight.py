"""What the flight recorder takes: memory of five minutes, time of a token and of a request, and of a dump.

    python -m benchmarks.flight [--steps-per-s 1000] [--rows 16] [--rate 20] [--json]

``--rate`` requests a second with prompts of ``--prompt`` tokens, as many tokens a second as ``--rows`` rows give at
``--steps-per-s``. Times are of the thread that delivers the engine's messages (``hash_us`` of another), the least of
several rounds; memory is what the interpreter's allocator says.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.request import EngineRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.step_record import StepRecord
from firsttoken.observability.flight import KEEP_S, FlightRecorder
from firsttoken.observability.step_history import StepHistory
from firsttoken.transport.messages import EngineStats, RequestDelta, StepOutputs

MIB = 1 << 20
ROUNDS = 5


def record(number: int, ns: int, rows: int) -> StepRecord:
    gap = 900_000
    return StepRecord(
        number,
        ns,
        ns + 60_000,
        ns + 90_000,
        ns + gap,
        ns + gap + 9,
        rows,
        0,
        rows * 900,
        0,
        0,
        gap,
        0,
        True,
        (),
        0,
        "d16",
    )


def request(number: int, tokens: int) -> EngineRequest:
    prompt = array("I", [number % 100_000 + i for i in range(tokens)]).tobytes()
    return EngineRequest(id=number, prompt=prompt, params=SamplingParams(), seed=0, max_tokens=1000)


def five_minutes(options: argparse.Namespace, flight: FlightRecorder) -> None:
    """All that goes through the recorder in `KEEP_S` seconds, at times that end now."""
    steps = int(KEEP_S * options.steps_per_s)
    tokens_each = max(1, round(options.rows * options.steps_per_s / options.rate))
    began = time.monotonic_ns() - int(KEEP_S * NS_PER_S)
    step_ns = NS_PER_S // options.steps_per_s
    for first in range(0, steps, 100):
        flight.steps.add(
            [record(number, began + number * step_ns, options.rows) for number in range(first, first + 100)]
        )
    for number in range(int(KEEP_S * options.rate)):
        flight.submitted([request(number, options.prompt)])
        at = began + number * NS_PER_S // options.rate
        stats = EngineStats(heartbeat_ns=at)
        for token in range(0, tokens_each, 50):
            count = min(50, tokens_each - token)
            flight.told(StepOutputs([RequestDelta(number, [1] * count)], stats), at + token * step_ns)
        flight.told(StepOutputs([RequestDelta(number, [], finish_reason="stop")], stats), time.monotonic_ns())


def least_us(work: Callable[[], int]) -> float:
    """Of `ROUNDS`; ``work`` says how many it did."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        count = work()
        best = min(best, (time.thread_time_ns() - began) / count / 1e3)
    return round(best, 3)


def costs(prompt: int) -> dict[str, float]:
    flight = FlightRecorder(StepHistory())
    requests = [request(number, prompt) for number in range(64)]
    step = StepOutputs([RequestDelta(one.id, [1]) for one in requests], EngineStats(heartbeat_ns=1))

    def submit() -> int:
        flight._unhashed, flight._unhashed_bytes = [], 0
        for one in requests:
            flight.submitted([one])
        return len(requests)

    def tokens() -> int:
        for _ in range(500):
            flight.told(step, 5)
        return 500 * len(requests)

    def hashes() -> int:
        flight._hash(flight._unhashed, 0)
        return len(flight._unhashed)

    return {"submit_us": least_us(submit), "token_us": least_us(tokens), "hash_us": least_us(hashes)}


def dump(flight: FlightRecorder) -> dict[str, float]:
    """``asking_ms`` of CPU time, ``dump_s`` in all, and by how much a thread that sleeps for a millisecond at a time
    meanwhile wakes too late: the ``median`` and the ``most``, and for comparison the same without a dump."""
    gc.collect()
    until = time.perf_counter() + 1
    quiet = lateness(lambda: time.perf_counter() > until)
    began, asked = time.perf_counter(), time.thread_time_ns()
    dumping = flight.dump("a benchmark")
    asking = time.thread_time_ns() - asked
    late = lateness(dumping.done)
    return {
        "asking_ms": round(asking / 1e6, 2),
        "dump_s": round(time.perf_counter() - began, 2),
        "late_median_ms": late[len(late) // 2],
        "late_most_ms": late[-1],
        "quiet_median_ms": quiet[len(quiet) // 2],
        "quiet_most_ms": quiet[-1],
    }


def lateness(done: Callable[[], bool]) -> list[float]:
    """In ms, ascending."""
    late = []
    while not done():
        due = time.perf_counter() + 0.001
        time.sleep(0.001)
        late.append(round((time.perf_counter() - due) * 1e3, 2))
    return sorted(late)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps-per-s", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rate", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    result: dict[str, Any] = costs(options.prompt)
    with tempfile.TemporaryDirectory() as folder:
        flight = FlightRecorder(StepHistory(), Path(folder))
        tracemalloc.start()
        five_minutes(options, flight)
        result["memory_mib"] = round(tracemalloc.get_traced_memory()[0] / MIB, 1)
        tracemalloc.stop()
        result |= dump(flight)
        [path] = Path(folder).iterdir()
        result |= {
            "file_mib": round(path.stat().st_size / MIB, 1),
            "steps": len(flight.steps),
            "packed_steps_mib": round(flight.steps.packed_bytes / MIB, 1),
            "requests": flight.num_requests,
        }
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
