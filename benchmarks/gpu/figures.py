"""Every figure of `docs/performance.md` that one GPU gives, by one command, each beside its target.

    python -m benchmarks.gpu.figures --output benchmarks/results/h200 [--only NAME ...] [--seconds 420]

Commands run one after the other, the most telling first, each in a process of its own that ends at its limit; with
``--seconds`` none is started that could not end in time. Every one leaves a JSON file in the folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.cases import Case, Places, Target, run, verdicts

BENCH = ("firsttoken.cli.main", "bench")
LARGE, SMALL = "random:llama-3.1-8b", "random:llama-3.2-1b"
FOLDER = Path(tempfile.gettempdir()) / "firsttoken-weights-8b"
CLASSES = Path(__file__).parent / "classes.toml"


def _latency(name: str, model: str, *options: str, targets: tuple[Target, ...]) -> Case:
    words = (*BENCH, "latency", model, "--warmup", "3", *options, "--output-json", "{out}")
    return Case(f"latency_{name}", words, 60, targets)


def _load(name: str, rate: str, seed: str, seconds: str, *options: str, targets: tuple[Target, ...]) -> Case:
    """As many requests at once as such rates bring."""
    words = (*BENCH, "load", LARGE, "--rate", rate, "--seed", seed, "--seconds", seconds, "--warmup", "4")
    more = ("--max-num-seqs", "128", *options, "--output-json", "{out}")
    return Case(f"load_{name}", (*words, *more), 80, targets)


GAP = "tpot_ms.p50"
ITL = "itl_ms.p99"
TTFT = "ttft_ms.p50"
CASES = (
    Case("warm_8b", ("firsttoken.cli.main", "warm", LARGE), 120),
    _latency("8b_b1_512", LARGE, targets=(Target(GAP, 4.05), Target(TTFT, 12), Target("start_s", 6))),
    _latency("8b_b1_2048", LARGE, "--input", "2048", "--output", "16", targets=(Target(TTFT, 44.5),)),
    _latency("8b_b1_8192", LARGE, "--input", "8192", "--output", "16", targets=(Target(TTFT, 202),)),
    _latency("8b_b8_512", LARGE, "--batch", "8", "--repeat", "3", targets=(Target(GAP, 4.5),)),
    _latency(
        "8b_b64_512",
        LARGE,
        *("--batch", "64", "--repeat", "4"),
        targets=(Target(GAP, 8.2), Target(TTFT, 360), Target("tokens_per_s_median", 5800, more=True)),
    ),
    _load("8b_40", "40", "1", "12", targets=(Target("ttft_ms.p99", 420), Target(ITL, 18), Target("e2e_ms.p99", 2700))),
    _load("8b_40_seed2", "40", "2", "12", targets=(Target("ttft_ms.p99", 420), Target(ITL, 18))),
    _load("8b_256_32_120", "120", "1", "8", "--mix", "256:32", targets=(Target("e2e_ms.p99", 842),)),
    _load(
        "8b_classes",
        *("34", "1", "12", "--targets", str(CLASSES)),
        *("--beside", "bot=p0,3,256:64", "--beside", "car=p0,3,64:32"),
        targets=(Target("beside.bot.ttft_ms.p99", 80), Target("beside.car.e2e_ms.p99", 120)),
    ),
    Case("warm_1b", ("firsttoken.cli.main", "warm", SMALL), 120),
    _latency("1b_b1_512", SMALL, targets=(Target(GAP, 0.80), Target("host_us_per_step", 60))),
    _latency("8b_b1_deterministic", LARGE, "--deterministic", targets=()),
    _latency("8b_b8_deterministic", LARGE, "--deterministic", "--batch", "8", "--repeat", "3", targets=()),
    _latency("1b_b64_512", SMALL, "--batch", "64", "--repeat", "3", targets=(Target(GAP, 3.57),)),
    Case("prefill_8b", ("benchmarks.gpu.prefill", LARGE, "--output", "{out}"), 60),
    Case("profiles_8b", ("benchmarks.gpu.profiles", LARGE, "--output", "{out}"), 60),
    Case("attention", ("benchmarks.gpu.attention", "--quick", "--output", "{out}"), 90),
    Case("where_8b", ("benchmarks.gpu.where", LARGE, "--output", "{out}"), 60),
    Case("overlap_8b", ("benchmarks.gpu.overlap", LARGE, "--output", "{out}"), 90),
    Case("products", ("benchmarks.gpu.products", "--output", "{out}"), 60),
    Case("steps", (*BENCH, "steps", LARGE, "--output", "{out}"), 180),
    Case("layout", (*BENCH, "layout", "--device", "cuda", "--output-json", "{out}"), 60),
    Case("sampling", ("benchmarks.gpu.sampling", "--quick", "--output", "{out}"), 70),
    Case("right", ("benchmarks.gpu.right", "--output", "{out}"), 120),
    Case("limits", ("benchmarks.gpu.limits", LARGE, "--output", "{out}"), 150),
    Case("weights_8b", ("benchmarks.gpu.weights", "--folder", str(FOLDER), "--output", "{out}"), 150),
    Case("warm_starts_8b", ("benchmarks.gpu.warm", LARGE, "--output", "{out}"), 200),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing that could take longer")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    failed = 0
    places = Places(arguments.output)
    for case in CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        if time.monotonic() - began + case.limit_s > arguments.seconds:
            print(f"{case.name}: left out, it could take {case.limit_s} s", flush=True)
            continue
        took = run(case, places)
        failed += took.problem is not None
        print(f"{case.name}: {took.problem or f'{took.seconds:.1f} s'}", flush=True)
        for line in verdicts(case, places):
            print(f"  {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
