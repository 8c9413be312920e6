"""Why the largest gap between two tokens of an answer was that long: its time dealt out over what took it.

The gap runs from when the consumer got one token to when he got the next. Read backwards: he came late for it (he was
still passing on the one before), or the API process handed it over late; before that the engine had the request
preempted, was computing steps, or was between them. Of a step's compute, what a step that only decodes takes lately is
usual; what is beyond that has one cause, by what the step's record tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.step_record import StepRecord
from firsttoken.core.timeline import Mark

# The usual step is the median of so many before that only decoded.
USUAL_STEPS = 64
# What takes less than this part of the gap is not named as its cause while usual steps take more.
LEAST_PART = 0.2
# A step of so many times the usual rows is larger.
LARGER = 1.25

# What may take a gap's time; "decode" are steps as usual. In the order in which equals are named.
CAUSES = (
    "prefill",
    "preemption",
    "gc",
    "run_queue",
    "kv_copy",
    "graph_miss",
    "batch",
    "host",
    "api",
    "write",
    "unexplained",
    "decode",
)


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens, as the consumer got them. In ns: the one before reached the process at ``before`` and he got
    it at ``start``; this one, the ``token``-th, reached the process at ``arrived``, he asked for it at ``came`` and got
    it at ``end``."""

    token: int
    before: int
    start: int
    arrived: int
    came: int
    end: int


@dataclass(frozen=True, slots=True)
class _Usual:
    """What steps that only decode take lately: ns of compute, rows, and whether they are launched as a graph. All 0
    where none is known."""

    ns: float
    rows: float
    captured: bool

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> _Usual:
        plain = [step for step in steps if step.decode_rows and not step.prefill_tokens][-USUAL_STEPS:]
        if not plain:
            return cls(0, 0, False)
        captured = sum(step.captured for step in plain) * 2 > len(plain)
        alike = [step for step in plain if step.captured == captured]
        times = median(step.ended_ns - step.started_ns for step in alike)
        return cls(times, median(step.decode_rows for step in alike), captured)


def worst_gap(
    gap: Gap,
    stamps: Sequence[tuple[int, int]],
    steps: Sequence[StepRecord],
    whose: Callable[[int], str],
) -> dict[str, Any]:
    """``{"ms", "token", "step", "cause", "detail", "parts_ms"}`` of the gap, ready for JSON.

    ``stamps`` are the answer's timeline, ``steps`` the records from some time before the gap to its end, oldest first;
    ``whose`` names the request of an engine id as this caller may know it. ``step`` is the one that the cause lies in,
    or that brought the token; None where it is not known. ``parts_ms`` sum to ``ms``.
    """
    parts, culprits, last = _deal(gap, stamps, steps)
    cause = _named(parts)
    step = culprits.get(cause, last)
    whole = gap.end - gap.start
    return {
        "ms": whole / NS_PER_MS,
        "token": gap.token,
        "step": None if step is None else step.step_id,
        "cause": cause,
        "detail": _detail(cause, parts[cause], step, steps, gap, whose),
        "parts_ms": {name: ns / NS_PER_MS for name, ns in parts.items() if ns},
    }


def _named(parts: dict[str, int]) -> str:
    whole = sum(parts.values())
    best = max((name for name in CAUSES if name != "decode"), key=lambda name: parts[name])
    return best if parts[best] >= min(LEAST_PART * whole, parts["decode"]) and parts[best] else "decode"


def _deal(
    gap: Gap, stamps: Sequence[tuple[int, int]], steps: Sequence[StepRecord]
) -> tuple[dict[str, int], dict[str, StepRecord], StepRecord | None]:
    """ns of each cause, the step that each lies most in, and the step that brought the token."""
    parts = dict.fromkeys(CAUSES, 0)
    culprits: dict[str, StepRecord] = {}
    arrived = min(max(gap.arrived, gap.start), gap.end)
    came = min(max(gap.came, arrived), gap.end)
    parts["write"] = came - arrived
    parts["api"] = gap.end - came
    last = _step_of(gap, stamps, [step for step in steps if step.harvested_ns <= arrived])
    if last is None:  # its record is gone: the time before the arrival has no name
        parts["unexplained"] = arrived - gap.start
        return parts, culprits, None
    until = max(last.harvested_ns, gap.start)
    parts["api"] += arrived - until
    inside = [step for step in steps if step.harvested_ns > gap.start and step.step_id <= last.step_id]
    taken = next((ns for mark, ns in stamps if mark == Mark.PREEMPTED and gap.start <= ns < until), None)
    if taken is not None:
        parts["preemption"] = until - taken
        culprits["preemption"] = next((step for step in inside if step.preempted), last)
        until = taken
    before = [step for step in steps if step.harvested_ns <= gap.start]
    usual = _Usual.of([*before, *(step for step in inside if step.step_id < last.step_id)])
    running = [step for step in inside if step.started_ns < until]
    idle = _deal_compute(parts, culprits, running, usual, gap.start, until)
    _deal_idle(parts, culprits, running, idle)
    return parts, culprits, last


def _step_of(gap: Gap, stamps: Sequence[tuple[int, int]], told: Sequence[StepRecord]) -> StepRecord | None:
    """The step that brought the token, of those that had ended when it came. A row that decodes is in each step that
    has such rows, so it is the next one after that of the token before, however late it was seen here."""
    if any(mark == Mark.PREEMPTED and gap.before <= ns <= gap.arrived for mark, ns in stamps):
        return told[-1] if told else None
    before = next((step for step in reversed(told) if step.harvested_ns <= gap.before), None)
    later = (step for step in told if step.decode_rows and step.harvested_ns > gap.before)
    return next(later, before)


def _deal_compute(
    parts: dict[str, int],
    culprits: dict[str, StepRecord],
    steps: Sequence[StepRecord],
    usual: _Usual,
    start: int,
    until: int,
) -> int:
    """Deals out the time in which steps computed; returns what is left."""
    at, idle = start, 0
    most: dict[str, int] = {}
    for step in steps:
        begins, ends = min(max(step.started_ns, at), until), min(max(step.ended_ns, at), until)
        idle += begins - at
        took = ends - begins
        at = ends
        normal = min(took, round(usual.ns))
        parts["decode"] += normal
        cause = _cause_beyond(step, usual)
        parts[cause] += took - normal
        if took - normal > most.get(cause, 0):
            most[cause] = took - normal
            culprits[cause] = step
    return idle + until - at


def _cause_beyond(step: StepRecord, usual: _Usual) -> str:
    """Why a step computed for longer than usual."""
    if step.prefill_tokens:
        return "prefill"
    if usual.captured and not step.captured:
        return "graph_miss"
    if step.copied_bytes_in or step.copied_bytes_out:
        return "kv_copy"
    if usual.rows and step.decode_rows >= LARGER * usual.rows:
        return "batch"
    return "unexplained" if usual.ns else "decode"


def _deal_idle(parts: dict[str, int], culprits: dict[str, StepRecord], steps: Sequence[StepRecord], idle: int) -> None:
    """Deals out the time between steps: the collector's and the run queue's part by their own clocks, the rest is the
    loop's work. A collection that took more than that held steps up, too (their host side is Python's)."""
    collected = sum(step.gc_ns for step in steps)
    beyond = min(max(collected - idle, 0), parts["unexplained"])
    parts["unexplained"] -= beyond
    parts["gc"] = min(collected, idle) + beyond
    idle -= min(collected, idle)
    parts["run_queue"] = min(sum(step.run_queue_ns for step in steps), idle)
    parts["host"] += idle - parts["run_queue"]
    if collected:
        culprits["gc"] = max(steps, key=lambda step: step.gc_ns)
    if parts["run_queue"]:
        culprits["run_queue"] = max(steps, key=lambda step: step.run_queue_ns)


def _detail(
    cause: str,
    ns: int,
    step: StepRecord | None,
    steps: Sequence[StepRecord],
    gap: Gap,
    whose: Callable[[int], str],
) -> str:
    ms = f"{ns / NS_PER_MS:.2f} ms"
    if step is None:
        where = {
            "api": "in the API process, whose event loop had other work",
            "write": "until the caller had taken what was sent before",
        }
        return f"{ms} {where.get(cause, 'for which no record of a step is kept')}"
    match cause:
        case "prefill":
            owners = ", ".join(dict.fromkeys(whose(id_) for id_ in step.prefill_requests)) or "another caller's"
            return f"{ms} for {step.prefill_tokens} prompt tokens ({owners}) in the step"
        case "preemption":
            return f"{ms} without a place in the batch, until all known tokens were computed again"
        case "gc":
            return f"{ms} of garbage collection in the engine"
        case "run_queue":
            return f"{ms} in which the engine's loop waited for a processor"
        case "kv_copy":
            moved = (step.copied_bytes_in + step.copied_bytes_out) / 2**20
            return f"{ms} longer than usual beside copies of {moved:.1f} MiB of KV"
        case "graph_miss":
            return f"{ms} longer than usual, launched kernel by kernel: no graph of its shape was there"
        case "batch":
            return f"{ms} longer than usual, with {step.decode_rows} rows"
        case "host":
            return f"{ms} of the engine's loop between steps"
        case "api":
            return f"{ms} from the engine's result to the consumer: the API process's event loop had other work"
        case "write":
            return f"{ms} until the caller had taken what was sent before"
        case "decode":
            return f"{ms} of steps as usual"
        case _:
            return f"{ms} longer than usual, and the step's record does not say why"
