"""The requests of a simulation: when they come, how long they are, and which prompts begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from firsttoken.bench.arrivals import Mix, poisson
from firsttoken.core.clock import NS_PER_S

# The class of requests that claim none.
DEFAULT_CLASS = "p2"
# Tokens that one of `Job.blocks` stands for, as the published traces count them.
TRACE_BLOCK_TOKENS = 512
# Every generated token. No prompt holds it, so no prompt begins with what another request generated.
OUTPUT_TOKEN = 0
# A block's id plus 1 is a token's id, which has 32 bits.
MAX_BLOCK_ID = 2**32 - 2


@dataclass(frozen=True, slots=True)
class Job:
    """A request that comes ``at_ns`` after the beginning with ``input`` tokens and wants ``output`` more.

    Prompts are alike as far as their ``blocks`` are (ids of `TRACE_BLOCK_TOKENS` tokens each, the last one perhaps cut
    short); one without blocks is like no other. ``service_class`` is the class that its figures count in.
    """

    at_ns: int
    input: int
    output: int
    blocks: tuple[int, ...] = ()
    service_class: str = DEFAULT_CLASS

    def prompt(self, number: int) -> bytes:
        """Token ids (uint32, little-endian). ``number`` is the request's own in a load without blocks."""
        if not self.blocks:
            return _word(number) * self.input
        return b"".join([_word(block) * TRACE_BLOCK_TOKENS for block in self.blocks])[: 4 * self.input]


def _word(number: int) -> bytes:
    return (number + 1).to_bytes(4, "little")  # from 1 on: 0 is `OUTPUT_TOKEN`


def poisson_jobs(rate: float, seconds: float, mix: Mix, seed: int) -> list[Job]:
    """The load that ``bench load`` sends with the same numbers; no two prompts begin alike."""
    return [
        Job(round(arrival.at_s * NS_PER_S), arrival.input, arrival.output)
        for arrival in poisson(rate, seconds, mix, seed)
    ]


def speeded_up(jobs: Sequence[Job], scale: float) -> list[Job]:
    """The same requests, ``scale`` times as fast one after the other."""
    return [replace(job, at_ns=round(job.at_ns / scale)) for job in jobs]


def within(jobs: Sequence[Job], seconds: float) -> list[Job]:
    """Those that come in the first ``seconds``."""
    return [job for job in jobs if job.at_ns < seconds * NS_PER_S]
