"""``bench latency``: batches of equal requests, one batch after the other."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.figures import latency_figures
from firsttoken.bench.requests import Timed, random_prompt, run_request
from firsttoken.bench.roof import kv_bytes, read_roof_gb_s, weight_bytes
from firsttoken.bench.session import HostTime, Session
from firsttoken.core.clock import NS_PER_S
from firsttoken.core.engine_args import EngineArgs
from firsttoken.transport.messages import EngineStats

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    """``batch`` requests of ``input`` + ``output`` tokens at once, ``repeat`` times after ``warmup`` times unmeasured.
    ``seed`` chooses the prompts; no two share a beginning. Before, the idle engine has up to ``prepare_s`` to capture
    its steps, as a server has long done."""

    batch: int = 1
    input: int = 512
    output: int = 128
    repeat: int = 5
    warmup: int = 1
    seed: int = 0
    prepare_s: float = 60.0


@dataclass(frozen=True)
class _Round:
    """One batch: its requests, and the loop's CPU time while all of them decoded."""

    requests: list[Timed]
    host: HostTime

    @property
    def wall_s(self) -> float:
        return (max(one.last_ns for one in self.requests) - min(one.sent_ns for one in self.requests)) / NS_PER_S


async def measure_latency(session: Session, config: LatencyConfig, say: Say = lambda text: None) -> dict[str, Any]:
    """The figures under their public names. Raises `BenchFailed` when a request got less than it asked for."""
    session.check_length(config.input + config.output)
    say("waiting for the engine to be prepared")
    prepared_s = await session.prepare(config.prepare_s)
    rounds = []
    before = session.llm.stats
    for number in range(-config.warmup, config.repeat):
        if number == 0:
            before = session.llm.stats
        say(f"round {number + 1} of {config.repeat}" if number >= 0 else "warming up")
        rounds.append(await _round(session, config, number))
    del rounds[: config.warmup]
    return {
        **latency_figures([one for round_ in rounds for one in round_.requests]),
        **_throughput(config, rounds),
        "host_us_per_step": sum((round_.host for round_ in rounds), HostTime()).us_per_step,
        "captured_share": session.captured_share(before),
        "rounds": [_round_figures(round_) for round_ in rounds],
        "prepared_s": prepared_s,
        "start_s": session.start_s,
        "start_ms": session.start_ms,
        "peak_memory_gib": await session.peak_memory_gib(),
    }


async def _round(session: Session, config: LatencyConfig, number: int) -> _Round:
    llm = session.llm
    rng = random.Random(f"{config.seed}/{number}")
    prompts = [random_prompt(rng, config.input, llm.info.vocab_size) for _ in range(config.batch)]
    prefilling = config.batch
    all_decode: EngineStats | None = None

    def on_first() -> None:
        nonlocal prefilling, all_decode
        prefilling -= 1
        if not prefilling:
            all_decode = llm.stats

    requests = await asyncio.gather(*(run_request(llm, prompt, config.output, on_first=on_first) for prompt in prompts))
    failed = [one.error for one in requests if one.error is not None]
    if failed or all_decode is None:
        raise BenchFailed(f"{len(failed)} of {len(requests)} requests failed, the first one: {failed[0]}")
    return _Round(requests, HostTime.between(all_decode, llm.stats))


def _throughput(config: LatencyConfig, rounds: list[_Round]) -> dict[str, float]:
    median_s = statistics.median(one.e2e_ms for round_ in rounds for one in round_.requests) / 1e3
    tokens = sum(one.tokens for round_ in rounds for one in round_.requests)
    return {
        "tokens_per_s": tokens / sum(round_.wall_s for round_ in rounds),
        "tokens_per_s_median": config.batch * config.output / median_s,
        "requests_per_s_median": config.batch / median_s,
    }


def _round_figures(round_: _Round) -> dict[str, float | None]:
    """Medians of one round, so that a drift over the rounds can be seen."""
    tpots = [tpot for one in round_.requests if (tpot := one.tpot_ms) is not None]
    return {
        "wall_s": round_.wall_s,
        "ttft_ms": statistics.median(one.ttft_ms for one in round_.requests),
        "tpot_ms": statistics.median(tpots) if tpots else None,
        "host_us_per_step": round_.host.us_per_step,
    }


def bandwidth(session: Session, config: LatencyConfig, args: EngineArgs, tpot_ms: float | None) -> dict[str, Any]:
    """``read_bytes_per_step`` (weights and, on the average, KV), ``achieved_gb_s`` (those over the gap), ``roof_gb_s``
    and ``roof_share``; None where the bytes or the device's roof are not known."""
    from firsttoken.checkpoint.locate import open_checkpoint

    info = session.llm.info
    weights = weight_bytes(
        open_checkpoint(args.model, offline=args.offline, revision=args.revision), info.quantization, info.dtype
    )
    roof = read_roof_gb_s(info.device_name)
    if weights is None or tpot_ms is None:
        return {"read_bytes_per_step": None, "achieved_gb_s": None, "roof_gb_s": roof, "roof_share": None}
    read = weights + kv_bytes(info, config.batch, config.input, config.output)
    achieved = read / (tpot_ms / 1e3) / 1e9
    return {
        "read_bytes_per_step": round(read),
        "achieved_gb_s": achieved,
        "roof_gb_s": roof,
        "roof_share": None if roof is None else achieved / roof,
    }
