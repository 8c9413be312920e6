"""Findings in words: the evidence with its numbers, and what to change."""

from __future__ import annotations

from firsttoken.diagnose.evidence import Evidence
from firsttoken.diagnose.references import Reference

_INITIAL_WINDOW = 14_600  # bytes that a server may send before the first acknowledgement (RFC 6928)

ADVICE = {
    "dns": "Run a caching resolver on the client's host, raise the record's TTL, and keep connections open.",
    "connect": "Look at the server's accept queue (ss -ltn, net.core.somaxconn), at SYN filters on the way, and at "
    "addresses of the name that do not answer.",
    "tls": "Offer TLS 1.3 with session tickets, an ECDSA certificate and a short chain (no root in it); end TLS on a "
    "host that has processor time to spare; keep connections open.",
    "no_reuse": "Let the server (or the proxy before it) keep connections open: HTTP/1.1 keep-alive with an idle time "
    "longer than the pauses between requests.",
    "distance": "Serve from a region near the callers, or end TLS at an edge near them that keeps connections to the "
    "server; keep connections open, so that only one round trip is left.",
    "loss": "Look for loss on the way (mtr, ethtool -S, interface drops), and let the server use BBR for congestion.",
    "load_balancer": "Give the load balancer more connections or servers behind it, or let it choose the least loaded "
    "one; look at its own queue and buffering settings.",
    "transfer": "Look at what the server or a proxy does after the last token: buffering of the response (nginx: "
    "proxy_buffering off), logging, or moderation before the end.",
    "buffering": "Switch off response buffering in the proxy (nginx: proxy_buffering off; X-Accel-Buffering: no) and "
    "compression of event streams; let the server flush each event.",
    "queue": "The server is busy with others: add replicas or slots, send batch work to a lower class, limit what one "
    "caller may send, or turn requests away earlier.",
    "batch_window": "Shorten or switch off the batch window (firsttoken: --batch-window 0; Triton: "
    "max_queue_delay_microseconds): with continuous batching it only delays.",
    "host": "Give the serving processes processors of their own (CPU limits, run-queue wait), do tokenising off the "
    "event loop, and cut middleware before the model.",
    "run_queue": "The engine is ready and waits for a processor: give it processors of its own (CPU limits, cpusets, "
    "firsttoken's --engine-core), and fewer neighbours.",
    "prefill": "Prefill runs below the roof of the arithmetic: use FP8 or BF16 kernels, larger chunks of prompts, more "
    "GPUs by tensor parallelism; send shorter prompts.",
    "decode": "Each token waits for the weights: quantise them (FP8, INT4), use captured graphs and fewer kernels, "
    "speculative decoding, or more GPUs by tensor parallelism; ask for fewer tokens.",
    "cache_miss": "Switch prefix caching on and give it memory; put what prompts share at their beginning, byte for "
    "byte, and route requests with the same beginning to the same server.",
    "kv_restore": "KV comes back from a slower tier: give the device's cache more memory, or keep prompts longer.",
    "jitter": "Decode is held up now and then: cut prompts into smaller chunks beside decoding, pause the garbage "
    "collector, and look for other programs on the host.",
}


def explain(cause: str, evidence: Evidence, reference: Reference) -> str:
    """One sentence or two with the numbers that speak for ``cause``."""
    share = f"of {evidence.total_ms:.1f} ms a request"
    if cause in _NETWORK:
        return _network(cause, evidence, reference, share)
    if cause in ("queue", "batch_window", "host", "run_queue", "kv_restore"):
        return _service(cause, evidence, share)
    return _model(cause, evidence, reference, share)


_NETWORK = frozenset(
    {"dns", "connect", "tls", "no_reuse", "distance", "loss", "load_balancer", "transfer", "buffering"}
)


def _network(cause: str, evidence: Evidence, reference: Reference, share: str) -> str:
    phases, rtt = evidence.phases, evidence.rtt_ms
    match cause:
        case "dns":
            return f"looking up the name takes {phases['dns']:.1f} ms {share}; a cached answer {reference.dns_ms:g} ms"
        case "connect":
            return f"connecting takes {phases['tcp']:.1f} ms {share}, a round trip only {rtt:.1f} ms"
        case "tls":
            return f"the TLS handshake takes {phases['tls']:.1f} ms {share}{_tls(evidence)}; round trip {rtt:.1f} ms"
        case "no_reuse":
            handshakes = f"name, TCP and TLS again each time: {evidence.setup_ms:.1f} ms {share}"
            return f"the server ends each connection after one answer, {handshakes} ({_percent(evidence)})"
        case "distance":
            trips = 1 + (1 + evidence.tls_round_trips) * evidence.new_connections
            near = f"{reference.rtt_ms:g} ms within a region"
            return f"a round trip takes {rtt:.1f} ms ({near}), and a request needs {trips} of them"
        case "loss":
            many = f"{evidence.lossy} of {evidence.requests} requests"
            stalled = f"stalls add up to {evidence.loss_ms:.1f} ms {share}"
            return f"{many} had segments sent again or out of order; their {stalled}"
        case "load_balancer":
            return f"the load balancer's own stamps say that it keeps a request {evidence.proxy_ms or 0:.1f} ms {share}"
        case "transfer":
            return f"from the last token to the end of the answer {phases['transfer']:.1f} ms pass, {share}"
        case _:
            wait = evidence.total_ms - evidence.phases["gaps"] - phases["transfer"]
            late = f"the first came after {wait:.1f} ms"
            return f"tokens come in bursts (most gaps are none), so something on the way collects them; {late}"


def _tls(evidence: Evidence) -> str:
    facts = evidence.tls
    if facts is None:
        return ""
    text = f" ({facts.version}, {'resumed' if facts.resumed else 'not resumed'}"
    if facts.chain is not None:
        text += f", {facts.chain} certificates"
    if facts.server_bytes is not None:
        text += f", {facts.server_bytes} bytes from the server"
        if facts.server_bytes > _INITIAL_WINDOW:
            text += ": more than fits into a first flight, which costs a round trip"
    return text + ")"


def _percent(evidence: Evidence) -> str:
    return f"{100 * evidence.setup_ms / evidence.total_ms:.0f} %"


def _service(cause: str, evidence: Evidence, share: str) -> str:
    source = "by the server's own account" if evidence.accounted else "as far as can be told from outside"
    match cause:
        case "queue":
            how = "waits for a place" if evidence.accounted else "waits longer than when it finds the server idle"
            return f"a request {how} for {evidence.queue_ms:.1f} ms {share}, {source}"
        case "batch_window":
            return f"even an undisturbed request waits {evidence.hold_ms:.1f} ms {share} before its prefill, {source}"
        case "host":
            growth = evidence.fit.queue_ms_per_caller
            more = "" if growth is None or growth <= 0 else f"; each further caller at once adds {growth:.1f} ms"
            if evidence.loop_lag_ms is not None:
                more += f"; its event loop wakes up {evidence.loop_lag_ms:.2f} ms late on the average"
            return f"the host's own work takes {evidence.host_ms:.1f} ms {share}, {source}{more}"
        case "run_queue":
            return (
                f"in its largest gap the engine waits {evidence.run_queue_ms:.1f} ms {share} for a processor, {source}"
            )
        case _:
            return f"moving KV back to the device takes {evidence.kv_ms:.1f} ms {share}, {source}"


def _model(cause: str, evidence: Evidence, reference: Reference, share: str) -> str:
    slope = evidence.prefill_ms_per_token or 0.0
    match cause:
        case "prefill":
            roof = reference.prefill_ms_per_token
            beside = "; roof unknown without --gpu and --parameters" if roof is None else f", the roof {roof:.4f} ms"
            part = f"{slope * evidence.computed_tokens:.1f} ms {share} for {evidence.computed_tokens:.0f} tokens"
            return f"prefill takes {slope:.4f} ms a prompt token{beside}: {part}"
        case "decode":
            roof = reference.decode_ms_per_token
            if roof is not None:
                beside = f", the roof {roof * evidence.tokens_per_gap:.2f} ms"
            else:
                beside = f", {evidence.best_gap_ms:.2f} ms at best; roof unknown without --gpu and --parameters"
            part = f"{evidence.gap_ms * evidence.gaps:.1f} ms {share} for {evidence.gaps:.0f} gaps"
            return f"decode takes {evidence.gap_ms:.2f} ms a gap (median){beside}: {part}"
        case "cache_miss":
            lost = f"{slope * evidence.missed_tokens:.1f} ms {share}"
            return (
                f"{evidence.missed_tokens:.0f} prompt tokens that earlier requests had sent were computed again: {lost}"
            )
        case _:
            stalls = f"{evidence.stall_ms:.1f} ms {share}"
            return f"without signs of loss, gaps beyond the median of {evidence.gap_ms:.2f} ms add up to {stalls}"
