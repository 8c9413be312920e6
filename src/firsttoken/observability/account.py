"""The account of one request's time: a walk over its timeline that gives every instant one owner.

A stamp names the state that begins with it, so the time up to the next stamp belongs to that state's stage. Where the
next stamp cannot follow this one (a stamp between them is missing) the time is ``unaccounted``: nobody knows which of
the skipped states owned it, and nothing is guessed. All sums are done in integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from firsttoken.core.cache_miss import Miss
from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.core.waits import WAIT_NAMES
from firsttoken.observability.percentiles import percentiles

_NOTHING: Mapping[str, int] = {}

STAGES = (
    "parse_ms",
    "template_ms",
    "tokenize_ms",
    "transport_ms",
    "queue_ms",
    "kv_ms",
    "prefill_ms",
    "decode_ms",
    "detokenize_ms",
    "stop_ms",
    "write_ms",
    "unaccounted_ms",
)

# Parts of the walk: the stages, with the two ways of transport told apart.
_TO_ENGINE, _FROM_ENGINE, _UNACCOUNTED = "to_engine_ms", "from_engine_ms", "unaccounted_ms"

_OWNER = {
    Mark.RECEIVED: "parse_ms",
    Mark.PARSED: "template_ms",
    Mark.TEMPLATED: "tokenize_ms",
    Mark.TOKENIZED: _TO_ENGINE,
    Mark.ARRIVED: "queue_ms",
    Mark.RESTORING: "kv_ms",
    Mark.SCHEDULED: "prefill_ms",
    Mark.FIRST_TOKEN: "decode_ms",
    Mark.PREEMPTED: "queue_ms",
    Mark.FINISHED: _FROM_ENGINE,
    Mark.HELD: "write_ms",
    Mark.DELIVERED: "detokenize_ms",
    Mark.DETOKENIZED: "write_ms",
    Mark.FAILED: "write_ms",
    Mark.WRITTEN: _UNACCOUNTED,  # nothing is expected after it
}

# A request may end (FINISHED) out of any state inside the engine: it can be aborted there. And its first token may
# still be in flight when it is preempted. An error may end any state, and the caller may leave in any.
_FOLLOWS = {
    Mark.RECEIVED: {Mark.PARSED},
    Mark.PARSED: {Mark.TEMPLATED},
    Mark.TEMPLATED: {Mark.TOKENIZED},
    Mark.TOKENIZED: {Mark.ARRIVED},
    Mark.ARRIVED: {Mark.RESTORING, Mark.SCHEDULED, Mark.FINISHED},
    Mark.RESTORING: {Mark.SCHEDULED, Mark.PREEMPTED, Mark.FINISHED},
    Mark.SCHEDULED: {Mark.FIRST_TOKEN, Mark.PREEMPTED, Mark.FINISHED},
    Mark.FIRST_TOKEN: {Mark.PREEMPTED, Mark.FINISHED},
    Mark.PREEMPTED: {Mark.RESTORING, Mark.SCHEDULED, Mark.FIRST_TOKEN, Mark.FINISHED},
    Mark.FINISHED: {Mark.HELD, Mark.DELIVERED},
    Mark.HELD: {Mark.DELIVERED},
    Mark.DELIVERED: {Mark.DETOKENIZED},
    Mark.DETOKENIZED: {Mark.WRITTEN},
    Mark.FAILED: {Mark.WRITTEN},
    Mark.WRITTEN: set[Mark](),
}

# The two ways between the processes, which together are "transport_ms".
WAYS = (_TO_ENGINE, _FROM_ENGINE)
# What `intervals` may tell of.
PARTS = frozenset({*_OWNER.values(), _UNACCOUNTED})
# The owner of the time between two marks that may follow one another. By plain numbers: an enum's hash is a call.
_PARTS = {
    (int(before), int(after)): owner
    for before, owner in _OWNER.items()
    for after in {before, Mark.FAILED} | _FOLLOWS[before]
}


def stages(timeline: Timeline, *, stop_ns: int = 0, end_ns: int | None = None) -> dict[str, float]:
    """The stages of `STAGES` and ``total_ms``, as in `timings`."""
    parts, total = _parts(timeline, stop_ns, end_ns)
    return _told_stages(parts, total)


def timings(
    timeline: Timeline,
    *,
    cached_tokens: int = 0,
    cached_host: int = 0,
    cached_disk: int = 0,
    miss: Miss | None = None,
    kept: bool | None = None,
    kept_reason: str | None = None,
    preemptions: int = 0,
    queue_ns: Sequence[int] = (),
    prefill_steps: int = 0,
    decode_steps: int = 0,
    stop_ns: int = 0,
    overlapped_ns: Mapping[str, int] = _NOTHING,
    token_times: Sequence[int] = (),
    worst_gap: dict[str, Any] | None = None,
    end_ns: int | None = None,
) -> dict[str, Any]:
    """The account of a request, in milliseconds, ready for JSON.

    ``token_times`` are the times (ns, ascending) at which each output token was delivered, one a token; ``itl_ms``
    are the percentiles of their gaps ({} with fewer than two). ``end_ns`` closes an account whose last stamp is not
    the end yet: the time from that stamp on belongs to the state it began.

    ``worst_gap`` is the largest of them as `observability.worst_gap` explains it.

    The stages of `STAGES` sum to ``total_ms`` (exactly, in ns) and none is negative; a stage that was not passed is 0.
    Of ``cached_tokens`` those of ``cached_host`` and ``cached_disk`` came from lower tiers; ``miss`` says why no more
    were found. ``kept``: whether a cache hint's wish to keep it was granted, None without one, or where that is not
    known; ``kept_reason`` why it was not. ``queue_ns`` are what it waited for, by `Wait`: ``queue_reasons`` sum to
    ``queue_ms``, {} where they are not known. ``stop_ns`` of the time for the last text were the search for stop
    strings. ``overlapped_ns`` is work that was done beside the stages, by name. ``transport`` splits ``transport_ms``
    into the way to the engine and the way back.
    """
    parts, total = _parts(timeline, stop_ns, end_ns)
    account: dict[str, Any] = {**_told_stages(parts, total)}
    account["transport"] = {name: _ms(parts.get(name, 0)) for name in WAYS}
    device = cached_tokens - cached_host - cached_disk
    account["cached_tokens"] = {"device": device, "host": cached_host, "disk": cached_disk}
    account["miss"] = _told(miss) if miss is not None else None
    account["kept"] = kept
    account["kept_reason"] = kept_reason
    account["queue_reasons"] = _reasons(queue_ns, parts.get("queue_ms", 0))
    account["prefill_steps"] = prefill_steps
    account["decode_steps"] = decode_steps
    account["preemptions"] = preemptions
    account["overlapped_ms"] = {name: _ms(ns) for name, ns in overlapped_ns.items()}
    gaps = [_ms(after - before) for before, after in pairwise(token_times)]
    account["itl_ms"] = percentiles(gaps)
    account["worst_gap"] = worst_gap
    return account


def server_timing_header(account: Mapping[str, Any]) -> str:
    """The stages as the value of a ``Server-Timing`` header (W3C; durations in ms): those that took any time, and the
    total. A header leaves before the body ends, so give it an account closed with ``end_ns``."""
    names = [name for name in STAGES if account.get(name, 0) > 0]
    return ", ".join(f"{name};dur={account[name]:.3f}" for name in [*names, "total_ms"] if name in account)


def intervals(stamps: Sequence[tuple[int, int]], end_ns: int | None = None) -> Iterator[tuple[str, int, int]]:
    """The walk over the ``(mark, ns)`` of a timeline: parts with their begin and end in ns, one after the other without
    gaps. ``end_ns`` as in `timings`."""
    if not stamps:
        return
    before, last = stamps[0]
    for after, ns in stamps[1:]:
        part = _PARTS.get((before, after))
        if part is None:
            part = _UNACCOUNTED
            _ = Mark(before), Mark(after)  # raises ValueError for what is no mark at all
        # Clocks of two processes agree, but a list built by hand may not: time never runs backwards here.
        now = ns if ns > last else last
        yield part, last, now
        before, last = after, now
    if end_ns is not None and end_ns > last:
        yield _OWNER[Mark(before)], last, end_ns


def _parts(timeline: Timeline, stop_ns: int, end_ns: int | None) -> tuple[dict[str, int], int]:
    """Nanoseconds of each stage and of the two ways of transport, and of all of them."""
    parts, total = _walk(timeline, end_ns)
    _carve(parts, "detokenize_ms", "stop_ms", stop_ns)
    parts["transport_ms"] = parts.get(_TO_ENGINE, 0) + parts.get(_FROM_ENGINE, 0)
    return parts, total


def _told_stages(parts: dict[str, int], total: int) -> dict[str, float]:
    return {stage: _ms(parts.get(stage, 0)) for stage in STAGES} | {"total_ms": _ms(total)}


def _walk(timeline: Timeline, end_ns: int | None) -> tuple[dict[str, int], int]:
    """Nanoseconds of each part, and of all of them."""
    parts: dict[str, int] = {}
    total = 0
    for part, begin, end in intervals(timeline.stamps(), end_ns):
        parts[part] = parts.get(part, 0) + end - begin
        total += end - begin
    return parts, total


def _carve(parts: dict[str, int], whole: str, part: str, ns: int) -> None:
    """``ns`` of ``whole`` belong to ``part``."""
    ns = min(ns, parts.get(whole, 0))
    if ns:
        parts[whole] -= ns
        parts[part] = ns


def _reasons(queue_ns: Sequence[int], total_ns: int) -> dict[str, float]:
    """A request that its caller ends goes on queueing until the engine hears of it: that much was for the longest of
    its reasons, as a rule, and is no part of the account."""
    if not queue_ns:
        return {}
    spent = list(queue_ns)
    longest = spent.index(max(spent))
    spent[longest] = max(spent[longest] + total_ns - sum(spent), 0)
    return {name: _ms(ns) for name, ns in zip(WAIT_NAMES, spent, strict=True)}


def _told(miss: Miss) -> dict[str, Any]:
    told: dict[str, Any] = {"position": miss.position, "reason": miss.reason.value}
    if miss.by is not None:
        told |= {"age_s": round(miss.age_s, 3), "by": miss.by.label}
    return told


def _ms(ns: int) -> float:
    return ns / NS_PER_MS
