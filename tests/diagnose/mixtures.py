"""Made-up servers with known faults: what a probe would have measured of them, and what each fault costs.

Nothing here knows how a verdict is reached. A fault's cost is what the same server, with the same random numbers,
takes less without it.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace
from typing import Any

from firsttoken.diagnose.references import Reference
from firsttoken.diagnose.sample import Chunk, Link, Sample, Tls
from firsttoken.diagnose.session import KeepAlive, Runs

SHARED = 64


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server and the way to it; as it stands here, one without a fault. Times in ms."""

    dns: float = 0.4
    rtt: float = 1.5
    handshake: float = 2.0
    tls12: bool = False
    keep_alive: bool = True
    loss: float = 0.0  # the share of requests with a lost segment
    loss_stall: float = 210.0
    proxy: float = 0.4
    window: float = 0.0
    host: float = 1.0
    queue: float = 0.2  # the mean; exponential
    prefill: float = 0.03  # a prompt token
    decode: float = 6.0  # a step
    cache: bool = True
    stalls: float = 0.0  # the share of gaps that are held up
    stall: float = 60.0
    transfer: float = 0.3
    account: bool = False
    stamps: bool = True
    counts_cached: bool = True
    roofs: bool = True

    @property
    def reference(self) -> Reference:
        return Reference(prefill_ms_per_token=0.03, decode_ms_per_token=6.1) if self.roofs else Reference()


HEALTHY = Server()
# What each fault sets, from how many ms it is to cost about.
FAULTS: dict[str, Any] = {
    "dns": lambda ms, rng: {"dns": ms},
    "distance": lambda ms, rng: {"rtt": HEALTHY.rtt + ms / 3},
    "tls": lambda ms, rng: {"handshake": ms, "tls12": rng.random() < 0.3},
    "no_reuse": lambda ms, rng: {"keep_alive": False},
    "loss": lambda ms, rng: {"loss": min(ms / 210, 0.6)},
    "load_balancer": lambda ms, rng: {"proxy": ms, "stamps": True},
    "batch_window": lambda ms, rng: {"window": ms},
    "host": lambda ms, rng: {"host": ms},
    "queue": lambda ms, rng: {"queue": ms},
    "prefill": lambda ms, rng: {"prefill": HEALTHY.prefill + ms / SHARED, "roofs": True},
    "decode": lambda ms, rng: {"decode": HEALTHY.decode + ms / 31, "roofs": True},
    "cache_miss": lambda ms, rng: {"cache": False, "prefill": max(ms / SHARED, 0.1)},
    "jitter": lambda ms, rng: {"stalls": 0.1, "stall": ms / 3.1},
    "transfer": lambda ms, rng: {"transfer": ms},
}


def mixture(seed: int) -> tuple[Server, tuple[str, ...]]:
    """A server with one to four faults, each of 15 to 400 ms, and the faults' names."""
    rng = random.Random(seed)
    names = rng.sample(sorted(FAULTS), rng.choice((1, 2, 2, 3, 4)))
    server = replace(HEALTHY, account=rng.random() < 0.5, counts_cached=rng.random() < 0.7, roofs=rng.random() < 0.7)
    for name in names:
        server = replace(server, **FAULTS[name](15 * (400 / 15) ** rng.random(), rng))
    if server.roofs and "cache_miss" in names and "prefill" not in names:
        names.append("prefill")  # a miss costs only where prefill does: the roof shows that as well
    return server, tuple(names)


def without(server: Server, fault: str) -> Server:
    """The server with what a fault set put back to what the reference of that layer says."""
    changed = FAULTS[fault](100.0, random.Random(0))
    healthy = {name: getattr(HEALTHY, name) for name in changed if name not in ("roofs", "stamps")}
    if fault == "cache_miss":
        healthy.pop("prefill")
    return replace(server, **healthy)


def costs(server: Server, faults: tuple[str, ...], seed: int, requests: int = 20) -> dict[str, float]:
    """By how many ms the mean of these very requests is shorter without each fault."""

    def mean(one: Server, reused: bool = False) -> float:
        samples = _paced(one, seed, requests)
        return statistics.fmean(sample.total_ms - sample.setup_ms * reused for sample in samples)

    now = mean(server)
    # A connection that is kept is not made again.
    return {
        fault: now - (mean(server, reused=True) if fault == "no_reuse" else mean(without(server, fault)))
        for fault in faults
    }


def measured(server: Server, seed: int, requests: int = 20) -> Runs:
    """What a session would bring home."""
    rng = random.Random(f"sweeps/{seed}")
    return Runs(
        model="made-up",
        paced=tuple(_paced(server, seed, requests)),
        keep_alive=KeepAlive(server.keep_alive),
        lengths={
            tokens: tuple(_request(server, rng, tokens, tokens, outputs=8) for _ in range(4))
            for tokens in (16, 256, 1024)
        },
        crowds={
            count: tuple(
                _request(server, rng, 16, 16, outputs=8, ahead=turn, crowd=count)
                for _ in range(2)
                for turn in range(count)
            )
            for count in (1, 2, 4, 8)
        },
        shared_tokens=SHARED,
    )


def _paced(server: Server, seed: int, requests: int) -> list[Sample]:
    # A request's random numbers are its own, so that a fault taken away leaves the rest as it was.
    return [
        _request(server, random.Random(f"{seed}/{number}"), 128, 128 - SHARED if server.cache else 128)
        for number in range(requests)
    ]


def _request(
    server: Server,
    rng: random.Random,
    prompt: int,
    computed: int,
    *,
    outputs: int = 32,
    ahead: int = 0,
    crowd: int = 1,
) -> Sample:
    def some(ms: float) -> float:
        return ms * rng.uniform(0.97, 1.03) + rng.expovariate(20)

    ends = [0.0]

    def pass_(ms: float) -> int:
        ends.append(ends[-1] + ms)
        return round(ends[-1] * 1e6)

    lost = rng.random() < server.loss
    lost_at = rng.randrange(outputs - 1)
    resolved = pass_(some(server.dns))
    connected = pass_(some(server.rtt))
    secured = pass_(some(server.rtt) * (2 if server.tls12 else 1) + some(server.handshake))
    proxy = some(server.proxy)
    queue = rng.expovariate(1) * server.queue
    window = some(server.window) if server.window else 0.0
    hosts = [some(server.host) for _ in range(ahead + 1)]
    forward = some(server.decode) + some(server.prefill * computed) + server.prefill * computed * (crowd - 1)
    first = pass_(some(server.rtt) + proxy + queue + window + sum(hosts) + forward)
    chunks = [Chunk(first + 20_000)]
    ends[-1] += 0.02
    for number in range(outputs - 1):
        gap = some(server.decode)
        if rng.random() < server.stalls:
            gap += server.stall
        if lost and number == lost_at:
            gap += server.loss_stall
        chunks.append(Chunk(pass_(gap), 1))
    ended = pass_(some(server.transfer))
    account = {"queue_ms": queue + window, "prefill_ms": forward, "tokenize_ms": sum(hosts), "total_ms": ends[-1]}
    return Sample(
        began_ns=0,
        resolved_ns=resolved,
        connected_ns=connected,
        secured_ns=secured,
        sent_ns=secured,
        first_byte_ns=first,
        chunks=tuple(chunks),
        ended_ns=ended,
        keep_alive=server.keep_alive,
        prompt_tokens=prompt,
        output_tokens=outputs,
        cached_tokens=(prompt - computed) if server.counts_cached else None,
        account=account if server.account else {},
        proxy_ms=proxy if server.stamps else None,
        link=Link(server.rtt * 0.98, int(lost), 0),
        tls=Tls("TLSv1.2" if server.tls12 else "TLSv1.3", "made-up", False, 3000, 2),
    )
