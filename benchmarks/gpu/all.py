"""All that one GPU is asked when there is one for half an hour: what misses or never ran there first.

    python -m benchmarks.gpu.all --output DIR --text base_text.jsonl [--minutes 25] [--only NAME,NAME]
    python -m benchmarks.gpu.all --output DIR --dry               # what would run
    python -m benchmarks.gpu.all --output DIR --text FILE --small # what can of it, without a GPU, in small

``--text`` is what `benchmarks.gpu.base_text` makes: the accuracy base is trained on it first (64 s), and is the model
of all steps that need a tokenizer, unless ``--model`` names another. Each step is a process with a limit of its own and
leaves NAME.json in DIR, or NAME.log where it fails; the others go on. Nothing is started that could last beyond
``--minutes``. A step whose result is there already is left out (``--again`` does it again), so the same command goes on
where time ran out. ``summary.json`` says what became of each, with figures beside what they should reach.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, Places, Target, run, verdicts

CLI = "firsttoken.cli.main"
LARGE, SMALL = "random:llama-3.1-8b", "random:smollm2-135m"
BASE = "{work}/base30m"
GAP, TTFT = "tpot_ms.p50", "ttft_ms.p50"
ON_CPU = ("--device", "cpu")


def latency(name: str, quantization: str, *options: str, targets: tuple[Target, ...]) -> Case:
    words = (CLI, "bench", "latency", "{large}", "--quantization", quantization, "--warmup", "3")
    small = (*ON_CPU, "--quantization", "none", "--batch", "2", "--input", "16", "--output", "4", "--repeat", "1")
    return Case(f"latency_8b_{name}", (*words, "--output-json", "{out}", *options), 120, targets, small=small)


def tune(name: str, model: str, quantization: str, rows: str, seconds: str) -> Case:
    """Configs of packed products in the decode graph."""
    words = (
        "benchmarks.gpu.tune",
        model,
        "--quantization",
        quantization,
        "--rows",
        *rows.split(),
        "--seconds",
        seconds,
    )
    return Case(f"tune_{name}", (*words, "--output", "{out}"), 240)


def where(name: str, model: str, *options: str) -> Case:
    words = ("benchmarks.gpu.where", model, "--quantization", "int4", "--mixed", "--output", "{out}", *options)
    return Case(f"where_{name}", words, 150)


def ratios(part: str, *targets: Target) -> Case:
    words = ("benchmarks.gpu.rounded_ratios", "--model", "{large}", "--only", part, "--output", "{out}")
    small = (
        "--fp8",
        "none",
        "--int4",
        "packed",
        "--repeat",
        "1",
        "--input",
        "16",
        "--output-tokens",
        "4",
        "--batch",
        "1",
    )
    return Case(f"ratios_{part}", words, 250, targets, small=(*ON_CPU, *small))


def quantize(method: str) -> Case:
    folder = f"{{work}}/base30m-{method}"
    words = (CLI, "quantize", BASE, "--scheme", "int4", "--method", method, "--out", folder)
    return Case(
        f"quantize_{method}",
        (*words, "--calibration", f"{BASE}/calibration.txt", "--output-json", "{out}"),
        200,
        needs=(f"{BASE}/calibration.txt",),
        small=(*ON_CPU, "--tokens", "256", "--context", "64"),
    )


CASES = (
    Case(
        "train_base",
        ("benchmarks.gpu.train_base", "--text", "{text}", "--output", BASE),
        200,
        needs=("{text}",),
        result=f"{BASE}/training.json",
        small=(
            *ON_CPU, "--steps", "2", "--batch", "2", "--every", "1", "--hidden", "128", "--layers", "2", "--heads", "2",
            "--kv-heads", "1", "--intermediate", "256", "--vocab", "512", "--context", "1024",
        ),
    ),
    latency("int4_b64", "int4", "--batch", "64", "--repeat", "4", targets=(Target(GAP, 6.5),)),
    latency("int4_b8", "int4", "--batch", "8", "--repeat", "4", targets=(Target(GAP, 2.35),)),
    Case("kv_formats", ("benchmarks.gpu.kv_formats", "--output", "{dir}", "--seconds", "100"), 420),
    latency("int4_kv8_b64", "int4", "--kv-dtype", "int8", "--batch", "64", "--repeat", "4", targets=()),
    Case(
        "quantized_files",
        ("benchmarks.gpu.quantized_files", "--model", "{model}", "--output", "{out}"),
        300,
        needs=("{model}",),
    ),
    quantize("rtn"),
    quantize("best"),
    Case(
        "accuracy",
        (
            "benchmarks.accuracy", "--model", BASE, "--text", f"{BASE}/held_out.txt", "--output", "{out}",
            "--case", "int4", "--case", "fp8", "--case", "kv:int8", "--case", "kv:fp8", "--case", "kv:int4", "--case",
            "int4+kv:int8",
            "--folder", "rtn={work}/base30m-rtn", "--folder", "gptq_awq={work}/base30m-best", "--tokens", "24576",
        ),
        300,
        needs=(f"{BASE}/held_out.txt", "{work}/base30m-rtn/config.json", "{work}/base30m-best/config.json"),
        small=(*ON_CPU, "--tokens", "200", "--context", "128"),
    ),
    Case(
        "engine_restart",
        ("benchmarks.engine_restart", "{model}", "--output-json", "{out}"),
        240,
        needs=("{model}",),
        small=(),
    ),
    Case(
        "tests",
        (
            "pytest", "-q", "-x", "tests/executor/test_graph_executor.py", "tests/executor/test_rounded_weights.py",
            "tests/kernels/test_packed_linear.py", "tests/kernels/test_triton_rounded_kv.py",
        ),
        300,
    ),
    Case(
        "e2e_tls",
        ("benchmarks.gpu.e2e_tls", "--output", "{out}"),
        300,
        (Target("results.0.e2e_ms.p99", 387), Target("results.1.e2e_ms.p99", 387)),
        small=(
            *ON_CPU, "--model", SMALL, "--quantization", "none", "--requests", "2", "--input", "16", "--output-tokens",
            "4",
        ),
    ),
    latency("fp8_b64", "fp8", "--batch", "64", "--repeat", "4", targets=()),
    Case(
        "features",
        ("benchmarks.gpu.features", "--model", "{model}", "--output", "{out}"),
        120,
        needs=("{model}",),
        small=ON_CPU,
    ),
    Case("wide", ("benchmarks.gpu.wide", "--output", "{out}", "--seconds", "120"), 420),
    where("70b_int4", "random:llama-3-70b", "--decode", "1", "--prompt", "256"),
    Case(
        "headline_70b",
        ("benchmarks.gpu.headline_70b", "--output", "{out}"),
        200,
        (
            Target("burst.ttft_ms.p99", 47),
            Target("burst.requests_per_s_median", 28.6, more=True),
            Target("used_gb", 51),
            Target("alone.tpot_ms.p50", 12.5),
        ),
        small=(
            *ON_CPU, "--model", "random:tiny-llama", "--quantization", "none", "--rounds", "2", "--max-model-len",
            "192", "--kv-memory", "100000000",
        ),
    ),
    tune("8b_fp8", LARGE, "fp8", "1", "45"),
    tune("8b_int4", LARGE, "int4", "1 8", "40"),
    Case(
        "right",
        ("benchmarks.gpu.right", "--model", "{model}", "--output", "{out}", "--replays", "300"),
        150,
        needs=("{model}",),
    ),
    latency("fp8_b1", "fp8", targets=(Target(GAP, 2.5),)),
    latency("int4_b1", "int4", targets=(Target(GAP, 2.05),)),
    latency("fp8_b1_2048", "fp8", "--input", "2048", "--output", "16", targets=(Target(TTFT, 31),)),
    tune("70b_int4", "random:llama-3-70b", "int4", "1", "60"),
    where("8b_int4", LARGE, "--decode", "8", "64", "--prompt", "512"),
    ratios(
        "int4",
        Target("int4_beside_bfloat16.tokens_per_s_ratio", 2.0, more=True),
        Target("int4_beside_bfloat16.weight_memory_ratio", 0.33),
    ),
    ratios("transformers", Target("fp8_beside_transformers.tokens_per_s_ratio", 2.3, more=True)),
    Case(
        "grammar",
        ("benchmarks.grammar", "--model", "{model}", "--device", "cuda", "--only", "engine", "--output-json", "{out}"),
        120,
        (Target("engine.gap_ratio.p50", 1.02),),
        needs=("{model}",),
        small=(*ON_CPU, "--rounds", "1", "--tokens", "8"),
    ),
    Case(
        "grammar_8b",
        (
            "benchmarks.grammar", "--model", "{large}", "--quantization", "int4", "--tokenizer", "{model}",
            "--max-model-len", "8192", "--device", "cuda", "--only", "engine", "--output-json", "{out}",
        ),
        150,
        (Target("engine.gap_ratio.p50", 1.02),),
        needs=("{model}",),
        small=(*ON_CPU, "--quantization", "none", "--max-model-len", "2048", "--rounds", "1", "--tokens", "8"),
    ),
)  # fmt: skip


def chosen(only: str | None) -> list[Case]:
    """Raises ValueError for a name that no step has."""
    names = [case.name for case in CASES] if only is None else only.split(",")
    if unknown := sorted(set(names) - {case.name for case in CASES}):
        raise ValueError(f"no step is called {', '.join(unknown)}: there are {', '.join(case.name for case in CASES)}")
    return [case for case in CASES if case.name in names]


def left_out(case: Case, places: Places, options: argparse.Namespace, seconds: float) -> str | None:
    """Why a step isn't run, if it is not."""
    if places.output(case).exists() and not options.again:
        return "its result is there"
    if options.small and case.small is None:
        return "it runs on a GPU alone"
    if missing := places.missing(case):
        return f"it needs {', '.join(path or 'a file that was not named' for path in missing)}"
    if case.limit_s > seconds:
        return f"it could take {case.limit_s} s, and {seconds:.0f} are left"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--text", type=Path, help="what the accuracy base is trained on")
    parser.add_argument("--model", help="of steps that need a tokenizer (default: the accuracy base)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "firsttoken-gpu-all", metavar="DIR")
    parser.add_argument("--only", metavar="NAME,NAME", help="these steps alone, in the usual order")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--small", action="store_true", help="without a GPU, in seconds, what can be run so")
    parser.add_argument("--dry", action="store_true", help="print the commands")
    options = parser.parse_args()
    try:
        cases = chosen(options.only)
    except ValueError as error:
        parser.error(str(error))
    work = str(options.work.resolve())
    model = BASE.format(work=work) if options.model is None else options.model
    places = Places(
        options.output, work=work, text=str(options.text or ""), model=model, large=SMALL if options.small else LARGE
    )
    if options.dry:
        for case in cases:
            print(f"{case.name} ({case.limit_s} s): {shlex.join(places.command(case, options.small)[1:])}")
        return 0
    for folder in (options.output, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    return run_all(cases, places, options)


def run_all(cases: list[Case], places: Places, options: argparse.Namespace) -> int:
    end = time.monotonic() + options.minutes * 60
    summary: list[dict[str, Any]] = []
    for case in cases:
        told: dict[str, Any] = {"name": case.name}
        if why := left_out(case, places, options, end - time.monotonic()):
            told["left_out"] = why
        else:
            outcome = run(case, places, small=options.small)
            told |= {"seconds": outcome.seconds, "problem": outcome.problem}
        told["figures"] = [] if options.small else verdicts(case, places)
        summary.append(told)
        state = told.get("left_out") or told.get("problem") or "done"
        print(f"{case.name}: {state}", f"({told['seconds']} s)" if "seconds" in told else "", flush=True)
        for line in told["figures"]:
            print(f"  {line}", flush=True)
        (places.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    failed = [told["name"] for told in summary if told.get("problem")]
    print(
        f"{sum('seconds' in told for told in summary)} of {len(cases)} steps were run, {len(failed)} failed: {failed}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
