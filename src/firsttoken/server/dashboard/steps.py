"""Step records as a live picture draws them: no more bars than it can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from firsttoken.core.clock import NS_PER_MS
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


@dataclass(frozen=True, slots=True)
class StepBar:
    """Consecutive steps of one kind, drawn as one."""

    records: Sequence[StepRecord]

    def row(self) -> list[Any]:
        """The values of `FIELDS`."""
        records = self.records
        first, last = records[0], records[-1]
        return [
            last.step_id,
            len(records),
            _ms(first.started_ns),
            _ms(last.ended_ns),
            _ms(max(one.ended_ns - one.started_ns for one in records)),
            sum(one.decode_rows for one in records),
            sum(one.prefill_tokens for one in records),
            sum(one.pad_tokens for one in records),
            _ms(sum(one.submitted_ns - one.planned_ns for one in records)),
            _ms(sum(one.gc_ns for one in records)),
            _ms(sum(one.run_queue_ns for one in records)),
            _ms(sum(one.copy_ns for one in records)),
            sum(not one.captured for one in records),
            sum(one.preempted for one in records),
        ]


def bars(records: Sequence[StepRecord], most: int = MAX_BARS) -> list[list[Any]]:
    """The records as rows of `FIELDS`, each its own while there are few; else neighbours of one kind are drawn as one,
    and where even that leaves more than twice ``most``, the newest of them."""
    together = -(-len(records) // most)
    if together <= 1:
        return [StepBar([record]).row() for record in records]
    found = []
    for _, run in groupby(records, kind):
        same = list(run)
        found += [StepBar(same[at : at + together]) for at in range(0, len(same), together)]
    return [bar.row() for bar in found[-2 * most :]]


def kind(record: StepRecord) -> str:
    """decode, prefill or mixed."""
    if not record.prefill_tokens:
        return "decode"
    return "mixed" if record.decode_rows else "prefill"


def _ms(ns: int) -> float:
    return round(ns / NS_PER_MS, 3)
