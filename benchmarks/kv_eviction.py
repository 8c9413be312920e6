"""How long a policy takes to evict 1,000 shards of a million, leaves first, and what its other calls take.

Shards are those of conversations of four, each used once or more over half an hour of virtual time: a leaf that leaves
lets the shard before it go. Ghosts are as many as they get. The median of ``--rounds`` evictions of
``--evict`` each is told, with the shortest and the longest, by the clock on the wall and of
the CPU. Other work on the machine only adds, so it is the shortest that says what the code takes.

    python -m benchmarks.kv_eviction --json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from pathlib import Path
from statistics import median
from time import perf_counter_ns, thread_time_ns
from typing import Any

from firsttoken.cli.report import cpu_name, header
from firsttoken.core.clock import NS_PER_S
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.eviction import POLICY_NAMES, EvictionConfig, EvictionPolicy, Shard, make_policy

CHAIN = 4
SECONDS = 1800
SHARES = (0.05, 0.15, 0.8)  # of p0, p1 and p2


class Tier:
    """Shards and what is before each; the last of each chain is on offer."""

    def __init__(self, policy: EvictionPolicy, count: int, seed: int) -> None:
        self.policy = policy
        self.before: dict[Shard, Shard] = {}
        chains = count // CHAIN
        self._rng = random.Random(seed)
        self._chains = 0
        began = perf_counter_ns()
        for number in range(chains):
            self.arrive(number * SECONDS * NS_PER_S // chains)
        self.fill_us = (perf_counter_ns() - began) / 1000 / (chains * CHAIN)

    def arrive(self, now_ns: int) -> None:
        """A chain of new shards, whose uses are all at one time."""
        rng, number = self._rng, self._chains
        self._chains += 1
        [service] = rng.choices(list(ServiceClass), SHARES)
        uses = rng.choice((1, 1, 1, 2, 3, 5))
        shard: Shard | None = None
        for place in range(CHAIN):
            new = Shard((number * CHAIN + place).to_bytes(32, "little"), 512 * place, 512, 1 << 20)
            new.service, new.used_ns = service, now_ns
            for _ in range(uses):
                new.uses += 1
                self.policy.used(new, service, now_ns)
            if shard is not None:
                self.before[new] = shard
            shard = new
        assert shard is not None
        self.policy.offer(shard, now_ns)

    def evict(self, count: int, now_ns: int) -> tuple[float, float]:
        """Milliseconds for all of it, by the wall and of the CPU: choosing, leaving, offering what was before."""
        policy, before = self.policy, self.before
        cpu, began = thread_time_ns(), perf_counter_ns()
        for _ in range(count):
            shard = policy.victim(now_ns)
            assert shard is not None
            policy.left(shard, now_ns, evicted=True)
            parent = before.pop(shard, None)
            if parent is not None:
                policy.offer(parent, now_ns)
        return (perf_counter_ns() - began) / 1e6, (thread_time_ns() - cpu) / 1e6


def measure(name: str, count: int, evict: int, rounds: int) -> dict[str, Any]:
    gc.collect()
    gc.freeze()
    gc.disable()  # as in the engine, which freezes what it starts with
    try:
        tier = Tier(make_policy(name), count, seed=1)
        now_ns = SECONDS * NS_PER_S
        ghosts = min(count // 2, EvictionConfig().ghosts)
        tier.evict(ghosts, now_ns)
        for _ in range(ghosts // CHAIN):
            tier.arrive(now_ns)
        times = []
        for _ in range(rounds):
            now_ns += NS_PER_S // 100
            times.append(tier.evict(evict, now_ns))
            for _ in range(evict // CHAIN):  # the tier stays as full as it was
                tier.arrive(now_ns)
    finally:
        gc.enable()
        gc.unfreeze()
    return {
        "policy": name,
        "shards": count,
        "evict": evict,
        "evict_ms": _spread([wall for wall, _ in times]),
        "evict_cpu_ms": _spread([cpu for _, cpu in times]),
        "fill_us_per_shard": tier.fill_us,
    }


def _spread(times: list[float]) -> dict[str, float]:
    return {"min": min(times), "p50": median(times), "max": max(times)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--evict", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--policy", nargs="+", default=list(POLICY_NAMES), choices=POLICY_NAMES)
    parser.add_argument("--target-ms", type=float, default=2.0, help="exit with 1 if the default's shortest is longer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = [measure(name, options.shards, options.evict, options.rounds) for name in options.policy]
    result = {**header(device_name=cpu_name(), target_ms=options.target_ms), "results": results}
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result))
    else:
        for each in results:
            times, cpu = each["evict_ms"], each["evict_cpu_ms"]
            spread = f"{times['p50']:.2f} ms ({times['min']:.2f} to {times['max']:.2f}), CPU {cpu['p50']:.2f} ms"
            print(f"{each['policy']:<10} {spread}, use and offer {each['fill_us_per_shard']:.2f} us a shard")
    return int(any(each["policy"] == "default" and each["evict_ms"]["min"] > options.target_ms for each in results))


if __name__ == "__main__":
    sys.exit(main())
