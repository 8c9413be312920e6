"""Memory and GPU use of each shape profile of decode steps.

    python -m benchmarks.gpu.profiles random:llama-3.1-8b --context 576 --output profiles.json

For each padded number of rows: time of the captured step, what it reads (weights once, KV of every row) over that time
as a share of the memory's speed, and the memory that its graph holds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.decode_step import DecodeStep
from firsttoken.core.step_sizes import graph_sizes

ROOF_GB_S = 4520


def measure(step: DecodeStep, rows: int, context: int) -> dict[str, Any]:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    ms = step.time(rows)
    held = torch.cuda.memory_reserved() - before
    config = step.model.config
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * context * rows
    embedding = 0 if config.tie_word_embeddings else step.model.embedding.nbytes
    read = step.model.nbytes - embedding + kv
    return {
        "ms": round(ms, 4),
        "gb_s": round(read / ms / 1e6),
        "share_of_roof": round(read / ms / 1e6 / ROOF_GB_S, 3),
        "tokens_per_s": round(rows / ms * 1e3),
        "graph_mib": round(held / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.1-8b")
    parser.add_argument("--rows", type=int, default=64, help="largest profile")
    parser.add_argument("--context", type=int, default=576)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    step = DecodeStep(arguments.model, arguments.rows, arguments.context)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": arguments.model,
        "context": arguments.context,
        "profiles": [],
    }
    low = 1
    for high in graph_sizes(arguments.rows, 1).decode:
        row = {"rows": [low, high], **measure(step, high, arguments.context)}
        low = high + 1
        result["profiles"].append(row)
        print(row, flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
