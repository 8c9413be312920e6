"""Makes the record of each step, keeps the last ones, and tells the front end of them now and then."""

from __future__ import annotations

from collections.abc import Sequence

from firsttoken.core.plan import StepResult
from firsttoken.core.request import Request
from firsttoken.core.step_record import MAX_NAMED_PROMPTS, StepRecord
from firsttoken.kvcache.tiers import Tiers
from firsttoken.observability.ledger import GCClock, RunQueueClock, StepLedger
from firsttoken.scheduler.step import PlannedStep
from firsttoken.scheduler.step_time import StepLoad

# Asking the system for the loop's wait for a processor costs as much as to tell of a token.
RUN_QUEUE_NS = 5_000_000
# How often records are told that nobody waits for.
TELL_NS = 100_000_000

_NOTHING = (0, 0, 0)


class StepRecorder:
    """Used by the loop's thread alone; `ledger` may be read by any. ``tiers`` tell which KV was moved."""

    def __init__(self, tiers: Tiers | None = None) -> None:
        self.ledger = StepLedger()
        self._untold: list[StepRecord] = []
        self._told_ns = 0
        self._gc = GCClock()
        self._gc.start()
        self._run_queue = RunQueueClock()
        self._run_queue_asked_ns = 0
        self._tiers = tiers
        self._moved = _NOTHING

    def start(self) -> None:
        """From the thread that is to be observed."""
        self._run_queue.start()

    def stop(self) -> None:
        self._gc.stop()
        self._run_queue.stop()

    def add(
        self,
        planned: PlannedStep,
        load: StepLoad,
        result: StepResult,
        planned_ns: int,
        submitted_ns: int,
        harvested_ns: int,
        preempted: int,
    ) -> None:
        """A step's result was read."""
        chunks = load.prefill_tokens
        context = load.decode_context
        named: tuple[int, ...] = ()
        if chunks:
            context += _chunk_context(planned, load.decode_rows)
            named = _ids(planned.requests[load.decode_rows : load.decode_rows + MAX_NAMED_PROMPTS])
        run_queue_ns = 0
        if harvested_ns - self._run_queue_asked_ns >= RUN_QUEUE_NS:
            self._run_queue_asked_ns = harvested_ns
            run_queue_ns = self._run_queue.take()
        shape_tokens = result.shape_tokens
        # By position: keywords cost half as much again, at each step.
        record = StepRecord(
            result.step_id,
            planned_ns,
            submitted_ns,
            result.started_ns,
            result.ended_ns,
            harvested_ns,
            load.decode_rows,
            chunks,
            context,
            self._gc.take(),
            run_queue_ns,
            result.forward_ns,
            result.sample_ns,
            result.captured,
            named,
            shape_tokens - load.decode_rows - chunks if shape_tokens else 0,
            result.graph,
            *(_NOTHING if self._tiers is None else self._newly_moved(self._tiers)),
            preempted,
            load.prefill_pairs,
            load.prefill_reach,
            load.decode_context,
            result.held,
        )
        self.ledger.append(record)
        self._untold.append(record)

    def _newly_moved(self, tiers: Tiers) -> tuple[int, int, int]:
        """Bytes in, bytes out and ns since the last call."""
        inward, outward = tiers.moved_in, tiers.moved_out
        before = self._moved
        now = self._moved = inward.nbytes, outward.nbytes, inward.ns + outward.ns
        return _NOTHING if now == before else (now[0] - before[0], now[1] - before[1], now[2] - before[2])

    def due(self, now: int) -> bool:
        """Whether there is something to tell, and it is time to."""
        return bool(self._untold) and now - self._told_ns > TELL_NS

    def take(self, now: int) -> list[StepRecord]:
        """All that was not told yet; it counts as told at ``now``."""
        taken, self._untold = self._untold, []
        self._told_ns = now
        return taken


def _chunk_context(planned: PlannedStep, decode_rows: int) -> int:
    """The sum of the lengths of rows with chunks, which come last."""
    return sum([row.start + row.count for row in planned.plan.work[decode_rows:]])


def _ids(requests: Sequence[Request]) -> tuple[int, ...]:
    return tuple([request.request_id for request in requests])
