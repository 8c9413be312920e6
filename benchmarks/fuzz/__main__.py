"""Fuzz what reads other people's bytes.

    python -m benchmarks.fuzz --seconds 600 --target http
    python -m benchmarks.fuzz --seconds 60                      # each target for a minute

Runs the targets of `benchmarks.fuzz.targets` under atheris (``pip install 'firsttoken[fuzz]'``), each in a process of
its own, beginning with what ``tests/fuzz/corpus`` keeps. What it finds interesting goes into ``--work`` (.fuzz, which
git ignores); an input that raises is printed and kept there, and the exit code is 1. Move it to
``tests/fuzz/corpus/TARGET`` under a name that says what it was, and the tests replay it for good. ``--keep N`` adds
N new inputs of those that reach further.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fuzz.targets import TARGETS
from firsttoken.cli.report import header

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
# Longer than this for one input is a fault, too.
SLOW_S = 10
MEMORY_MIB = 2048


def fuzz(name: str, seconds: int, work: Path) -> dict[str, Any]:
    """What so many seconds of a target gave: inputs tried, those of interest, and the fault, if there was one."""
    found, faults = work / name, work / "faults"
    found.mkdir(parents=True, exist_ok=True)
    faults.mkdir(exist_ok=True)
    kept = CORPUS / name
    folders = [str(found), *([str(kept)] if kept.is_dir() else [])]
    limits = [f"-max_total_time={seconds}", f"-max_len={TARGETS[name].max_bytes}", f"-timeout={SLOW_S}"]
    limits += [f"-rss_limit_mb={MEMORY_MIB}", f"-artifact_prefix={faults}/{name}-", "-print_final_stats=1"]
    if TARGETS[name].words:
        words = work / f"{name}.dict"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in TARGETS[name].words))
        limits.append(f"-dict={words}")
    began = time.monotonic()
    done = _worker(name, *limits, *folders)
    told = {key: int(value) for key, value in re.findall(r"^stat::(\w+):\s+(\d+)", done.stderr, re.MULTILINE)}
    result: dict[str, Any] = {
        "seconds": round(time.monotonic() - began, 1),
        "inputs": told.get("number_of_executed_units", 0),
        "of_interest": len(list(found.iterdir())),
        "peak_rss_mib": told.get("peak_rss_mb", 0),
        "fault": None,
    }
    if done.returncode != 0:
        result["fault"] = (done.stdout or done.stderr).strip()[-4000:]
    return result


def keep(name: str, count: int, work: Path) -> int:
    """Add some of what reached further to the corpus: the fuzzer keeps nothing else, and those of all sizes reach most.
    Returns how many."""
    kept = CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    known = {path.read_bytes() for path in kept.iterdir()}
    fresh = sorted((raw for raw in {path.read_bytes() for path in (work / name).iterdir()} - known), key=_length)
    chosen = fresh[:: max(1, -(-len(fresh) // count))] if count else []
    for raw in chosen:
        (kept / hashlib.sha256(raw).hexdigest()[:16]).write_bytes(raw)
    return len(chosen)


def _length(raw: bytes) -> tuple[int, bytes]:
    return len(raw), raw


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def _worker(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.fuzz.worker", name, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated (default: all)")
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="add so many inputs to each target's corpus")
    parser.add_argument("--work", type=Path, default=ROOT / ".fuzz")
    parser.add_argument("--output", type=Path, help="write the result here, too")
    options = parser.parse_args(arguments)
    results = {}
    for name in options.target or TARGETS:
        results[name] = fuzz(name, options.seconds, options.work)
        if options.keep:
            results[name]["kept"] = keep(name, options.keep, options.work)
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    text = json.dumps({**header(device_name="cpu"), "targets": results}, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 1 if any(one["fault"] for one in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
