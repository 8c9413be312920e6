"""Step records as a live picture draws them: no more bars than it can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firsttoken.core.step_record import StepRecord

# A bar's fields, in the order in which it is sent. Times in ms of the one clock.
FIELDS = (
    "id",  # of the last of its steps
    "steps",
    "start",  # of compute
    "end",
    "longest",  # ms that one of the steps computed
    "decode_rows",  # summed over the steps, as are all that follow
    "prefill_tokens",
    "pad_tokens",
    "plan",
    "gc",
    "run_queue",
    "copy",
    "uncaptured",
    "preempted",
)
# A strip two thousand pixels wide shows about so many in ten seconds.
MAX_BARS = 40


def bars(records: Sequence[StepRecord], most: int = MAX_BARS) -> list[list[Any]]:
    """The records as rows of `FIELDS`, each its own while there are few; else neighbours of one kind are drawn as one,
    and where even that leaves more than twice ``most``, the newest of them."""
    together = -(-len(records) // most)
    if together <= 1:
        return [_bar((record,)) for record in records]
    runs: list[list[StepRecord]] = []
    last = ""
    for record in records:
        this = kind(record)
        if this != last or len(runs[-1]) == together:
            runs.append([])
            last = this
        runs[-1].append(record)
    return [_bar(run) for run in runs[-2 * most :]]


def _bar(records: Sequence[StepRecord]) -> list[Any]:
    """Consecutive steps of one kind as the values of `FIELDS`. One pass: a page that is opened asks for a thousand."""
    longest = rows = prompt = pad = plan = gc = run_queue = copy = uncaptured = preempted = 0
    for one in records:
        took = one.ended_ns - one.started_ns
        if took > longest:
            longest = took
        rows += one.decode_rows
        prompt += one.prefill_tokens
        pad += one.pad_tokens
        plan += one.submitted_ns - one.planned_ns
        gc += one.gc_ns
        run_queue += one.run_queue_ns
        copy += one.copy_ns
        uncaptured += not one.captured
        preempted += one.preempted
    first, last = records[0], records[-1]
    times = (_ms(plan), _ms(gc), _ms(run_queue), _ms(copy))
    spans = (_ms(first.started_ns), _ms(last.ended_ns), _ms(longest))
    return [last.step_id, len(records), *spans, rows, prompt, pad, *times, uncaptured, preempted]


def kind(record: StepRecord) -> str:
    """decode, prefill or mixed."""
    if not record.prefill_tokens:
        return "decode"
    return "mixed" if record.decode_rows else "prefill"


def _ms(ns: int) -> float:
    return ns // 1000 / 1000  # to the microsecond: rounding takes longer
