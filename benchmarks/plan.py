"""What `firsttoken plan` says against the peak of engines that then run: the figures of docs/plan.md.

    python -m benchmarks.plan --output benchmarks/results/kv/plan_cpu.json

Each case starts an engine as the plan's own advice does, and fills it: all users at once, each to its full length. The
peak is `EngineStats.peak_memory`: on the CPU what the process had resident.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from firsttoken.bench.requests import random_prompt, run_request
from firsttoken.bench.session import open_session
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.cli import report
from firsttoken.cli.plan import find_machine
from firsttoken.core.clock import now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.engine.memory_plan import Machine, MemoryPlan, plan_memory

MIB = 1 << 20
OUTPUT = 8


@dataclass(frozen=True)
class Case:
    """``args`` without sizes; ``settle_s``: how long the idle engine may capture steps in the end."""

    args: EngineArgs
    context: int
    users: int
    settle_s: float = 0.0


CASES = tuple(
    Case(EngineArgs(model=model, device="cpu", quantization=quantization), context, users)
    for model, quantization, context, users in (
        ("random:tiny-llama", "auto", 64, 1),
        ("random:tiny-llama", "auto", 512, 8),
        ("random:tiny-qwen3", "none", 512, 1),
        ("smollm2", "auto", 512, 1),
        ("smollm2", "auto", 2048, 4),
        ("smollm2", "auto", 8192, 2),
        ("smollm2", "none", 512, 1),
        ("random:smollm2-135m", "auto", 512, 1),
        ("random:smollm2-135m", "none", 512, 1),
        ("random:smollm2-135m", "int8", 512, 1),
        ("random:smollm2-135m", "int4", 512, 1),
        ("smollm2", "int4", 512, 1),
        ("random:llama-3.2-1b", "auto", 512, 1),
    )
)


async def run(case: Case, kv_memory: int) -> int:
    """Bytes at the peak of an engine that had all users at their full length."""
    args = msgspec.structs.replace(
        case.args, max_model_len=case.context, max_num_seqs=case.users, kv_memory=kv_memory, offline=True
    )
    rng = random.Random(1)
    async with open_session(args, now_ns()) as session:
        vocab = session.llm.info.vocab_size
        prompts = [random_prompt(rng, case.context - OUTPUT, vocab) for _ in range(case.users)]
        for _ in range(2):
            done = await asyncio.gather(*(run_request(session.llm, prompt, OUTPUT) for prompt in prompts))
            errors = [one.error for one in done if one.error is not None]
            if errors:
                raise SystemExit(f"a request failed: {errors[0]}")
            await session.prepare(case.settle_s)
        peak = await session.peak_memory_gib()
    if peak is None:
        raise SystemExit("the engine does not tell its memory")
    return round(peak * MIB * 1024)


def compare(case: Case, machine: Machine, planned: int, plan: MemoryPlan) -> dict[str, Any]:
    """``planned`` is what of the plan's total the engine's own figure covers."""
    peak = asyncio.run(run(case, plan.kv))
    row = {
        "model": case.args.model,
        "quantization": case.args.quantization,
        "context": case.context,
        "users": case.users,
        "planned_mib": round(planned / MIB, 1),
        "peak_mib": round(peak / MIB, 1),
        "error": round(planned / peak - 1, 4),
        "parts_mib": {
            name: round(getattr(plan, name) / MIB, 1)
            for name in ("runtime", "weights", "kv", "graphs", "activations", "loading")
        },
    }
    print(f"{machine.name}: {row}", flush=True)
    return row


def plan_of(case: Case, machine: Machine) -> MemoryPlan:
    checkpoint = open_checkpoint(case.args.model, offline=True)
    return plan_memory(case.args, checkpoint, machine, case.context, case.users).plan


def write(output: Path | None, rows: Sequence[dict[str, Any]], name: str) -> None:
    result = report.header(device_name=name) | {
        "worst_error": max((row["error"] for row in rows), key=abs),
        "cases": list(rows),
    }
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"worst error {result['worst_error']:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    rows = []
    forms = {case.args.quantization for case in CASES}
    machines = {form: find_machine("cpu", EngineArgs(quantization=form)) for form in forms}
    for case in CASES:
        machine = machines[case.args.quantization]
        plan = plan_of(case, machine)
        rows.append(compare(case, machine, plan.total, plan))
    write(output, rows, report.cpu_name())


if __name__ == "__main__":
    main()
