"""One measured request: what its caller sees, and when."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.errors import FirstTokenError
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ServiceClass, Terms
from firsttoken.observability.account import STAGES

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM


@dataclass(slots=True)
class Timed:
    """A request as its caller saw it. ``sent_ns`` is the instant before it was handed to the engine's front end,
    ``arrivals`` the instant and number of tokens of each delivery; ``stages`` is the engine's account of its time (see
    `observability.account.timings`), and ``cached`` its tokens that were found, by tier; ``error`` says why it has no
    more tokens."""

    input: int
    output: int
    sent_ns: int = 0
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    error: str | None = None
    stages: dict[str, float] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True when all tokens that were asked for came."""
        return self.error is None and self.tokens == self.output

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def last_ns(self) -> int:
        """When the last token was delivered; only for a request that got one."""
        return self.arrivals[-1][0]

    @property
    def ttft_ms(self) -> float:
        """Only for a request that got a token, as the three below."""
        return (self.arrivals[0][0] - self.sent_ns) / NS_PER_MS

    @property
    def e2e_ms(self) -> float:
        return (self.last_ns - self.sent_ns) / NS_PER_MS

    @property
    def tpot_ms(self) -> float | None:
        """(last - first token) / (tokens - 1); None for a single token, which has no gap."""
        if self.tokens < 2:
            return None
        return (self.last_ns - self.arrivals[0][0]) / NS_PER_MS / (self.tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """The gap before each token but the first. Tokens delivered together: the gap before them, then zeros."""
        gaps = [0.0] * (self.arrivals[0][1] - 1) if self.arrivals else []
        for (before, _), (now, count) in pairwise(self.arrivals):
            gaps.append((now - before) / NS_PER_MS)
            gaps.extend([0.0] * (count - 1))
        return gaps


def random_prompt(rng: random.Random, tokens: int, vocab_size: int) -> array[int]:
    """``tokens`` ids, uint32. Fresh ones share no beginning, so that no prefix cache helps."""
    return array("I", rng.choices(range(vocab_size), k=tokens))


async def run_request(
    llm: AsyncLLM,
    prompt: array[int],
    output: int,
    *,
    service: ServiceClass = ServiceClass.P2,
    on_first: Callable[[], None] = lambda: None,
) -> Timed:
    """Ask for exactly ``output`` tokens, greedily and past any end token, and note each delivery.

    ``on_first`` is called when the first token came. What the engine refuses or fails is noted, not raised.
    """
    timed = Timed(len(prompt), output)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    timed.sent_ns = now_ns()
    try:
        generation = llm.open(prompt, params, terms=Terms(service=service))
        try:
            async for delta in generation:
                if delta.token_ids:
                    timed.arrivals.append((now_ns(), len(delta.token_ids)))
                    if len(timed.arrivals) == 1:
                        on_first()
            account = generation.timings()
            timed.stages = {name: account[name] for name in STAGES}
            timed.cached = account["cached_tokens"]
        finally:
            generation.cancel()
    except FirstTokenError as error:
        timed.error = f"{type(error).__name__}: {error}"
    else:
        if not timed.ok:
            timed.error = f"ended after {timed.tokens} of {output} tokens"
    return timed
