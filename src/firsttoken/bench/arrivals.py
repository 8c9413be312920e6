"""Who arrives when and wants what: the load of ``bench load``."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Tokens that one of an arrival's blocks stands for, as the published traces count them.
TRACE_BLOCK_TOKENS = 512
_BURST = re.compile(r"(\d{1,6})\s*,\s*(?:every\s*)?(\d{1,9}(?:\.\d{1,9})?)\s*s?")


@dataclass(frozen=True)
class Mix:
    """Lengths in tokens, each as likely as the others of its list."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Mix:
        """From ``64,256:16,64`` (inputs before the colon, outputs behind it). Raises ValueError."""
        sides = text.split(":")
        try:
            inputs, outputs = (tuple(int(number) for number in side.split(",")) for side in sides)
        except ValueError:
            raise ValueError(f"{text!r:.80} is not a mix: write it as in 64,256,512:16,64 (inputs:outputs)") from None
        if min(*inputs, *outputs) < 1:
            raise ValueError(f"{text!r:.80} holds a length below 1")
        return cls(inputs, outputs)

    def __str__(self) -> str:
        return ":".join(",".join(map(str, side)) for side in (self.inputs, self.outputs))


@dataclass(frozen=True)
class Arrival:
    """``at_s`` seconds after the beginning. Prompts are alike as far as their ``blocks`` are (ids of
    `TRACE_BLOCK_TOKENS` tokens each, the last one perhaps cut short); one without blocks is like no other."""

    at_s: float
    input: int
    output: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Burst:
    """``requests`` at once, every ``every_s`` seconds."""

    requests: int
    every_s: float

    @classmethod
    def parse(cls, text: str) -> Burst:
        """From ``32,every 10s`` or ``32,10``. Raises ValueError."""
        match = _BURST.fullmatch(text.strip())
        if match is None or int(match[1]) < 1 or float(match[2]) <= 0:
            raise ValueError(f"{text!r:.80} is no burst: write it as in '32,every 10s' (requests, seconds between)")
        return cls(int(match[1]), float(match[2]))

    def __str__(self) -> str:
        return f"{self.requests},every {self.every_s:g}s"

    def arrivals(self, seconds: float, mix: Mix, seed: int | str) -> list[Arrival]:
        """Bursts from 0 on, before ``seconds``; lengths as in `poisson`, input and output in this order."""
        rng = random.Random(seed)
        times = [number * self.every_s for number in range(math.ceil(seconds / self.every_s))]
        return [
            Arrival(at, rng.choice(mix.inputs), rng.choice(mix.outputs)) for at in times for _ in range(self.requests)
        ]


def poisson(rate: float, seconds: float, mix: Mix, seed: int | str) -> list[Arrival]:
    """``rate x seconds`` requests (rounded) whose gaps are exponential.

    The draws, for each request in this order, of one ``random.Random(seed)``: ``expovariate(rate)``, the input, the
    output. So a load can be repeated by other programs.
    """
    rng = random.Random(seed)
    at = 0.0
    arrivals = []
    for _ in range(round(rate * seconds)):
        at += rng.expovariate(rate)
        arrivals.append(Arrival(at, rng.choice(mix.inputs), rng.choice(mix.outputs)))
    return arrivals


def endless(mix: Mix, seed: int) -> Iterator[Arrival]:
    """Lengths for a closed loop, where the next request starts when one ends: input and output in this order."""
    rng = random.Random(seed)
    while True:
        yield Arrival(0.0, rng.choice(mix.inputs), rng.choice(mix.outputs))
