"""The requests of a simulation: when they come, how long they are, and which prompts begin alike."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from firsttoken.bench.arrivals import TRACE_BLOCK_TOKENS as TRACE_BLOCK_TOKENS  # read from here by the whole room
from firsttoken.bench.arrivals import Arrival, Mix, poisson
from firsttoken.core.clock import NS_PER_S
from firsttoken.core.service import ServiceClass

# Every generated token. No prompt holds it, so no prompt begins with what another request generated.
OUTPUT_TOKEN = 0
# The group of the figures of requests that come in bursts.
BURSTS = "bursts"
# A block's id plus 1 is a token's id, which has 32 bits.
MAX_BLOCK_ID = 2**32 - 2


@dataclass(frozen=True, slots=True)
class Job:
    """A request that comes ``at_ns`` after the beginning with ``input`` tokens and wants ``output`` more.

    Prompts are alike as far as their ``blocks`` are (ids of `TRACE_BLOCK_TOKENS` tokens each, the last one perhaps cut
    short); one without blocks is like no other. The figures of a ``group`` are told apart from others of its class.
    ``tenant`` shares the class with others. The caller leaves after ``patience_ms``, whether the request runs or not,
    and one that has not started after ``deadline_ms`` never does; 0 for never, and for no deadline. ``priority`` orders
    inside the class, lower first; ``block_tokens`` are those of each of the ``blocks``. One with a request (its number
    in the load) to come ``after`` comes ``at_ns`` after that one's end.
    """

    at_ns: int
    input: int
    output: int
    blocks: tuple[int, ...] = ()
    service: ServiceClass = ServiceClass.P2
    group: str = ""
    tenant: str = ""
    patience_ms: float = 0.0
    deadline_ms: float = 0.0
    priority: int = 0
    block_tokens: int = TRACE_BLOCK_TOKENS
    after: int | None = None

    @property
    def counted_in(self) -> str:
        """The name that its figures have: the class, and the group if there is one."""
        return f"{self.service.name.lower()} {self.group}".rstrip()

    def prompt(self, number: int) -> bytes:
        """Token ids (uint32, little-endian). ``number`` is the request's own in a load without blocks."""
        if not self.blocks:
            return _word(number) * self.input
        return b"".join([_word(block) * self.block_tokens for block in self.blocks])[: 4 * self.input]


def _word(number: int) -> bytes:
    return (number + 1).to_bytes(4, "little")  # from 1 on: 0 is `OUTPUT_TOKEN`


def poisson_jobs(rate: float, seconds: float, mix: Mix, seed: int) -> list[Job]:
    """The load that ``bench load`` sends with the same numbers; no two prompts begin alike."""
    return [
        Job(round(arrival.at_s * NS_PER_S), arrival.input, arrival.output)
        for arrival in poisson(rate, seconds, mix, seed)
    ]


@dataclass(frozen=True)
class Phase:
    """Requests at random, ``rate`` a second on average, for ``seconds``."""

    rate: float
    seconds: float


@dataclass(frozen=True)
class Burst:
    """``requests`` at once, ``idle_s`` after the phase or burst before."""

    requests: int
    idle_s: float


def shaped_jobs(phases: Sequence[Phase], bursts: Sequence[Burst], mix: Mix, seed: int) -> list[Job]:
    """The phases one after the other, then the bursts, which count in a group of their own. No two prompts begin
    alike."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    began = 0.0
    for phase in phases:
        ends = began + phase.seconds
        at = began + rng.expovariate(phase.rate)
        while at < ends:
            jobs.append(Job(round(at * NS_PER_S), rng.choice(mix.inputs), rng.choice(mix.outputs)))
            at += rng.expovariate(phase.rate)
        began = ends
    for burst in bursts:
        began += burst.idle_s
        jobs += [
            Job(round(began * NS_PER_S), rng.choice(mix.inputs), rng.choice(mix.outputs), group=BURSTS)
            for _ in range(burst.requests)
        ]
    return jobs


def with_classes(jobs: Sequence[Job], shares: Mapping[ServiceClass, float], seed: int) -> list[Job]:
    """The same requests, each of a class drawn by ``shares``: arrivals and lengths do not depend on them."""
    rng = random.Random(f"classes {seed}")
    classes, weights = list(shares), list(shares.values())
    return [replace(job, service=rng.choices(classes, weights)[0]) for job in jobs]


def speeded_up(jobs: Sequence[Job], scale: float) -> list[Job]:
    """The same requests, ``scale`` times as fast one after the other."""
    return [replace(job, at_ns=round(job.at_ns / scale)) for job in jobs]


def within(jobs: Sequence[Job], seconds: float) -> list[Job]:
    """Those that come in the first ``seconds``."""
    return [job for job in jobs if job.at_ns < seconds * NS_PER_S]


def as_arrivals(jobs: Sequence[Job]) -> list[Arrival]:
    """For a load on a real engine or server, which knows no groups, tenants or patience."""
    return [Arrival(job.at_ns / NS_PER_S, job.input, job.output, job.blocks) for job in jobs]
