"""Times the model alone on the CPU: forward and logits of one step, without engine, scheduler or sampling.

Predicted for SmolLM2-135M Q4_1 on two quiet Zen 5 cores, from the time of each operation alone: 8 ms at batch 1 (30
layers of 0.23 ms, head 1.1 ms), 15 ms at batch 8, 210 ms for a prefill of 512. Seen on two cores shared with other
work, where the projections alone took 1.7 to 2.3 times their quiet time: 11.4, 28 and 360 ms.

Wall time is what users see; ``cpu_ms`` of the calling thread, beside it, tells how much of it the machine gave to
others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.core.kv_format import KVFormat
from firsttoken.kernels.paged_attention import AttentionContext, KVPool, Segment
from firsttoken.models import DecoderModel, load_model


def step_of(model: DecoderModel, pool: KVPool, batch: int, start: int, count: int) -> Callable[[], object]:
    """A callable that runs one step: ``batch`` rows of ``count`` tokens from position ``start``, last ones sampled."""
    blocks = pool.format.blocks_for(start + count)
    segments = [Segment(torch.arange(row * blocks, (row + 1) * blocks), start, count) for row in range(batch)]
    positions = torch.arange(start, start + count).repeat(batch)
    tokens = torch.arange(batch * count) % model.config.vocab_size
    sample = torch.arange(count - 1, batch * count, count)

    def step() -> object:
        context = AttentionContext.build(pool, segments)
        return model.logits(model.forward(tokens, positions, context, sample))

    return step


def measure(step: Callable[[], object], repeat: int) -> dict[str, float]:
    step()
    wall, cpu = [], []
    for _ in range(repeat):
        began, cpu_began = time.perf_counter(), time.thread_time()
        step()
        wall.append((time.perf_counter() - began) * 1e3)
        cpu.append((time.thread_time() - cpu_began) * 1e3)
    wall.sort()
    return {
        "ms": round(statistics.median(wall), 3),
        "ms_min": round(wall[0], 3),
        "cpu_ms": round(statistics.median(cpu), 3),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    checkpoint = open_checkpoint(arguments.model, offline=True)
    model = load_model(
        checkpoint,
        device="cpu",
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        threads=arguments.threads,
    )
    load_s = time.perf_counter() - began
    config = checkpoint.config
    kv = KVFormat(
        dtype=arguments.kv_dtype or model.kv_dtype,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    pool = KVPool(
        kv, 8 * kv.blocks_for(arguments.context + 1) + kv.blocks_for(arguments.prefill_start + arguments.prefill)
    )
    cases = {
        "decode_1": (1, arguments.context, 1, arguments.repeat),
        "decode_8": (8, arguments.context, 1, arguments.repeat),
        "prefill": (1, arguments.prefill_start, arguments.prefill, max(3, arguments.repeat // 8)),
    }
    result: dict[str, Any] = {
        "command": "cpu_forward",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "versions": {"torch": torch.__version__},
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "model": arguments.model,
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "kv_dtype": kv.dtype,
        "context": arguments.context,
        "prefill_tokens": arguments.prefill,
        "prefill_start": arguments.prefill_start,
        "load_s": round(load_s, 3),
        "weights_mib": round(model.nbytes / 2**20, 1),
    }
    for name, (batch, start, count, repeat) in cases.items():
        timed = measure(step_of(model, pool, batch, start, count), repeat)
        result[name] = {**timed, "tokens_per_s": round(batch * count / timed["ms"] * 1e3, 1)}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Time forward and logits of the model alone on the CPU.")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="packed")
    parser.add_argument(
        "--kv-dtype", choices=("float32", "bfloat16", "int8", "fp8", "int4"), help="default: the model's own"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int, default=128, help="tokens before the one decoded")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--prefill-start", type=int, default=0, help="tokens before the prefill: a later chunk")
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    result = run(arguments)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return 0
    print(f"load {result['load_s']} s, weights {result['weights_mib']} MiB, {result['threads']} threads")
    for name in ("decode_1", "decode_8", "prefill"):
        print(f"{name:10} {result[name]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
