"""What the measuring itself takes, and how far it can be off: CPU time, and how late the event loop is."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import time
from collections.abc import Iterator
from typing import Any

from firsttoken.bench.http.pool import Pool
from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.observability.percentiles import percentiles

# A timer of the loop has steps of a millisecond, so lags below that are its own.
TICK_S = 0.010


class Overhead:
    """From `start` to `figures`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._lags_ms: list[float] = []
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """To be called before the first request is sent."""
        pool = self._pool
        pool.batch.longest_ns = 0
        self._connections, self._reopened, self._parsed_ns = len(pool.connect_ms), pool.reopened, pool.batch.total_ns
        self._began_ns, self._cpu_ns = now_ns(), time.process_time_ns()
        self._due = time.monotonic() + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        self._lags_ms.append(max(now - self._due, 0.0) * 1e3)
        self._due = now + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        if self._timer is None:
            raise RuntimeError("nothing was measured: start() comes first")
        self._timer.cancel()

    def figures(self, events: int, tokens: int) -> dict[str, Any]:
        """``events`` is the number of deliveries that brought ``tokens``. Stops."""
        self.stop()
        cpu_ns, wall_ns = time.process_time_ns() - self._cpu_ns, now_ns() - self._began_ns
        return {
            "cpu_share": cpu_ns / wall_ns,
            "cpu_us_per_token": cpu_ns / 1e3 / tokens if tokens else None,
            "parse_us_per_delivery": (self._pool.batch.total_ns - self._parsed_ns) / 1e3 / events if events else None,
            "longest_parse_ms": self._pool.batch.longest_ns / NS_PER_MS,
            "loop_lag_ms": percentiles(self._lags_ms),
            "connections": len(self._pool.connect_ms) - self._connections,
            "connect_ms": percentiles(self._pool.connect_ms[self._connections :]),
            "reopened": self._pool.reopened - self._reopened,
        }


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection inside, which would stop the stamps for milliseconds: what a load makes has no cycles."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def allow_open_files() -> None:
    """As many as the system lets this process have: each stream is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
