"""A step of a whole model by how its weights are kept, side by side on the CPU. Figures of docs/quantization-cpu.md.

    python -m benchmarks.cpu_quantization random:smollm2-135m --output benchmarks/results/cpu/quantization.json

All forms are loaded in one process and take turns, so what else the machine does falls on all of them. One thread, and
its own time is what counts: others on the machine change it little. The numbers of rows are those of one and four
requests that decode, a larger batch, and a prompt of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu_forward import step_of
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.cli import report
from firsttoken.core.kv_format import KVFormat
from firsttoken.kernels.paged_attention import KVPool
from firsttoken.models import DecoderModel, load_model

FORMS = (
    ("none", "float32"),
    ("none", "bfloat16"),
    ("packed", "bfloat16"),
    ("int8", "bfloat16"),
    ("int4", "bfloat16"),
)
# (batch, tokens before, tokens of each): by the name of the figure.
STEPS = {"decode_1": (1, 128, 1), "decode_4": (4, 128, 1), "decode_16": (16, 128, 1), "prefill_512": (1, 0, 512)}


def steps_of(model: DecoderModel, name: str) -> Callable[[], object]:
    config = model.config
    batch, start, count = STEPS[name]
    kv = KVFormat(
        dtype=model.kv_dtype, layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    pool = KVPool(kv, batch * kv.blocks_for(start + count))
    pool.storage.zero_()
    return step_of(model, pool, batch, start, count)


def measure(models: dict[str, DecoderModel], name: str, rounds: int) -> dict[str, float]:
    """ms of the thread's time for each form, the median of ``rounds``; a first round is left out."""
    steps = {form: steps_of(model, name) for form, model in models.items()}
    times: dict[str, list[float]] = {form: [] for form in models}
    for _ in range(rounds + 1):
        for form, step in steps.items():
            began = time.thread_time()
            step()
            times[form].append((time.thread_time() - began) * 1e3)
    return {form: round(statistics.median(found[1:]), 2) for form, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(arguments.model, offline=True)
    models = {
        f"{quantization} {dtype}": load_model(
            checkpoint, device="cpu", dtype=dtype, quantization=quantization, threads=1
        )
        for quantization, dtype in FORMS
    }
    result: dict[str, Any] = {
        **report.header(device_name=report.cpu_name()),
        "model": arguments.model,
        "weights_mib": {form: round(model.nbytes / 2**20, 1) for form, model in models.items()},
    }
    print(f"weights, MiB: {result['weights_mib']}", file=sys.stderr)
    for name in STEPS:
        result[name] = measure(models, name, max(arguments.rounds // (3 if name.startswith("prefill") else 1), 3))
        print(f"{name}, ms: {result[name]}", file=sys.stderr)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
