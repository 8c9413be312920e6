"""An engine that is measured: its start with an account, what it tells about itself, its end."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.requests import random_prompt, run_request
from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.transport.channel import LaunchedEngine
from firsttoken.transport.messages import EngineStats

# The first request after the start: short, so that its time says what the start left to be done, not what prompts cost.
FIRST_PROMPT = 32
# An idle engine tells its memory with its heartbeats.
_HEARTBEAT_WAIT_S = 5.0


@dataclass(frozen=True)
class HostTime:
    """CPU time of the engine's loop over a stretch of steps."""

    steps: int = 0
    ns: int = 0

    @classmethod
    def between(cls, before: EngineStats, after: EngineStats) -> HostTime:
        return cls(after.steps - before.steps, after.host_ns - before.host_ns)

    def __add__(self, other: HostTime) -> HostTime:
        return HostTime(self.steps + other.steps, self.ns + other.ns)

    @property
    def us_per_step(self) -> float | None:
        return self.ns / 1e3 / self.steps if self.steps else None


@dataclass(frozen=True)
class Session:
    """A started engine in a process of its own. ``start_ms`` are the parts of the time from ``began_ns`` (see
    `open_session`) to the delivery of the first token, in order; they sum to it."""

    llm: AsyncLLM
    start_ms: dict[str, float]

    @property
    def start_s(self) -> float:
        return sum(self.start_ms.values()) / 1e3

    def captured_share(self, since: EngineStats) -> float | None:
        """Which share of the steps since ``since`` were launched as a graph."""
        stats = self.llm.stats
        steps = stats.steps - since.steps
        return (stats.captured_steps - since.captured_steps) / steps if steps else None

    async def prepare(self, limit_s: float) -> float | None:
        """Wait until the idle engine has prepared the steps that it will run (graphs, on a GPU), as a server has long
        done when load comes. The seconds that this took; None when it was not done within ``limit_s``."""
        began = time.monotonic()
        while self.llm.stats.unprepared:
            if time.monotonic() - began > limit_s:
                return None
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def peak_memory_gib(self) -> float | None:
        """Most memory that the engine ever held (see `EngineStats.peak_memory`), None when it does not tell."""
        asked, waited_until = now_ns(), time.monotonic() + _HEARTBEAT_WAIT_S
        while self.llm.stats.heartbeat_ns < asked and time.monotonic() < waited_until:  # noqa: ASYNC110  # a gauge, no event
            await asyncio.sleep(0.05)
        return self.llm.stats.peak_memory / (1 << 30) or None

    def check_length(self, tokens: int) -> None:
        """Raise `ConfigError` when a request of so many tokens, prompt and output, cannot run."""
        limit = self.llm.info.max_model_len
        if tokens > limit:
            raise ConfigError(
                f"a request of {tokens} tokens is longer than this engine's {limit}: "
                "lower --input or --output, or give --max-model-len or more --kv-memory"
            )


@asynccontextmanager
async def open_session(args: EngineArgs, began_ns: int, handle: LaunchedEngine | None = None) -> AsyncIterator[Session]:
    """Start the engine, unless ``handle`` is that of ``args`` already, have one short answer, and stop the engine at
    the end.

    ``began_ns`` is when the caller's own start began: what lies between it and the launch is the part "command".
    """
    launched = now_ns() if handle is None else handle.launched_ns
    llm = await AsyncLLM.launch(args, handle=handle)
    try:
        ready = now_ns()
        prompt = random_prompt(
            random.Random(-1), max(1, min(FIRST_PROMPT, llm.info.max_model_len - 1)), llm.info.vocab_size
        )
        first = await run_request(llm, prompt, 1)
        if first.error is not None:
            raise BenchFailed(f"the first request failed: {first.error}")
        parts = {"command": (launched - began_ns) / NS_PER_MS}
        parts |= {name: ms for name, ms in llm.info.start_ms.items() if name != "other"}
        parts["first_token"] = (first.last_ns - ready) / NS_PER_MS
        # What the engine did not name, its way to tell that it is ready, and what the front end did meanwhile.
        parts["other"] = (first.last_ns - began_ns) / NS_PER_MS - sum(parts.values())
        gc.collect()
        gc.freeze()
        yield Session(llm, parts)
    finally:
        gc.unfreeze()
        await llm.shutdown()
