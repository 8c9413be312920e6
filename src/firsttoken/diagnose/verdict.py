"""Which layer is at fault: the one whose return to its reference would shorten a request most. A pure function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from firsttoken.diagnose.advice import ADVICE, explain
from firsttoken.diagnose.evidence import Evidence
from firsttoken.diagnose.references import Reference

LAYERS = {
    "dns": "network",
    "connect": "network",
    "tls": "network",
    "no_reuse": "network",
    "distance": "network",
    "loss": "network",
    "load_balancer": "network",
    "transfer": "network",
    "buffering": "network",
    "queue": "service",
    "batch_window": "service",
    "host": "service",
    "run_queue": "service",
    "prefill": "model",
    "decode": "model",
    "cache_miss": "model",
    "kv_restore": "model",
    "jitter": "model",
}
_LEAST_SHARE, _LEAST_MS = 0.02, 0.5
"""Less than this of a request's time, and than these ms, is no fault: then the largest part is named instead."""


@dataclass(frozen=True)
class Finding:
    """``saving_ms`` is by how much a request would be shorter, on the average, if the cause took what its reference
    says; 0 where nothing is known to be won. Causes overlap (a far server makes each handshake longer too), so savings
    do not add up."""

    layer: str
    cause: str
    saving_ms: float
    evidence: str
    advice: str


def verdict(evidence: Evidence, reference: Reference) -> tuple[Finding, ...]:
    """What was found, the bottleneck first, by falling savings; at least one."""
    found = [
        _finding(cause, saving, evidence, reference)
        for cause, saving in _savings(evidence, reference)
        if saving >= max(_LEAST_SHARE * evidence.total_ms, _LEAST_MS)
    ]
    found.sort(key=lambda one: -one.saving_ms)
    if not found:
        found.append(_finding(_largest(evidence), 0.0, evidence, reference))
    if evidence.bursts:
        found.append(_finding("buffering", 0.0, evidence, reference))
    return tuple(found)


def _finding(cause: str, saving: float, evidence: Evidence, reference: Reference) -> Finding:
    text = explain(cause, evidence, reference)
    if saving == 0 and cause != "buffering":
        text = f"no layer takes much more than its reference; the largest part is this one: {text}"
    return Finding(LAYERS[cause], cause, saving, text, ADVICE[cause])


def _savings(evidence: Evidence, reference: Reference) -> Iterator[tuple[str, float]]:
    """ms a request that each cause takes beyond its reference."""
    yield from _network(evidence, reference)
    yield "queue", evidence.queue_ms
    yield "kv_restore", evidence.kv_ms
    # Without the server's own account the two are parts of one fixed cost, which has one reference.
    spare = reference.fixed_ms
    yield "batch_window", evidence.hold_ms - (0.0 if evidence.accounted else spare)
    yield "host", evidence.host_ms - spare
    yield "run_queue", evidence.run_queue_ms
    prefill = evidence.prefill_ms_per_token
    if prefill is not None:
        yield "cache_miss", prefill * evidence.missed_tokens
        if reference.prefill_ms_per_token is not None:
            yield "prefill", (prefill - reference.prefill_ms_per_token) * evidence.computed_tokens
    roof = reference.decode_ms_per_token
    best = evidence.best_gap_ms if roof is None else roof * evidence.tokens_per_gap
    yield "decode", (evidence.gap_ms - best) * evidence.gaps
    if not evidence.bursts:
        yield "jitter", evidence.stall_ms


def _network(evidence: Evidence, reference: Reference) -> Iterator[tuple[str, float]]:
    phases = evidence.phases
    far = max(evidence.rtt_ms - reference.rtt_ms, 0.0)
    trips = 1.0
    if evidence.new_connections:
        yield "dns", phases["dns"] - reference.dns_ms
        yield "connect", evidence.connect_ms
        trips += 1
        if evidence.tls is not None:
            yield "tls", phases["tls"] - evidence.rtt_ms - reference.tls_ms
            trips += evidence.tls_round_trips
        if evidence.keep_alive is False:
            yield "no_reuse", evidence.setup_ms
    yield "distance", far * trips
    yield "loss", evidence.loss_ms
    if evidence.proxy_ms is not None:
        yield "load_balancer", evidence.proxy_ms - reference.proxy_ms
    yield "transfer", phases["transfer"] - reference.transfer_ms


def _largest(evidence: Evidence) -> str:
    """The largest part of a request of which nothing is above its reference."""
    prefill = (evidence.prefill_ms_per_token or 0.0) * evidence.computed_tokens
    trips = evidence.rtt_ms * (1 + (1 + evidence.tls_round_trips) * evidence.new_connections)
    parts = {
        "decode": evidence.gap_ms * evidence.gaps,
        "prefill": prefill,
        "distance": trips,
        "host": evidence.host_ms + evidence.hold_ms,
    }
    return max(parts, key=lambda name: parts[name])
