"""What an engine says when the GPU has too little memory, or is not there: a clear end, and never a hang.

    python -m benchmarks.gpu.limits [MODEL] [--output limits.json]

``load``: a neighbour leaves less than the weights take. ``kv``: more KV is asked for than is left. ``capture``: the KV
takes all but some MiB, so that few graphs find a place; requests must be answered all the same. ``absent``: no GPU is
visible. Told are each command's exit code, its seconds and the end of what it said; the exit code is 1 when one is not
as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
LIMIT_S = 90
# Free beside weights and KV: less than what an engine needs for its largest step, and less than all its graphs take.
TOO_TIGHT, TIGHT = GIB, 5 * GIB // 2


@dataclass(frozen=True)
class Case:
    """``held`` bytes are a neighbour's meanwhile; ``code`` is the exit code expected, and ``says`` is in the output."""

    name: str
    options: tuple[str, ...]
    code: int
    says: str = ""
    held: int = 0
    environment: dict[str, str] = field(default_factory=dict)


def cases(weights: int) -> list[Case]:
    free, _ = torch.cuda.mem_get_info()
    tight, too_tight = (str(free - weights - left) for left in (TIGHT, TOO_TIGHT))
    return [
        Case("load", (), 2, "GiB of memory are free", held=free - weights // 2),
        Case("kv", ("--kv-memory", str(free + GIB)), 2, "kv_memory"),
        Case("step", ("--kv-memory", too_tight, "--batch", "16", "--max-model-len", "4096"), 2, "Lower kv_memory by"),
        Case("capture", ("--kv-memory", tight, "--batch", "16", "--max-model-len", "4096"), 0),
        Case("absent", ("--device", "cuda"), 2, "CUDA", environment={"CUDA_VISIBLE_DEVICES": ""}),
    ]


def run(model: str, case: Case) -> dict[str, Any]:
    neighbour = torch.empty(case.held, dtype=torch.uint8, device="cuda")
    words = ["bench", "latency", model, "--input", "200", "--output", "32", "--repeat", "1", *case.options]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "firsttoken.cli.main", *words],
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
            env={**os.environ, **case.environment},
        )
        code, said = done.returncode, (done.stderr + done.stdout).decode(errors="replace")
    except subprocess.TimeoutExpired:
        code, said = -1, f"no end within {LIMIT_S} s"
    del neighbour
    torch.cuda.empty_cache()
    found = {
        "case": case.name,
        "seconds": round(time.monotonic() - began, 1),
        "code": code,
        "expected": code == case.code and case.says in said,
        "said": said.strip()[-400:],
    }
    print(found, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.1-8b")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    from firsttoken.checkpoint.locate import open_checkpoint

    infos = open_checkpoint(arguments.model).tensors.infos().values()
    found = [run(arguments.model, case) for case in cases(2 * sum(info.num_elements for info in infos))]
    document = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": arguments.model}
    if arguments.output:
        arguments.output.write_text(json.dumps(document | {"cases": found}, indent=1) + "\n")
    return 0 if all(one["expected"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
