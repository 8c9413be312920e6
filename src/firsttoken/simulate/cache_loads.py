"""Loads for `run_cache`: conversations that come back, p0 among them, and a flood of prompts that do not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ServiceClass
from firsttoken.simulate.workload import TRACE_BLOCK_TOKENS, Job

FLOOD_BLOCKS = 16  # of each prompt of a flood
_ONE_OFF_SHARE = 0.5
_MEAN_LATER_TURNS = 3.0
_THINK_MEDIAN_S, _THINK_SIGMA = 60.0, 0.8
_FIRST_TOKENS, _TURN_TOKENS = (1000, 12_000), (300, 2500)
# Tokens of the prompts that applications begin with.
_SYSTEM_TOKENS = (0, 512, 1024, 2048, 4096)
_MAX_PROMPT = 100_000


def session_jobs(rate: float, seconds: float, seed: int) -> list[Job]:
    """``rate`` conversations a second begin at random. Half are one prompt, the others have 3 more turns on average,
    each the prompt before with an answer and a question added, after a time to think (log-normal, median 60 s). Each
    begins with the system prompt of one of five applications. Turns after ``seconds`` are left out."""
    rng = random.Random(seed)
    numbers = _Numbers()
    systems = [numbers.take(tokens // TRACE_BLOCK_TOKENS) for tokens in _SYSTEM_TOKENS]
    jobs: list[Job] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        jobs.extend(_conversation(rng, numbers, rng.choice(systems), at_s, seconds))
        at_s += rng.expovariate(rate)
    return sorted(jobs, key=lambda job: job.at_ns)


def _conversation(
    rng: random.Random, numbers: _Numbers, system: tuple[int, ...], at_s: float, end_s: float
) -> list[Job]:
    jobs: list[Job] = []
    blocks = system
    tokens = len(system) * TRACE_BLOCK_TOKENS + _between(rng, _FIRST_TOKENS)
    more = 0.0 if rng.random() < _ONE_OFF_SHARE else _MEAN_LATER_TURNS / (1 + _MEAN_LATER_TURNS)
    while at_s < end_s and tokens <= _MAX_PROMPT:
        # The block that is not full yet will be another one when it is.
        blocks += numbers.take(tokens // TRACE_BLOCK_TOKENS - len(blocks))
        end = numbers.take(1) if tokens % TRACE_BLOCK_TOKENS else ()
        jobs.append(Job(round(at_s * NS_PER_S), tokens, 300, blocks + end))
        if rng.random() >= more:
            break
        at_s += rng.lognormvariate(log(_THINK_MEDIAN_S), _THINK_SIGMA)
        tokens += _between(rng, _TURN_TOKENS)
    return jobs


def _between(rng: random.Random, bounds: tuple[int, int]) -> int:
    """Log-uniform: short ones are as many as long ones."""
    low, high = bounds
    return round(exp(rng.uniform(log(low), log(high))))


def with_p0(jobs: Sequence[Job], share: float, seed: int) -> list[Job]:
    """A share of the conversations become p0: prompts whose first two blocks are alike are of one conversation."""
    rng = random.Random(seed)
    chosen: dict[tuple[int, ...], bool] = {}
    marked: list[Job] = []
    for job in jobs:
        conversation = job.blocks[:2]
        if conversation not in chosen:
            chosen[conversation] = rng.random() < share
        marked.append(replace(job, service=ServiceClass.P0) if chosen[conversation] else job)
    return marked


def with_flood(jobs: Sequence[Job], ratio: float, seed: int) -> list[Job]:
    """Prompts of p2 that are like no other are added, at random times, until they have ``ratio`` blocks for each block
    of the others. Raises `ConfigError` where the prompts have no blocks."""
    blocks = sum(len(job.blocks) for job in jobs)
    if not blocks:
        raise ConfigError(
            "the load says not how its prompts begin (hash_ids), so nothing can be found again in a cache"
        )
    rng = random.Random(seed)
    numbers = _Numbers(1 + max(number for job in jobs for number in job.blocks))
    begin_ns, end_ns = jobs[0].at_ns, jobs[-1].at_ns
    flood = [
        Job(rng.randint(begin_ns, end_ns), FLOOD_BLOCKS * TRACE_BLOCK_TOKENS, 1, numbers.take(FLOOD_BLOCKS))
        for _ in range(round(ratio * blocks / FLOOD_BLOCKS))
    ]
    return sorted([*jobs, *flood], key=lambda job: job.at_ns)


class _Numbers:
    """Blocks that nobody has."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self, count: int) -> tuple[int, ...]:
        self._next += count
        return tuple(range(self._next - count, self._next))
