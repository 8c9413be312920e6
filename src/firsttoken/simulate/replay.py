"""A flight recording as a load for the simulator, and its figures as they were."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from statistics import median
from typing import Any

from firsttoken.core.clock import NS_PER_MS, NS_PER_S
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import CLASS_NAMES, ServiceClass
from firsttoken.observability.flight_file import Flight, FlightRequest
from firsttoken.observability.percentiles import percentiles
from firsttoken.simulate.workload import Job

# The group of the figures of requests whose end is not in the recording: they ran when it was written, or failed.
CUT_SHORT = "cut short"
# Of medians, as shares of those recorded: further off, a replay is no likeness of its recording.
FAR_OFF = 1.5
NOTICEABLE_MS = 1.0


@dataclass(frozen=True)
class RecordedLoad:
    """``left_out`` counts, by their outcome, requests of which nothing is known that could be run again."""

    jobs: list[Job]
    left_out: Counter[str]


def recorded_load(flight: Flight, *, closed: bool = False) -> RecordedLoad:
    """The same arrivals, classes, lengths and common beginnings. An answer is as long as it was; who left leaves after
    the same time. Raises `ConfigError` for a recording without a request that could be run again.

    ``closed``: callers wait for their answers. A request comes as long after the end of another of its tenant as it
    did: of those that had ended, and that none had come after, the one that ended last. Who has none comes when he did.
    """
    jobs: list[Job] = []
    kept: list[FlightRequest] = []
    left_out: Counter[str] = Counter()
    began = flight.requests[0].at_ns if flight.requests else 0
    for request in flight.requests:
        job = _job(request, request.at_ns - began, flight)
        if job is None:
            left_out[request.outcome] += 1
        else:
            jobs.append(job)
            kept.append(request)
    if not jobs:
        raise ConfigError(_nothing(flight, left_out))
    return RecordedLoad(_one_after_another(jobs, kept) if closed else jobs, left_out)


def _one_after_another(jobs: Sequence[Job], requests: Sequence[FlightRequest]) -> list[Job]:
    """``jobs`` of these ``requests``, those of callers who had waited for another's end."""
    running: dict[int, list[tuple[int, int]]] = {}  # of each tenant, when requests end, and their numbers
    ended: dict[int, list[tuple[int, int]]] = {}
    found = []
    for number, (job, request) in enumerate(zip(jobs, requests, strict=True)):
        mine, free = running.setdefault(request.tenant, []), ended.setdefault(request.tenant, [])
        while mine and mine[0][0] <= request.at_ns:
            free.append(heappop(mine))
        if free:
            end_ns, before = free.pop()
            job = replace(job, at_ns=request.at_ns - end_ns, after=before)
        found.append(job)
        if request.ended_ns:
            heappush(mine, (request.at_ns + request.ended_ns, number))
    return found


def _began(request: FlightRequest) -> bool:
    """It got a token, or was never to get one."""
    return request.output_tokens > 0 or not request.max_tokens


def _first_ms(request: FlightRequest) -> float:
    """Until its first token, or the end of a prompt alone."""
    return (request.first_ns or request.ended_ns) / NS_PER_MS


def _job(request: FlightRequest, at_ns: int, flight: Flight) -> Job | None:
    output, patience_ms, group = request.output_tokens, 0.0, ""
    if request.outcome == "aborted":
        output, patience_ms = request.max_tokens, max(request.ended_ns / NS_PER_MS, 1e-3)
    elif request.outcome in ("running", "failed"):
        group = CUT_SHORT
    elif request.outcome != "finished":
        return None
    if not output and request.max_tokens:  # a prompt alone is computed again as such
        return None
    return Job(
        at_ns,
        request.prompt_tokens,
        output,
        blocks=tuple(request.pieces) if flight.head.settings.prefix_caching else (),
        service=ServiceClass(request.service),
        group=group,
        tenant=str(request.tenant),
        patience_ms=patience_ms,
        deadline_ms=request.deadline_ms,
        block_tokens=flight.head.piece_tokens,
        priority=request.priority,
    )


def _nothing(flight: Flight, left_out: Counter[str]) -> str:
    if flight.head.source == "engine":
        return (
            f"the recording has {len(flight.steps)} steps and no requests: it is the engine's own, of a front end that "
            "was gone, and only front ends know requests"
        )
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(left_out.items()))
    if flight.missing and not flight.requests:
        return f"the recording {flight.missing}, and no request is in what is left of it"
    return f"the recording has no request that got a token, so there is nothing to run again ({counts or 'none came'})"


def far_off(recorded: dict[str, Any], replayed: dict[str, Any]) -> str | None:
    """Which median of a replay is furthest from the recording's, of those that are too far; both by class."""
    worst, words = FAR_OFF, None
    for name in recorded.keys() & replayed.keys():
        for key in ("ttft_ms", "itl_ms"):
            was, found = (figures[name][key].get("p50", 0.0) for figures in (recorded, replayed))
            if (
                min(was, found) > 0
                and abs(was - found) > NOTICEABLE_MS
                and (off := max(was / found, found / was)) > worst
            ):
                worst, words = (
                    off,
                    f"{name}'s {key[:4].upper().rstrip('_')} p50 is {found:.1f} ms, and was {was:.1f} ms",
                )
    return words


# ---------------------------------------------------------------- as it was


def recorded_figures(requests: Sequence[FlightRequest]) -> dict[str, dict[str, Any]]:
    """Of those that finished, by class: ``requests`` and the percentile objects, in ms from when they were sent to the
    engine."""
    figures: dict[str, dict[str, Any]] = {}
    for service, name in enumerate(CLASS_NAMES):
        found = [one for one in requests if one.service == service and one.outcome == "finished" and _began(one)]
        if found:
            figures[name] = {
                "requests": len(found),
                "ttft_ms": percentiles(_first_ms(one) for one in found),
                "itl_ms": percentiles(gap / 1e3 for one in found for gap in one.gaps_us),
                "e2e_ms": percentiles(_first_ms(one) + sum(one.gaps_us) / 1e3 for one in found),
            }
    return figures


def recorded_hit_ratio(requests: Sequence[FlightRequest]) -> float:
    """Prompt tokens found in the cache, as a share of all prompt tokens of requests that got a token."""
    started = [one for one in requests if _began(one)]
    prompt = sum(one.prompt_tokens for one in started)
    return sum(one.cached_tokens for one in started) / prompt if prompt else 0.0


def delivery_ms(flight: Flight) -> float:
    """How long tokens took from the engine's loop to the front end: the median, over first tokens, of the time since
    the last step that the loop had read. 0 when that is not known."""
    harvested = [step.harvested_ns for step in flight.steps]
    waits = []
    for one in flight.requests:
        if one.first_ns and harvested and harvested[0] < one.at_ns + one.first_ns:
            came = one.at_ns + one.first_ns
            waits.append(came - harvested[bisect_right(harvested, came) - 1])
    return median(waits) / NS_PER_MS if waits else 0.0


def recorded_seconds(flight: Flight) -> float:
    """From the first request to the last end that is known."""
    if not flight.requests:
        return 0.0
    ends = [one.at_ns + max(one.ended_ns, one.first_ns) for one in flight.requests]
    return (max(ends) - flight.requests[0].at_ns) / NS_PER_S
