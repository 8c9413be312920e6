"""What an engine on this machine's CPU takes before any model, and for each number of token rows: measured."""

from __future__ import annotations

import asyncio
import random

from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.requests import random_prompt, run_request
from firsttoken.bench.session import Session, open_session
from firsttoken.core.clock import now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.executor.memory_plan.cpu import Footprint

MODEL = "random:tiny-llama"
# Prompts of so many lengths, which no step has seen before; few enough that all of them are kept.
_LENGTHS = range(101, 225, 8)
_GIB = 1 << 30


def measured_as(quantization: str) -> str:
    """The columns of the tiny model fit no groups of int4. What an engine takes besides weights is that of int8: both
    multiply pieces in bfloat16."""
    return "int8" if quantization == "int4" else quantization


def measure_footprint(dtype: str, quantization: str, threads: int) -> Footprint:
    """Starts an engine with a tiny model, for some two seconds. Raises `FirstTokenError` when it cannot run here."""
    return asyncio.run(_measure(dtype, quantization, threads))


async def _measure(dtype: str, quantization: str, threads: int) -> Footprint:
    args = EngineArgs(
        model=MODEL,
        device="cpu",
        dtype=dtype,
        quantization=measured_as(quantization),
        threads=threads,
        max_num_seqs=1,
        offline=True,
    )
    rng = random.Random(1)
    async with open_session(args, now_ns()) as session:
        engine = await _peak(session)
        for length in _LENGTHS:
            done = await run_request(session.llm, random_prompt(rng, length, session.llm.info.vocab_size), 1)
            if done.error is not None:
                raise BenchFailed(f"an engine with a tiny model failed: {done.error}")
        after = await _peak(session)
    return Footprint(engine=engine, length=(after - engine) // len(_LENGTHS))


async def _peak(session: Session) -> int:
    found = await session.peak_memory_gib()
    if found is None:
        raise BenchFailed("the engine does not tell its memory")
    return round(found * _GIB)
