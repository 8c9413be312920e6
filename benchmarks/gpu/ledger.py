"""Checks the records of steps on a device: that its times are there and add up, and that moves of KV are counted.

    python -m benchmarks.gpu.ledger random:llama-3.2-1b --input 2048 [--output ledger.json]
    python -m benchmarks.gpu.ledger random:smollm2-135m --device cpu --input 512 --kv-memory 100000000

Requests decode beside prompts; then a prompt is computed, crowded out of the device and comes back from host memory.
Exit code 1 when a check fails. ``busy`` is the part of the wall time that the device computed, by its own clock: steps
do not overlap, so more than 1 would say that the times are wrong. ``copy_gb_s`` are bytes moved by the time of their
streams. ``unplaced_ms`` of a step lie between its planning and its harvest and belong to none of its parts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

from benchmarks.gpu.tiers import SPILL_S, crowd_out, send
from firsttoken.bench.requests import random_prompt, run_request
from firsttoken.bench.session import Session, open_session
from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.step_record import StepRecord
from firsttoken.observability.ledger import summary

PREPARE_S = 60
DECODE_ROWS, DECODE_TOKENS = 8, 200


async def mixed_load(session: Session, rng: random.Random, options: argparse.Namespace) -> None:
    """Rows that decode, and prompts that come beside them."""
    vocab = session.llm.info.vocab_size
    rows = [
        asyncio.ensure_future(run_request(session.llm, random_prompt(rng, 64, vocab), DECODE_TOKENS))
        for _ in range(DECODE_ROWS)
    ]
    for _ in range(4):
        await send(session, random_prompt(rng, options.input // 2, vocab))
    await asyncio.gather(*rows)


async def round_trip(session: Session, rng: random.Random, options: argparse.Namespace) -> None:
    """A prompt leaves the device for host memory and comes back."""
    prompt = random_prompt(rng, options.input, session.llm.info.vocab_size)
    await send(session, prompt)
    await asyncio.sleep(SPILL_S)
    await crowd_out(session, rng, options)
    await asyncio.sleep(SPILL_S)
    await send(session, prompt)
    await send(session, random_prompt(rng, 32, session.llm.info.vocab_size))  # its step tells of the copies before


def figures(steps: list[StepRecord]) -> dict[str, Any]:
    wall = steps[-1].harvested_ns - steps[0].planned_ns
    moved = sum(step.copied_bytes_in + step.copied_bytes_out for step in steps)
    copying = sum(step.copy_ns for step in steps)
    return {
        "summary": summary(steps),
        "busy": round(sum(step.forward_ns + step.sample_ns for step in steps) / wall, 3),
        "unplaced_ms": round(
            max(step.ended_ns - step.started_ns - step.forward_ns - step.sample_ns for step in steps) / NS_PER_MS, 3
        ),
        "graphs": {key: sum(step.graph == key for step in steps) for key in sorted({step.graph for step in steps})},
        "pad_share": round(
            sum(step.pad_tokens for step in steps)
            / sum(step.pad_tokens + step.decode_rows + step.prefill_tokens for step in steps),
            3,
        ),
        "copied_bytes_in": sum(step.copied_bytes_in for step in steps),
        "copied_bytes_out": sum(step.copied_bytes_out for step in steps),
        "copy_ms": round(copying / NS_PER_MS, 3),
        "copy_gb_s": round(moved / copying, 2) if copying else None,
    }


def checks(mixed: list[StepRecord], moved: dict[str, Any], on_gpu: bool, prompt_bytes: int) -> dict[str, bool]:
    ids = [step.step_id for step in mixed]
    return {
        "no step is missing": ids == list(range(ids[0], ids[0] + len(ids))),
        "every step has a time of the device": all(step.forward_ns > 0 for step in mixed),
        "steps do not overlap": figures(mixed)["busy"] <= 1.0,
        "every step of a device that pads names its shape": all(bool(step.graph) == on_gpu for step in mixed),
        "some steps are captured": any(step.captured for step in mixed) or not on_gpu,
        "prompts are named": all(bool(step.prefill_requests) == bool(step.prefill_tokens) for step in mixed),
        "a prompt went out": moved["copied_bytes_out"] >= prompt_bytes,
        "a prompt came back, all that was not left on the device": moved["copied_bytes_in"] > 0 or not on_gpu,
        "copies have a time": moved["copy_ms"] > 0,
    }


async def measure(session: Session, options: argparse.Namespace) -> dict[str, Any]:
    llm, rng = session.llm, random.Random(7)
    await send(session, random_prompt(rng, 64, llm.info.vocab_size))
    first = llm.steps.last(1)[0].step_id
    await mixed_load(session, rng, options)
    mixed = llm.steps.since(first)
    await round_trip(session, rng, options)
    moved = figures(llm.steps.since(mixed[-1].step_id))
    blocks = options.input // llm.info.block_tokens - 1
    held = checks(mixed, moved, llm.info.device != "cpu", blocks * llm.info.bytes_per_block)
    return {"device": llm.info.device_name, "mixed": figures(mixed), "moved": moved, "checks": held}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    args = EngineArgs(
        model=options.model,
        device=options.device,
        kv_memory=options.kv_memory,
        kv_host_memory=options.kv_host_memory,
        max_model_len=options.input + 2048,
        max_num_seqs=16,
    )
    async with open_session(args, now_ns()) as session:
        await session.prepare(PREPARE_S)
        await asyncio.sleep(options.grow_s)
        return await measure(session, options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.2-1b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--input", type=int, default=2048)
    parser.add_argument("--kv-memory", type=int, default=1 << 30)
    parser.add_argument("--kv-host-memory", type=int, default=4 << 30)
    parser.add_argument("--grow-s", type=float, default=4.0, help="until host memory is pinned")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = asyncio.run(run(options))
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    return 0 if all(found["checks"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
