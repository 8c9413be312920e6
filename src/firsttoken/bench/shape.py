"""What a load is, whomever it is sent to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from firsttoken.bench.arrivals import Arrival, Burst, Mix, poisson


@dataclass(frozen=True, kw_only=True)
class Load:
    """One of: ``rate`` requests a second (Poisson), a ``burst``, the arrivals of a ``trace``, or ``concurrency``
    callers that each send their next request when their last one ended. For ``seconds``, after which what still runs
    is waited for; before that the same runs for ``warmup_s`` unmeasured, with other prompts. ``target_*`` are in ms.
    """

    mix: Mix
    rate: float | None = None
    burst: Burst | None = None
    trace: tuple[Arrival, ...] = ()
    concurrency: int | None = None
    seconds: float = 12.0
    warmup_s: float = 2.0
    seed: int = 1
    target_ttft_ms: float | None = None
    target_itl_ms: float | None = None

    def arrivals(self, seconds: float, seed: int) -> list[Arrival]:
        """Of an open loop, in order. Raises `ValueError` where there is none."""
        if self.trace:
            return list(takewhile(lambda arrival: arrival.at_s < seconds, self.trace))
        if self.burst is not None:
            return self.burst.arrivals(seconds, self.mix, seed)
        if self.rate is not None:
            return poisson(self.rate, seconds, self.mix, seed)
        raise ValueError("a load needs a rate, a burst, a trace or a concurrency")

    @property
    def longest(self) -> int:
        """Tokens of the longest request that it may send, prompt and output."""
        if self.trace:
            return max(arrival.input + arrival.output for arrival in self.trace)
        return max(self.mix.inputs) + max(self.mix.outputs)
