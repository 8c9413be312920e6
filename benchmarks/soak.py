"""Hours of virtual time through the real scheduler, KV cache and admission: nothing may leak, all must be answered.

    python benchmarks/soak.py --trace mooncake_conversation_trace.jsonl --scale 0.5 --hours 24 --json

The trace is repeated until the time is over, each round with prompts of its own. Requests are of three classes and many
tenants; some callers leave midway, some name a deadline. After each round nothing comes for a while, and the engine at
rest is looked into: invariants, the size of everything that it holds, memory. Without a trace a synthetic load is used.
Exit code 1 when something grew, or was not answered once.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from firsttoken.bench.arrivals import Mix
from firsttoken.cli.report import header
from firsttoken.core.clock import NS_PER_S
from firsttoken.core.service import ClassTargets, ServiceClass, Targets
from firsttoken.devices.cuda import POLICY
from firsttoken.kvcache.eviction import DEFAULT_POLICY
from firsttoken.observability.percentiles import percentiles
from firsttoken.simulate.gpu import GPU, model_gpu, packaged_table
from firsttoken.simulate.policies import find_policy
from firsttoken.simulate.run import EngineShape, Inside, Outcome, simulate
from firsttoken.simulate.traces import read_trace
from firsttoken.simulate.workload import MAX_BLOCK_ID, Job, poisson_jobs, speeded_up, with_classes

SHARES = {ServiceClass.P0: 0.1, ServiceClass.P1: 0.2, ServiceClass.P2: 0.7}
TARGETS = Targets(
    p0=ClassTargets(ttft_p99=2000.0, max_queue=10.0, weight=4.0),
    p1=ClassTargets(ttft_p99=10_000.0, weight=2.0),
    p2=ClassTargets(ttft_p99=30_000.0, max_waiting=256),
)
TENANTS, LEAVE, HURRY = 100, 0.1, 0.1
LONGEST_STAY_MS, DEADLINE_MS = 20_000.0, 10_000.0
# Without a trace: what comes in a minute, some of it beyond what can be served.
SYNTHETIC_MIX, SYNTHETIC_RPS, SYNTHETIC_S = "128,1024,8192:16,128,512", 25.0, 60.0
# Long enough for all that runs to end.
REST_S = 120.0
# How much more than after the first round, or than the first two hours, may be there at the end.
MORE_OBJECTS, MORE_BLOCKS, MORE_RSS_MIB = 1.1, 1.02, 64.0
# Windows of a fixed length, of the latest errors for instance, may still fill up.
WINDOWS = 512


@dataclass(frozen=True)
class Look:
    """An engine at rest: ``sizes`` counts what it holds by the place that holds it, ``blocks`` are Python's own."""

    at_s: float
    sizes: dict[str, int]
    blocks: int
    rss_mib: float


class Watch:
    """Looks into the engine once after each round."""

    def __init__(self, round_s: float) -> None:
        self.looks: list[Look] = []
        self._round_s = round_s

    def __call__(self, inside: Inside, now_ns: int) -> None:
        at_s = now_ns / NS_PER_S
        # Nothing comes in the last part of a round; a pause before that is no end of a round.
        done = int(at_s / self._round_s)
        if at_s - done * self._round_s < self._round_s - REST_S or done < len(self.looks):
            return
        check(inside)
        self.looks.append(Look(at_s, held(inside), sys.getallocatedblocks(), rss_mib()))


def check(inside: Inside) -> None:
    """Raise `AssertionError` unless an engine without requests holds nothing."""
    scheduler, kv, admission = inside
    kv.check()
    kv.check_unused()
    assert not scheduler.num_running, f"{scheduler.num_running} requests run"
    assert not scheduler.num_waiting, f"{scheduler.num_waiting} requests wait"
    assert not scheduler.num_in_flight, f"{scheduler.num_in_flight} steps are in flight"
    if admission is not None:
        backlog = admission.backlog
        for name in ("waiting", "waiting_tokens", "running", "running_tokens", "fresh"):
            assert not any(getattr(backlog, name)), f"the backlog still counts {name}: {getattr(backlog, name)}"


def held(root: object) -> dict[str, int]:
    """How many entries each container has that can be reached from ``root``, by the attribute that holds it, and how
    many objects of each of our classes there are."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [("", root)]
    while stack:
        place, value = stack.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | None):
            continue
        seen.add(id(value))
        kind = type(value)
        if isinstance(value, Mapping):
            found[place] += len(value)
            stack += [(place, each) for pair in value.items() for each in pair]
        elif isinstance(value, Sequence | set | frozenset) and not isinstance(value, memoryview):
            found[place] += len(value)
            stack += [(place, each) for each in value]
        elif kind.__module__.startswith("firsttoken."):
            found[f"{kind.__name__} objects"] += 1
            stack += [(f"{kind.__name__}.{name}", each) for name, each in _attributes(value)]
    return dict(sorted(found.items()))


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)


def rss_mib() -> float:
    """Memory of this process that is resident now. Linux only; 0 elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * 4096 / 2**20


def repeated(jobs: Sequence[Job], seconds: float, seed: int) -> tuple[list[Job], float]:
    """``jobs`` again and again for ``seconds``, with a rest after each round, and how long a round is. Each round has
    prompts, callers and patience of its own."""
    rng = random.Random(f"soak {seed}")
    round_s = jobs[-1].at_ns / NS_PER_S + REST_S
    ids = 1 + max((max(job.blocks) for job in jobs if job.blocks), default=0)
    rounds = max(1, round(seconds / round_s))
    if rounds * ids > MAX_BLOCK_ID:
        raise SystemExit(f"{rounds} rounds of {ids} blocks have more ids than there are: give fewer --hours")
    made = [
        replace(
            job,
            at_ns=job.at_ns + round(number * round_s * NS_PER_S),
            blocks=tuple([block + number * ids for block in job.blocks]),
            tenant=f"{number}/{int(TENANTS * rng.random() ** 3)}",
            patience_ms=1 + LONGEST_STAY_MS * rng.random() if rng.random() < LEAVE else 0.0,
            deadline_ms=DEADLINE_MS if rng.random() < HURRY else 0.0,
        )
        for number in range(rounds)
        for job in with_classes(jobs, SHARES, seed + number)
    ]
    return made, round_s


def synthetic(seed: int) -> list[Job]:
    """A minute in which more comes than can be served at once; a part of the prompts begins alike."""
    rng = random.Random(f"prefixes {seed}")
    jobs = poisson_jobs(SYNTHETIC_RPS, SYNTHETIC_S, Mix.parse(SYNTHETIC_MIX), seed)
    return [replace(job, blocks=_blocks(number, job, rng)) for number, job in enumerate(jobs)]


def _blocks(number: int, job: Job, rng: random.Random) -> tuple[int, ...]:
    own = [1000 + 100 * number + place for place in range(-(-job.input // 512))]
    return (rng.randrange(20), *own[1:]) if rng.random() < 0.5 else tuple(own)


def soak(
    jobs: Sequence[Job], gpu: GPU, *, hours: float, seed: int, kv_blocks: int = 0, eviction: str = DEFAULT_POLICY
) -> dict[str, Any]:
    """``kv_blocks`` 0: what the GPU has."""
    made, round_s = repeated(jobs, hours * 3600, seed)
    engine = EngineShape(
        kv_blocks=kv_blocks or gpu.table.kv_blocks,
        max_num_seqs=64,
        max_model_len=131072,
        in_flight=POLICY.in_flight,
        host_ms=gpu.sustained.host_ms,
        eviction=eviction,
    )
    watch = Watch(round_s)
    began = time.monotonic()
    outcome = simulate(
        made,
        find_policy("default", POLICY.budget, gpu.alone),
        engine,
        gpu.step_time,
        TARGETS,
        admission=True,
        at_rest=watch,
    )
    answered = answers(outcome)
    checks = {"answered_once": _check(sum(answered.values()), most=len(made), least=len(made)), **grown(watch.looks)}
    return {
        "requests": len(made),
        "answered": answered,
        "rounds": len(watch.looks),
        "round_s": round_s,
        "virtual_s": outcome.virtual_ns / NS_PER_S,
        "wall_s": time.monotonic() - began,
        "steps": outcome.steps,
        "output_tokens": outcome.output_tokens,
        "preemptions": outcome.preemptions,
        "kv": {"hit_ratio": outcome.hit_ratio, "evictions": outcome.evictions},
        "ttft_ms": {name: percentiles(figures.ttft_ms) for name, figures in sorted(outcome.classes.items())},
        "looks": [asdict(look) for look in watch.looks],
        "checks": checks,
        "pass": all(check["pass"] for check in checks.values()),
    }


def answers(outcome: Outcome) -> dict[str, int]:
    """How requests ended."""
    finished = sum(len(figures.ttft_ms) for figures in outcome.classes.values())
    return {"finished": finished, "left": outcome.left, "expired": outcome.expired, **outcome.refused}


def grown(looks: Sequence[Look]) -> dict[str, Any]:
    """Whether anything is larger at the end than after the first round."""
    first, last = looks[0], looks[-1]
    checks = {
        "python_blocks": _check(last.blocks, most=round(MORE_BLOCKS * first.blocks)),
        "rss_mib": _check(last.rss_mib, most=first.rss_mib + MORE_RSS_MIB),
    }
    for place, count in last.sizes.items():
        most = round(MORE_OBJECTS * max(look.sizes.get(place, 0) for look in looks[: -(-len(looks) // 2)])) + WINDOWS
        if count > most:
            checks[place] = _check(count, most=most)
    return checks


def _check(value: float, *, most: float, least: float = 0) -> dict[str, Any]:
    return {"value": value, "most": most, "pass": least <= value <= most}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, metavar="FILE", help="instead of a synthetic load")
    parser.add_argument("--scale", type=float, default=1.0, help="speeds the trace's arrivals up (default: 1)")
    parser.add_argument("--hours", type=float, default=24.0, help="of virtual time, in whole rounds (default: 24)")
    parser.add_argument("--kv-blocks", type=int, default=0, help="KV blocks of 16 tokens (default: what the GPU has)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    gpu = model_gpu(packaged_table("h200", "llama-3.1-8b"))
    jobs = speeded_up(read_trace(options.trace), options.scale) if options.trace else synthetic(options.seed)
    found = soak(jobs, gpu, hours=options.hours, seed=options.seed, kv_blocks=options.kv_blocks)
    if options.json:
        head = header(device_name=gpu.table.device_name, model=gpu.table.model, seed=options.seed)
        load = {"trace": options.trace.name if options.trace else None, "scale": options.scale, "hours": options.hours}
        print(json.dumps({**head, **load, **found}))
    else:
        print(f"{found['requests']} requests in {found['virtual_s'] / 3600:.1f} h: {found['answered']}")
        print(f"{found['steps']} steps, {found['preemptions']} preemptions, {found['wall_s']:.0f} s of real time")
        for name, check_ in found["checks"].items():
            print(
                f"{name:30}{check_['value']:>14.1f}  at most {check_['most']:.1f}  {'' if check_['pass'] else 'GREW'}"
            )
    return 0 if found["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
