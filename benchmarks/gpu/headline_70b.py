"""Four short prompts at once on a 70B shape in four bits, nothing cached; then one request's gap. One engine for both.

    python -m benchmarks.gpu.headline_70b --output headline_70b.json [--target-ttft 47] [--target-gb 51]
    python -m benchmarks.gpu.headline_70b --model random:tiny-llama --device cpu --quantization none --rounds 3

Weights are made and rounded on the device, matrix by matrix, so that 16 bits of all never lie there. ``burst`` is 4
times 64 + 8 tokens, each of its rounds with prompts that nobody sent before; ``alone`` is 64 + 64 tokens. ``used_gb``
is all that the device says is used (nvidia-smi, 10^9 bytes), the engine's graphs and the driver's part among it, while
``kv_tokens`` have their place there. Exit code 1 when a target was missed or there is room for fewer KV tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from firsttoken.bench.latency import LatencyConfig, bandwidth, measure_latency
from firsttoken.bench.session import Session, open_session
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.cli import report
from firsttoken.core.clock import now_ns
from firsttoken.core.engine_args import EngineArgs

KV_TOKENS = 16_384
PREPARE_S = 120
KEPT = ("ttft_ms", "tpot_ms", "e2e_ms", "requests_per_s_median", "tokens_per_s_median", "captured_share", "rounds")


def used_gb() -> float | None:
    """Of the first GPU; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    return int(done.stdout.split()[0]) * 2**20 / 1e9


def kv_bytes(model: str) -> int:
    """Of `KV_TOKENS` in 16 bits, and of some blocks more, which may be kept for other ends."""
    config = open_checkpoint(model).config
    return (KV_TOKENS + 64) * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


async def measure(session: Session, args: EngineArgs, options: argparse.Namespace) -> dict[str, Any]:
    info = session.llm.info
    burst = LatencyConfig(
        batch=4, input=64, output=8, repeat=options.rounds, warmup=3, seed=options.seed, prepare_s=PREPARE_S
    )
    alone = LatencyConfig(batch=1, input=64, output=64, repeat=5, warmup=1, seed=options.seed + 1)
    four, one = await measure_latency(session, burst), await measure_latency(session, alone)
    return {
        **report.header(info, seed=options.seed),
        "prepared_s": four["prepared_s"],
        "start_s": session.start_s,
        "start_ms": session.start_ms,
        "kv_tokens": info.kv_blocks * info.block_tokens,
        "used_gb": used_gb(),
        "peak_memory_gib": one["peak_memory_gib"],
        "burst": {name: four[name] for name in KEPT},
        "alone": {name: one[name] for name in KEPT} | bandwidth(session, alone, args, one["tpot_ms"]["p50"]),
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    args = EngineArgs(
        model=options.model,
        device=options.device,
        quantization=options.quantization,
        kv_dtype=options.kv_dtype,
        kv_memory=options.kv_memory or kv_bytes(options.model),
        max_num_seqs=4,
        max_model_len=options.max_model_len,
        batch_window=options.batch_window,
    )
    async with open_session(args, now_ns()) as session:
        return await measure(session, args, options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:llama-3-70b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--kv-memory", type=int, help=f"bytes (default: of {KV_TOKENS} tokens in 16 bits)")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--batch-window", default="2ms", help="how long the first of four waits for the others")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target-ttft", type=float, help="ms, of the burst's p99")
    parser.add_argument("--target-gb", type=float, help="of used_gb")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = asyncio.run(run(options))
    print(json.dumps({name: found[name] for name in found if name not in ("burst", "alone")}, indent=1))
    for name in ("burst", "alone"):
        print(name, json.dumps({key: value for key, value in found[name].items() if key != "rounds"}), flush=True)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    late = options.target_ttft is not None and found["burst"]["ttft_ms"]["p99"] > options.target_ttft
    large = options.target_gb is not None and (found["used_gb"] or 0) > options.target_gb
    return 1 if late or large or found["kv_tokens"] < KV_TOKENS else 0


if __name__ == "__main__":
    sys.exit(main())
