"""What is promised to each class when half as many requests again come as can be served, in the simulator.

    python benchmarks/overload.py --json

Capacity is the highest rate at which first-come-first-served with 2,048 token rows a step keeps 99 % of the requests
within 1 s and 100 ms. At 1.5 x that, with a fifth of class p0, p0's first tokens are compared with those of the same p0
requests alone on an empty engine. Exit code 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from firsttoken.bench.arrivals import Mix
from firsttoken.cli.bench_load import DEFAULT_MIX
from firsttoken.cli.report import header
from firsttoken.core.clock import NS_PER_MS, NS_PER_S
from firsttoken.core.service import ClassTargets, ServiceClass, Targets
from firsttoken.devices.cuda import POLICY
from firsttoken.observability.percentiles import percentile
from firsttoken.scheduler import PlannedStep
from firsttoken.simulate.figures import ClassFigures
from firsttoken.simulate.frontier import capacity
from firsttoken.simulate.gpu import GPU, model_gpu, packaged_table
from firsttoken.simulate.policies import Policy, find_policy
from firsttoken.simulate.run import EngineShape, simulate
from firsttoken.simulate.workload import poisson_jobs, with_classes

CARRIED = Targets(p2=ClassTargets(ttft_p99=1000.0, itl_p99=100.0))
PROMISED = Targets(
    p0=ClassTargets(ttft_p99=80.0, itl_p99=20.0, max_queue=10.0, weight=4.0), p2=ClassTargets(ttft_p99=10_000.0)
)
OVER, SHARE_P0, SLOWER = 1.5, 0.2, 1.2
LEAST_PREFILL = 0.1
# The queue has built up by then.
WARM_UP = 0.25


class Watch:
    """Prompt tokens of each class in each second, and the longest step."""

    def __init__(self) -> None:
        self.tokens: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.longest_ms = 0.0

    def __call__(self, planned: PlannedStep, began_ns: int, ends_ns: int) -> None:
        self.longest_ms = max(self.longest_ms, (ends_ns - began_ns) / NS_PER_MS)
        for work, request in zip(planned.plan.work, planned.requests, strict=True):
            if work.count > 1 or not work.sample:
                self.tokens[began_ns // NS_PER_S][request.service] += work.count

    def least_share(self, service: ServiceClass, first_s: int, last_s: int) -> float:
        seconds = [self.tokens[second] for second in range(first_s, last_s)]
        return min(found[service] / max(sum(found.values()), 1) for found in seconds)


def overload(policy_name: str, gpu: GPU, seconds: float, seed: int) -> dict[str, Any]:
    mix = Mix.parse(DEFAULT_MIX)
    engine = EngineShape(
        kv_blocks=gpu.table.kv_blocks,
        max_num_seqs=64,
        max_model_len=131072,
        in_flight=POLICY.in_flight,
        host_ms=gpu.sustained.host_ms,
    )
    fcfs = _policy("fcfs-2048", gpu)
    rate = capacity(fcfs, engine, gpu.step_time, CARRIED, mix, seconds=seconds, seed=seed)
    shares = {ServiceClass.P0: SHARE_P0, ServiceClass.P2: 1 - SHARE_P0}
    jobs = with_classes(poisson_jobs(OVER * rate, seconds, mix, seed), shares, seed)
    watch = Watch()
    crowd = simulate(jobs, _policy(policy_name, gpu), engine, gpu.step_time, PROMISED, watch=watch, admission=True)
    p0_jobs = [job for job in jobs if job.service is ServiceClass.P0]
    alone = simulate(p0_jobs, _policy(policy_name, gpu), engine, gpu.step_time, PROMISED).classes["p0"]
    p0, p2 = crowd.classes["p0"], crowd.classes["p2"]
    most_ttft = SLOWER * _p99(alone.ttft_ms) + watch.longest_ms
    share = watch.least_share(ServiceClass.P2, round(WARM_UP * seconds), round(jobs[-1].at_ns / NS_PER_S))
    checks = {
        "p0_ttft_p99_ms": _check(_p99(p0.ttft_ms), most=most_ttft),
        "p0_itl_p99_ms": _check(_p99(p0.itl_ms), most=PROMISED.p0.itl_p99 or 0.0),
        "p2_latest_start_ms": _check(p2.start_ms[-1], most=PROMISED.p2.starts_within),
        "p2_least_share_of_prefill": _check(share, least=LEAST_PREFILL),
    }
    return {
        "policy": policy_name,
        "capacity_rps": rate,
        "offered_rps": OVER * rate,
        "refused": dict(crowd.refused),
        "longest_step_ms": watch.longest_ms,
        "p0_alone": _figures(alone),
        "p0": _figures(p0),
        "p2": _figures(p2),
        "preemptions": crowd.preemptions,
        "checks": checks,
        "pass": all(check["pass"] for check in checks.values()),
    }


def _policy(name: str, gpu: GPU) -> Policy:
    """A new one each time: it may learn."""
    return find_policy(name, POLICY.budget, gpu.alone)


def _check(value: float, *, most: float | None = None, least: float | None = None) -> dict[str, Any]:
    held = value <= most if most is not None else value >= (least or 0.0)
    return {"value": value, "most" if most is not None else "least": least if most is None else most, "pass": held}


def _figures(figures: ClassFigures) -> dict[str, Any]:
    result = figures.result(1)
    return {name: result[name] for name in ("requests", "good", "start_ms", "ttft_ms", "itl_ms")}


def _p99(values: list[float]) -> float:
    return percentile(values, 0.99)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", default="default")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    gpu = model_gpu(packaged_table("h200", "llama-3.1-8b"))
    found = overload(options.policy, gpu, options.seconds, options.seed)
    if options.json:
        head = header(device_name=gpu.table.device_name, model=gpu.table.model, seed=options.seed)
        print(json.dumps({**head, "mix": DEFAULT_MIX, "seconds": options.seconds, **found}))
    else:
        print(
            f"capacity {found['capacity_rps']:.1f} requests/s, offered {found['offered_rps']:.1f}, {found['refused']}"
        )
        for name, check in found["checks"].items():
            bound = f"at most {check['most']:.1f}" if "most" in check else f"at least {check['least']:.2f}"
            print(f"{name:28}{check['value']:>10.2f}  {bound:20}{'held' if check['pass'] else 'BROKEN'}")
    return 0 if found["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
