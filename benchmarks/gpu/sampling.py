"""The sampler on the device: right at odd shapes, the same bits alone and among others, and how long it takes.

    python -m benchmarks.gpu.sampling --output sampling.json [--quick] [--vocab 128256] [--rows 1 8 64]

Times are medians of CUDA graph replays with dependent launches, of a whole sampling segment. "cold": logits rotate over
more than the L2 cache holds; "warm": they are still in it, as the head has just written them. "peaked" logits are like
a language model's, "flat" ones bad for top_p, "tied" ones the worst. The last table takes segments apart, kernel by
kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.linear import graph_us
from benchmarks.gpu.sampling_cases import CASES, Bed, check_rows, check_sameness, make_logits
from firsttoken.sampling.device.params import Needs

_ROTATED_BYTES = 260 << 20
_KNOWN = 4096  # tokens of each request, which penalties count
# Parts of the vocabulary that the head's kernel leaves the maximum of: 4 columns each for one row, 64 for more.
_HEAD_TILES = {1: 4, 8: 64}
_ODD = ((31, 5), (1003, 17), (50257, 9))
_PARTS = (
    Needs.NOTHING,
    Needs.RANDOM,
    Needs.RANDOM | Needs.SEARCH,
    Needs.EDITS,
    Needs.RANDOM | Needs.EDITS | Needs.SEARCH,
    Needs.LOGPROBS,
)


def compile_one(job: tuple[int, bool, int]) -> None:
    """Compile the kernels of one part of the segment in a process of its own."""
    vocab, pdl, needs = job
    bed = Bed(vocab, 2, [CASES["penalties"]], 8, device="meta")
    logits = torch.empty(2, vocab, device="meta")
    bed.sample(logits, needs=Needs(needs), pdl=pdl)


def compile_all(vocab: int, sizes: list[int]) -> None:
    began = time.monotonic()
    jobs = [(vocab, pdl, int(needs)) for pdl in (True, False) for needs in _PARTS]
    jobs += [(size, False, int(needs)) for size in sizes for needs in _PARTS]
    workers = max(1, min(15, len(os.sched_getaffinity(0)) - 1))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))
    print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)


def check(vocab: int, *, quick: bool) -> list[str]:
    wrong: list[str] = []
    for size, rows in _ODD[: 2 if quick else None]:
        for kind in ("peaked", "flat", "tied"):
            wrong += check_rows(size, rows, kind)
    for kind in ("peaked",) if quick else ("peaked", "flat", "tied"):
        wrong += check_rows(vocab, 12, kind)
    return wrong + check_sameness(vocab, 40 if quick else 400)


def head_maxima(logits: list[Tensor], rows: int) -> list[tuple[Tensor, Tensor]] | None:
    """What the head leaves beside the logits, where it is our kernel."""
    if rows not in _HEAD_TILES:
        return None
    found = []
    for one in logits:
        width = _HEAD_TILES[rows]
        padded = torch.nn.functional.pad(one, (0, -one.shape[1] % width), value=-float("inf"))
        values, indices = padded.view(rows, -1, width).max(2)
        indices += torch.arange(values.shape[1], device="cuda") * width
        found.append((values, indices.int()))
    return found


def rotated_logits(vocab: int, rows: int, kind: str) -> list[Tensor]:
    copies = max(2, -(-_ROTATED_BYTES // (4 * rows * vocab)))
    distinct = [make_logits(rows, vocab, kind, seed) for seed in range(min(copies, 4))]
    return distinct + [distinct[i % 4].clone() for i in range(copies - len(distinct))]


def time_case(name: str, kind: str, logits: list[Tensor], best: list[tuple[Tensor, Tensor]] | None) -> dict[str, Any]:
    rows, vocab = logits[0].shape
    bed = Bed(vocab, rows, [CASES[name]], _KNOWN)
    result: dict[str, Any] = {"rows": rows, "case": name, "logits": kind}
    for state, pieces in (("cold", len(logits)), ("warm", 1)):

        def run(i: int, pieces: int = pieces) -> None:
            at = i % pieces
            bed.sample(logits[at], best=None if best is None else best[at], pdl=True)

        result[f"{state}_us"] = graph_us(run, max(pieces, 16), replays=5)
    return result


def kernel_us(vocab: int, rows: int, name: str, kind: str) -> dict[str, float]:
    """Microseconds of each kernel of the segment, each alone and launched by the host; needs the profiler."""
    bed = Bed(vocab, rows, [CASES[name]], _KNOWN)
    logits = make_logits(rows, vocab, kind, 0)
    bed.sample(logits)
    torch.cuda.synchronize()
    repeats = 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            bed.sample(logits)
        torch.cuda.synchronize()
    return {
        event.key.strip("_"): round(event.self_device_time_total / repeats, 1)
        for event in profiled.key_averages()
        if event.key.startswith("_")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="fewer checks, peaked logits only")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=52.0, help="start no further timing after this long")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    began = time.monotonic()
    compile_all(options.vocab, [size for size, _ in _ODD[: 2 if options.quick else None]])
    wrong = check(options.vocab, quick=options.quick)
    print(f"{len(wrong)} checks failed", *wrong[:20], sep="\n  ")
    print(f"checked after {time.monotonic() - began:.1f} s", flush=True)
    times: list[dict[str, Any]] = []
    print(f"{'logits':8}{'rows':>5}{'cold us':>9}{'warm us':>9}  case")
    for kind in ("peaked",) if options.quick else ("peaked", "flat"):
        for rows in options.rows:
            logits = rotated_logits(options.vocab, rows, kind)
            best = head_maxima(logits, rows)
            for name in CASES:
                if time.monotonic() - began < options.seconds:
                    one = time_case(name, kind, logits, best)
                    times.append(one)
                    print(f"{kind:8}{rows:5}{one['cold_us']:9.1f}{one['warm_us']:9.1f}  {name}", flush=True)
    kernels: list[dict[str, Any]] = []
    for rows in (1, 64):
        for name, kind in (
            ("top_p 0.9", "peaked"),
            ("top_p 0.9", "flat"),
            ("top_p 0.9", "tied"),
            ("penalties", "peaked"),
            ("logprobs 20", "flat"),
        ):
            if time.monotonic() - began < options.seconds + 4:
                parts = kernel_us(options.vocab, rows, name, kind)
                kernels.append({"rows": rows, "case": name, "logits": kind, "us": parts})
                print(f"{kind:8}{rows:5}  {name}:", " ".join(f"{key} {us}" for key, us in parts.items()), flush=True)
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    result = head | {"vocab": options.vocab, "failures": wrong, "times": times, "kernels": kernels}
    options.output.write_text(json.dumps(result, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
