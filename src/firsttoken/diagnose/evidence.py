"""The numbers that a verdict rests on, drawn from all samples: means over the paced requests, in ms a request."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from firsttoken.diagnose.fit import Fit, fit
from firsttoken.diagnose.sample import PHASES, Sample, Tls
from firsttoken.diagnose.session import Runs
from firsttoken.observability.percentiles import percentile

# The stages of the server's account (observability/account.py) that are work of its host, not of the model.
HOST_STAGES = (
    "parse_ms",
    "template_ms",
    "tokenize_ms",
    "transport_ms",
    "detokenize_ms",
    "stop_ms",
    "write_ms",
    "unaccounted_ms",
)
_FLOOR = 0.1  # the share of requests that wait for nobody, however busy the server is
_BURST = 0.1  # a gap of less than this share of the mean is none: the token came along with the one before


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """``queue_ms`` is what differs from request to request before the first token, ``hold_ms`` what all of them wait
    alike, ``host_ms`` the work of the host; ``stall_ms`` the gaps beyond their median, as in requests without signs of
    loss, ``loss_ms`` what is more than that, and slow connecting, in those with them. ``run_queue_ms`` is the engine's
    wait for a processor, by its own account, and not part of ``stall_ms``. None: not known."""

    requests: int
    total_ms: float
    phases: Mapping[str, float]
    rtt_ms: float
    new_connections: bool
    keep_alive: bool | None
    tls: Tls | None
    connect_ms: float
    lossy: int
    loss_ms: float
    proxy_ms: float | None
    accounted: bool
    queue_ms: float
    hold_ms: float
    host_ms: float
    kv_ms: float
    prefill_ms_per_token: float | None
    computed_tokens: float
    missed_tokens: float
    gap_ms: float
    gaps: float
    tokens_per_gap: float
    best_gap_ms: float
    stall_ms: float
    run_queue_ms: float
    bursts: bool
    loop_lag_ms: float | None
    fit: Fit

    @property
    def tls_round_trips(self) -> int:
        """Of a whole handshake without certificates that take more: two before TLS 1.3 (RFC 8446, section 2)."""
        if self.tls is None:
            return 0
        return 1 if self.tls.version == "TLSv1.3" else 2

    @property
    def setup_ms(self) -> float:
        return sum(self.phases[name] for name in ("dns", "tcp", "tls"))


def gather(runs: Runs) -> Evidence:
    """``runs.paced`` holds one sample at least."""
    paced = runs.paced
    phases = {name: _mean(one.phases[name] for one in paced) for name in PHASES}
    fresh = [one for one in paced if not one.reused]
    rtt = _rtt(paced)
    line = fit(runs.lengths, runs.crowds, rtt)
    lossy = [one for one in paced if one.link.lossy]
    gaps = _Gaps.of(paced)
    # Where all requests have signs of loss, all stalls are the loss's.
    clean = _mean([gaps.stall(one) for one in paced if not one.link.lossy] or [0.0])
    run_queue = _mean(one.run_queue_ms for one in paced)
    prefill = line.prefill_ms_per_token
    proxies = [one.proxy_ms for one in paced if one.proxy_ms is not None]
    proxy = _mean(proxies) if proxies else None
    service = _Service.accounted(runs) if all("queue_ms" in one.account for one in paced) else None
    computed, missed = _tokens(runs, line, rtt)
    accounted = service is not None
    if service is None:
        service = _Service.inferred(runs, line, rtt, computed, gaps.median)
    return Evidence(
        requests=len(paced),
        total_ms=_mean(one.total_ms for one in paced),
        phases=phases,
        rtt_ms=rtt,
        new_connections=bool(fresh),
        keep_alive=runs.keep_alive.works if runs.keep_alive is not None else None,
        tls=next((one.tls for one in fresh if one.tls is not None), None),
        connect_ms=sum(_connect(one, rtt) for one in paced if not one.link.lossy) / len(paced),
        lossy=len(lossy),
        loss_ms=sum(gaps.stall(one) + _connect(one, rtt) for one in lossy) / len(paced)
        - clean * len(lossy) / len(paced),
        proxy_ms=proxy,
        accounted=accounted,
        queue_ms=service.queue_ms,
        hold_ms=service.hold_ms,
        host_ms=service.host_ms,
        kv_ms=_mean(one.account.get("kv_ms", 0.0) for one in paced),
        prefill_ms_per_token=prefill,
        computed_tokens=computed,
        missed_tokens=missed,
        gap_ms=gaps.median,
        gaps=gaps.per_request,
        tokens_per_gap=gaps.tokens,
        best_gap_ms=gaps.median if line.decode_ms_per_token is None else min(gaps.median, line.decode_ms_per_token),
        stall_ms=max(clean - run_queue, 0.0),
        run_queue_ms=run_queue,
        bursts=gaps.bursts,
        loop_lag_ms=runs.loop_lag_ms,
        fit=line,
    )


def _connect(sample: Sample, rtt_ms: float) -> float:
    """ms that connecting took beyond a round trip."""
    return 0.0 if sample.reused else max(sample.phases["tcp"] - rtt_ms, 0.0)


def _rtt(paced: Sequence[Sample]) -> float:
    """As the system's TCP saw it; where it does not tell, the fastest connect. 0: unknown."""
    seen = [one.link.rtt_ms for one in paced if one.link.rtt_ms is not None]
    if seen:
        return statistics.median(seen)
    return min((one.phases["tcp"] for one in paced if not one.reused), default=0.0)


@dataclass(frozen=True)
class _Gaps:
    """``median`` ms between events, ``per_request`` how many, ``tokens`` that each brings; where tokens come in
    ``bursts`` the median says nothing and is the mean."""

    median: float
    per_request: float
    tokens: float
    bursts: bool

    @classmethod
    def of(cls, paced: Sequence[Sample]) -> _Gaps:
        every = [gap for one in paced for gap in one.gaps_ms]
        if not every:
            return cls(0.0, 0.0, 1.0, False)
        mean = _mean(every)
        bursts = len(every) > 2 * len(paced) and sum(gap < _BURST * mean for gap in every) > len(every) / 2
        tokens = sum(one.tokens_after_first for one in paced) / len(every)
        return cls(mean if bursts else statistics.median(every), len(every) / len(paced), max(tokens, 1.0), bursts)

    def stall(self, sample: Sample) -> float:
        """What the gaps took beyond as many of the median's length."""
        return max(sum(sample.gaps_ms) - len(sample.gaps_ms) * self.median, 0.0)


@dataclass(frozen=True)
class _Service:
    queue_ms: float
    hold_ms: float
    host_ms: float

    @classmethod
    def accounted(cls, runs: Runs) -> _Service:
        """From the server's own account."""
        floor = _floor([one.account.get("queue_ms", 0.0) for one in (*runs.paced, *_singles(runs))])
        host = _mean(sum(one.account.get(stage, 0.0) for stage in HOST_STAGES) for one in runs.paced)
        return cls(_mean(one.account["queue_ms"] for one in runs.paced) - floor, floor, host)

    @classmethod
    def inferred(cls, runs: Runs, line: Fit, rtt_ms: float, computed: float, step_ms: float) -> _Service:
        """From outside: what varies is a queue. Of what all requests take alike, beyond a step of the model, the part
        that grows with callers is work of the host (they take turns on it: the mean of c waits (c - 1) / 2 turns), the
        rest is waited for by the clock."""
        slope = line.prefill_ms_per_token or 0.0
        waits = [one.wait_ms - rtt_ms - (one.proxy_ms or 0.0) for one in runs.paced]
        rests = [one.wait_ms - rtt_ms - (one.proxy_ms or 0.0) - slope * one.computed_tokens for one in _singles(runs)]
        floor = _floor([*rests, *(wait - slope * computed for wait in waits)])
        queue = max(_mean(waits) - floor - slope * computed, 0.0)
        fixed = max(floor - step_ms, 0.0)
        growth = line.queue_ms_per_caller
        if growth is None:
            return cls(queue, fixed, 0.0)
        crowd_prompt = _mean(one.computed_tokens for samples in runs.crowds.values() for one in samples)
        host = min(fixed, max(2 * (growth - slope * crowd_prompt / 2), 0.0))
        return cls(queue, fixed - host, host)


def _floor(waits: Sequence[float]) -> float:
    """What all waited alike, 0 or more. The shortest of n waits is longer than that, by an n-th of the mean where
    waits are exponential: the unbiased estimate of the location takes it off (Johnson, Kotz and Balakrishnan,
    Continuous Univariate Distributions 1, chapter 19)."""
    least = min(waits)
    return max(least - (_mean(waits) - least) / max(len(waits) - 1, 1), 0.0)


def _singles(runs: Runs) -> list[Sample]:
    """Those of the sweeps that had the server to themselves."""
    return [*(one for samples in runs.lengths.values() for one in samples), *runs.crowds.get(1, ())]


def _tokens(runs: Runs, line: Fit, rtt_ms: float) -> tuple[float, float]:
    """Prompt tokens that a paced request had computed, and those of them that others had sent before."""
    paced = runs.paced
    prompt = _mean(one.prompt_tokens for one in paced)
    fresh = max(prompt - runs.shared_tokens, 0.0)
    if all(one.cached_tokens is not None for one in paced):
        computed = _mean(one.computed_tokens for one in paced)
    elif not line.prefill_ms_per_token or line.fixed_ms is None:
        return prompt, 0.0
    else:
        best = percentile(sorted(one.wait_ms for one in paced), _FLOOR) - rtt_ms
        computed = min(max((best - line.fixed_ms) / line.prefill_ms_per_token, fresh), prompt)
    # A cache finds whole blocks, and leaves the last one to be computed.
    missed = computed - fresh if computed - fresh > 0.25 * runs.shared_tokens else 0.0
    return computed, missed


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
