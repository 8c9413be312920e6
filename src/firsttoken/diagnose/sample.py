"""One request as its caller saw it. All of diagnose works on these; a probe makes them, tests make them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from firsttoken.core.clock import NS_PER_MS

PHASES = ("dns", "tcp", "tls", "ttfb", "first_token", "gaps", "transfer")


@dataclass(frozen=True)
class Link:
    """What the system's TCP says of the connection (Linux); ``rtt_ms`` is the shortest round trip it saw. The signs of
    loss are counts since the connection began: segments sent again, and segments that came out of order."""

    rtt_ms: float | None = None
    retransmits: int = 0
    out_of_order: int = 0

    @property
    def lossy(self) -> bool:
        return self.retransmits + self.out_of_order > 0


@dataclass(frozen=True)
class Tls:
    """What was agreed on. ``server_bytes`` is what the server sent during the handshake, nearly all of it its
    certificates; ``chain`` how many there were. None: this system cannot tell."""

    version: str
    cipher: str
    resumed: bool
    server_bytes: int | None = None
    chain: int | None = None


@dataclass(frozen=True)
class Chunk:
    """An event with text. ``tokens`` is how many it brought where the server says so; ``answer`` is False for
    reasoning."""

    at_ns: int
    tokens: int | None = None
    answer: bool = True


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Stamps of one clock in ns, ascending: each names the end of a phase. On a reused connection those up to
    ``secured_ns`` are ``began_ns``. ``chunks`` holds at least one.

    ``prompt_tokens`` is the number of words where the server does not count. ``request_id`` is the one that the server
    echoed. ``account`` is the server's own account in ms by stage, {} if it gives none, ``proxy_ms`` what a load
    balancer says that it kept the request. ``run_queue_ms`` of its largest gap the engine waited for a processor, as
    far as the server says. ``cached_tokens`` None: the server does not say.
    """

    request_id: str = ""
    began_ns: int
    resolved_ns: int
    connected_ns: int
    secured_ns: int
    sent_ns: int
    first_byte_ns: int
    chunks: tuple[Chunk, ...]
    ended_ns: int
    reused: bool = False
    keep_alive: bool = True
    http_version: str = "1.1"
    prompt_tokens: int
    output_tokens: int | None = None
    cached_tokens: int | None = None
    account: Mapping[str, float] = field(default_factory=dict)
    run_queue_ms: float = 0.0
    proxy_ms: float | None = None
    link: Link = Link()
    tls: Tls | None = None

    @property
    def first_token_ns(self) -> int:
        return self.chunks[0].at_ns

    @property
    def last_token_ns(self) -> int:
        return self.chunks[-1].at_ns

    @property
    def phases(self) -> dict[str, float]:
        """ms of each of `PHASES`: they follow one another, so that their sum is the total. The time to write the
        request is part of ``ttfb``; ``gaps`` is all the time from the first token to the last."""
        ends = (
            self.resolved_ns,
            self.connected_ns,
            self.secured_ns,
            self.first_byte_ns,
            self.first_token_ns,
            self.last_token_ns,
            self.ended_ns,
        )
        return {
            name: (after - before) / NS_PER_MS
            for name, (before, after) in zip(PHASES, pairwise((self.began_ns, *ends)), strict=True)
        }

    @property
    def total_ms(self) -> float:
        return (self.ended_ns - self.began_ns) / NS_PER_MS

    @property
    def setup_ms(self) -> float:
        """Until the connection could carry the request."""
        return (self.secured_ns - self.began_ns) / NS_PER_MS

    @property
    def ttft_ms(self) -> float:
        """From the very beginning, as the caller waits."""
        return (self.first_token_ns - self.began_ns) / NS_PER_MS

    @property
    def wait_ms(self) -> float:
        """From the connection being ready to the first token: where servers send their headers before the token and
        where with it does not matter."""
        return (self.first_token_ns - self.secured_ns) / NS_PER_MS

    @property
    def answer_ms(self) -> float | None:
        """To the first text that is not reasoning; None where there is none."""
        return next(((chunk.at_ns - self.began_ns) / NS_PER_MS for chunk in self.chunks if chunk.answer), None)

    @property
    def gaps_ms(self) -> list[float]:
        """The time between events with text, as they came."""
        return [(after.at_ns - before.at_ns) / NS_PER_MS for before, after in pairwise(self.chunks)]

    @property
    def computed_tokens(self) -> int:
        """Of the prompt, those that were not found in a cache, as far as the server says."""
        return max(self.prompt_tokens - (self.cached_tokens or 0), 0)

    @property
    def tokens(self) -> int:
        """As the server counts them, else the events with text."""
        return len(self.chunks) if self.output_tokens is None else max(self.output_tokens, len(self.chunks))

    @property
    def tokens_after_first(self) -> int:
        """Those that the time of the gaps was spent on: all but the first event's."""
        return max(self.tokens - (self.chunks[0].tokens or 1), 0)

    @property
    def tpot_ms(self) -> float | None:
        """ms an output token after the first event's; None where none came."""
        later = self.tokens_after_first
        if len(self.chunks) < 2 or later == 0:
            return None
        return (self.last_token_ns - self.first_token_ns) / NS_PER_MS / later
