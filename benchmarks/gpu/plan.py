"""What `firsttoken plan` says against the peak of engines on this GPU.

    python -m benchmarks.gpu.plan --output benchmarks/results/h200/plan.json

Each engine has KV for its users and no more, runs all of them to their full length, and then idles until its graphs
are captured. ``peak_mib`` is what torch's allocator held at most (`EngineStats.peak_memory`), which is compared with
the plan without ``runtime``; what the driver says is used beside it is ``runtime_mib``, measured.
"""

from __future__ import annotations

import argparse
import subprocess
import threading
from pathlib import Path
from typing import Any

from benchmarks.plan import MIB, Case, compare, plan_of, write
from firsttoken.cli.plan import find_machine
from firsttoken.core.engine_args import EngineArgs

CASES = tuple(
    # Held until all are there: the first step is then as large as steps become.
    Case(
        EngineArgs(model=model, device="cuda", quantization=quantization, batch_window="50ms"),
        context,
        users,
        settle_s=25.0,
    )
    for model, context, users, quantization in (
        ("random:llama-3.2-1b", 512, 1, "auto"),
        ("random:llama-3.2-1b", 2048, 64, "auto"),
        ("random:llama-3.2-1b", 32768, 8, "auto"),
        ("random:llama-3.1-8b", 512, 1, "auto"),
        ("random:llama-3.1-8b", 8192, 16, "auto"),
        ("random:llama-3.1-8b", 8192, 64, "auto"),
        ("random:llama-3.1-8b", 8192, 16, "int4"),
        ("random:llama-3.1-8b", 8192, 16, "fp8"),
    )
)
_PERIOD_S = 0.5


class DriverMemory:
    """The most that the driver says is used, while the context is entered; ``before`` that. In MiB."""

    def __init__(self) -> None:
        self.before = self.peak = self._used()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> DriverMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self.peak = max(self.peak, self._used())

    @staticmethod
    def _used() -> int:
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return int(subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--models", nargs="+", help="only cases of these")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    name = "none"
    for case in CASES:
        if options.models and case.args.model not in options.models:
            continue
        machine = find_machine(None, case.args)
        if machine.kind != "cuda":
            parser.error("this measures on a GPU, and there is none here")
        name, plan = machine.name, plan_of(case, machine)
        with DriverMemory() as driver:
            row = compare(case, machine, plan.total - plan.runtime, plan)
        row["driver_mib"] = driver.peak - driver.before
        row["runtime_mib"] = round(row["driver_mib"] - row["peak_mib"], 1)
        row["error_with_runtime"] = round(plan.total / MIB / row["driver_mib"] - 1, 4)
        rows.append(row)
    write(options.output, rows, name)


if __name__ == "__main__":
    main()
