"""The result object: what was measured, what it means, whether targets held."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from firsttoken.core.clock import NS_PER_MS
from firsttoken.diagnose.evidence import Evidence, gather
from firsttoken.diagnose.references import Reference
from firsttoken.diagnose.sample import PHASES, Sample
from firsttoken.diagnose.session import KeepAlive, Runs
from firsttoken.diagnose.verdict import verdict
from firsttoken.observability.percentiles import percentiles


@dataclasses.dataclass(frozen=True)
class Targets:
    """Upper bounds in ms for the p99 of all requests; None asks for nothing."""

    ttft_p99: float | None = None
    e2e_p99: float | None = None


def diagnosis(runs: Runs, reference: Reference, targets: Targets) -> dict[str, Any]:
    """The figures under their public names, ready for JSON (docs/diagnose.md says what each is)."""
    paced = runs.paced
    evidence = gather(runs)
    findings = [dataclasses.asdict(one) for one in verdict(evidence, reference)]
    sent = len(paced) + len(runs.failures)
    return {
        "model": runs.model,
        "requests": {
            "sent": sent,
            "ok": len(paced),
            "failed": len(runs.failures),
            "reasons": dict(Counter(runs.failures)),
        },
        "phases": phase_figures(paced),
        "ttft_ms": percentiles(one.ttft_ms for one in paced),
        "answer_ms": percentiles(ms for one in paced if (ms := one.answer_ms) is not None),
        "itl_ms": percentiles(gap for one in paced for gap in one.gaps_ms),
        "tpot_ms": percentiles(tpot for one in paced if (tpot := one.tpot_ms) is not None),
        "e2e_ms": percentiles(one.total_ms for one in paced),
        "server": server_figures(paced),
        "server_loop_lag_ms": runs.loop_lag_ms,
        "connection": _connection(paced, runs.keep_alive, evidence),
        "sweep": _sweep(runs, evidence),
        "bottleneck": findings[0],
        "findings": findings,
        "targets": _targets(paced, bool(runs.failures), targets),
        "notes": list(runs.notes),
        "samples": [_sample(one) for one in paced],
    }


def phase_figures(paced: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Percentile objects in ms: the phases' means sum to that of ``total``."""
    found = {name: percentiles(one.phases[name] for one in paced) for name in PHASES}
    return {**found, "total": percentiles(one.total_ms for one in paced)}


def server_figures(paced: Sequence[Sample]) -> dict[str, dict[str, float]] | None:
    """The same of the server's own stages, over the requests whose account it gave; ``way`` is what the client's total
    has beside the server's and the set-up: the network, both ways. None for a server without an account."""
    known = [one for one in paced if "total_ms" in one.account]
    if not known:
        return None
    names = [name for name in known[0].account if any(one.account.get(name) for one in known)]
    found = {name.removesuffix("_ms"): percentiles(one.account.get(name, 0.0) for one in known) for name in names}
    return {**found, "way": percentiles(one.total_ms - one.setup_ms - one.account["total_ms"] for one in known)}


def _connection(paced: Sequence[Sample], kept: KeepAlive | None, evidence: Evidence) -> dict[str, Any]:
    return {
        "http_version": paced[-1].http_version,
        "reused": sum(one.reused for one in paced),
        "keep_alive": evidence.keep_alive,
        "keep_alive_failed": kept.why if kept is not None and kept.why else None,
        "reused_ttft_ms": kept.second.ttft_ms if kept is not None and kept.second is not None else None,
        "rtt_ms": evidence.rtt_ms or None,
        "retransmits": sum(one.link.retransmits for one in paced),
        "out_of_order": sum(one.link.out_of_order for one in paced),
        "proxy_ms": evidence.proxy_ms,
        "tls": None if evidence.tls is None else dataclasses.asdict(evidence.tls),
        "tls_resumes": kept.resumed.resumed if kept is not None and kept.resumed is not None else None,
        "tls_resumed_ms": kept.resumed_ms if kept is not None else None,
    }


def _sweep(runs: Runs, evidence: Evidence) -> dict[str, Any]:
    def points(groups: dict[int, tuple[Sample, ...]], axis: str) -> list[dict[str, Any]]:
        return [
            {
                axis: value,
                "tokens": sum(one.computed_tokens for one in samples) / len(samples),
                "wait_ms": percentiles(one.wait_ms for one in samples),
                "tpot_ms": percentiles(tpot for one in samples if (tpot := one.tpot_ms) is not None),
            }
            for value, samples in groups.items()
        ]

    return {
        **evidence.fit.report(),
        "prompts": points(runs.lengths, "prompt"),
        "concurrency": points(runs.crowds, "concurrency"),
    }


def _targets(paced: Sequence[Sample], failed: bool, targets: Targets) -> dict[str, Any]:
    """Each stated target beside the p99 that it bounds; one request without an answer misses them all."""
    stated = {
        "ttft_ms": (targets.ttft_p99, [one.ttft_ms for one in paced]),
        "e2e_ms": (targets.e2e_p99, [one.total_ms for one in paced]),
    }
    found: dict[str, Any] = {}
    for name, (target, values) in stated.items():
        if target is not None:
            p99 = percentiles(values)["p99"]
            found[name] = {"target": target, "p99": p99, "met": p99 <= target and not failed}
    return found


def _sample(sample: Sample) -> dict[str, Any]:
    return {
        "request_id": sample.request_id,
        "phases": sample.phases,
        "total_ms": sample.total_ms,
        "send_ms": (sample.sent_ns - sample.secured_ns) / NS_PER_MS,
        "gaps_ms": sample.gaps_ms,
        "tokens": sample.tokens,
        "prompt_tokens": sample.prompt_tokens,
        "cached_tokens": sample.cached_tokens,
        "reused": sample.reused,
        "rtt_ms": sample.link.rtt_ms,
        "retransmits": sample.link.retransmits,
        "out_of_order": sample.link.out_of_order,
        "proxy_ms": sample.proxy_ms,
        "account": dict(sample.account),
    }
