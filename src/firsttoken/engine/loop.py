"""The step loop: drain messages, plan, launch, harvest, emit.

Order within a turn, and why: messages are drained first, so that a request that arrived while a step ran joins the
next one and an abort frees its blocks before they are planned for; results are emitted before the next plan is made,
because a first token should not wait for bookkeeping, nor for what the executor `settle`s.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from firsttoken.core.clock import NS_PER_MS, NS_PER_S, now_ns
from firsttoken.core.errors import DeadlineExceeded, InvalidRequest
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.service import Targets
from firsttoken.engine.class_gauges import ClassGauges
from firsttoken.engine.deltas import first_delta, last_delta, too_late
from firsttoken.engine.foresight import Foresight
from firsttoken.engine.grammar_gate import GrammarGate
from firsttoken.engine.host_clock import HostClock
from firsttoken.engine.kv_gauges import KVGauges
from firsttoken.engine.step_gauges import StepGauges
from firsttoken.engine.step_recorder import StepRecorder
from firsttoken.executor.interface import Executor, StepHandle
from firsttoken.grammar.grammars import Grammars
from firsttoken.kvcache import KVCache
from firsttoken.observability.ledger import StepLedger
from firsttoken.scheduler.admission import Admission, Refusal
from firsttoken.scheduler.backlog import StepWork
from firsttoken.scheduler.scheduler import Scheduler
from firsttoken.scheduler.step import PlannedStep, Update
from firsttoken.scheduler.step_learner import LEARN_EVERY, LearningStepTime, lead_ns
from firsttoken.scheduler.step_time import StepLoad
from firsttoken.transport.channel import ChannelClosed, EngineEnd
from firsttoken.transport.messages import (
    Abort,
    EngineStats,
    Failed,
    Refused,
    RequestDelta,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
)

log = logging.getLogger(__name__)

# How often an idle engine says that it lives.
HEARTBEAT_S = 0.5
# How often an idle engine looks whether copies of KV to lower tiers have arrived, and grammars are compiled.
COPY_POLL_S = 0.001
# Totals and gauges that go with a step's tokens may be so old, unless a request has ended: with fast steps, to make
# them costs as much as to send the tokens.
STATS_NS = 10_000_000
# Of slow steps that only decode, one in `LEARN_EVERY` is too few: where others take the processor for a while, they
# would be predicted by the time before, and chunks beside them, which are all learned from, by the time since.
LEARN_NS = 100_000_000
# While it is too early to plan the next step, it is asked after this part of the time whether those in flight have
# ended all the same, or after so long: to ask costs the host some 20 us.
POLL_PART = 4
POLL_NS = 2_000_000


@dataclass(slots=True, eq=False)
class _InFlight:
    planned: PlannedStep
    handle: StepHandle
    load: StepLoad
    foreseen_ns: int  # how long it should take
    planned_ns: int
    submitted_ns: int
    work: StepWork
    preempted: int  # requests that lost their place when it was planned


class EngineLoop:
    """Owns the scheduler, the executor and the engine's end of the channel. One thread calls `run`.

    ``step_time`` learns from the steps that are run. ``admission`` decides who is let in, by default after the classes'
    default targets. ``host`` measures the loop. ``peak_memory`` gives the bytes of `EngineStats.peak_memory`; it is
    called when the engine is idle. ``grammars_ahead`` as in `GrammarGate`. `on_orphaned` is called when the front end
    is gone without a word.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCache,
        executor: Executor,
        channel: EngineEnd,
        *,
        in_flight: int,
        step_time: LearningStepTime,
        admission: Admission | None = None,
        host: HostClock | None = None,
        peak_memory: Callable[[], int] = lambda: 0,
        grammars: Grammars | None = None,
        grammars_ahead: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._tiers = kv.tiers
        self._executor = executor
        self._channel = channel
        self._grammars = grammars
        self._gate = GrammarGate(grammars, ahead=grammars_ahead)
        self._depth = in_flight
        self._admission = admission or Admission(Targets(), scheduler.config.max_num_seqs)
        self._backlog = self._admission.backlog
        self._gauges = ClassGauges(self._admission)
        self._kv_gauges = KVGauges(kv)
        self._step_time = step_time
        self._step_gauges = StepGauges(step_time)
        self._foresight = Foresight(step_time)
        self._flying: deque[_InFlight] = deque()
        self._deltas: list[RequestDelta] = []
        self._steps = 0
        self._captured_steps = 0
        self._last_step_ns = 0
        self._learned_ns = 0  # from a step that only decodes
        self._told_ns = 0
        self._preemptions = 0  # as of the last plan
        self._ended = False  # a request has, and it was not told yet
        self._stopping = False
        self._looked_ns = self._looked_before_ns = 0  # when it began to look for messages, or a moment before; twice
        self._stalled = False  # no step is in flight, and the last plan had none
        self._last_ended_ns = 0  # of the last result, on the device
        self._due_ns = 0  # when the next step should be planned
        self._was_early = False
        self._was_busy = False
        self._read_peak_memory = peak_memory
        self._peak_memory = 0
        self._host = host or HostClock()
        self._recorder = StepRecorder(kv.tiers)
        self.on_orphaned: Callable[[StepLedger, EngineStats], None] = _nothing
        self._told_stats = EngineStats()
        self._stats_due = True

    @property
    def ledger(self) -> StepLedger:
        """The records of the last steps."""
        return self._recorder.ledger

    def run(self) -> None:
        """Turn until told to stop or until the front end is gone. Raises what a step raised."""
        try:
            self._host.resume()
            self._recorder.start()
            while not self._stopping:
                self.turn()
            self._flush_tiers()
        except ChannelClosed:
            log.info("the front end is gone: leaving")
            self.on_orphaned(self.ledger, self._stats(now_ns()))
            self._flush_tiers()
        except Exception as error:
            log.exception("the engine failed")
            self._tell_failure(error)
            raise
        finally:
            try:
                self._executor.close()  # a device that has failed raises here once more
            finally:
                if self._tiers is not None:
                    self._tiers.close()
                if self._grammars is not None:
                    self._grammars.close()
                self._recorder.stop()
                self._channel.close()

    def _flush_tiers(self) -> None:
        """At an orderly end: what a device that has failed leaves is not worth keeping, and it may never answer."""
        if self._tiers is not None:
            self._tiers.flush()

    def turn(self) -> None:
        """One turn: never longer than one step, or one heartbeat when idle."""
        for message in self._channel.receive(self._wait_s()):
            self._obey(message)
        if self._gate:
            self._let_in_those_released()
        if self._tiers is not None and self._tiers.busy:
            self._tiers.advance()
        if self._launch() and self._flying:
            self._harvest()
        self._emit()
        self._executor.settle()
        self._check_when_idle()

    @property
    def _has_work(self) -> bool:
        return bool(self._flying or self._scheduler.num_running or self._scheduler.num_waiting)

    def _wait_s(self) -> float:
        """How long nothing but a message can bring work: without requests, and while all of them are held back."""
        early_ns = self._too_early_ns()
        self._was_early = early_ns > 0
        if early_ns:
            return min(early_ns, max(early_ns // POLL_PART, POLL_NS)) / NS_PER_S
        if not self._has_work:
            if self._executor.idle():
                self._looked_before_ns, self._looked_ns = self._looked_ns, now_ns()  # that may have taken long
                return 0
            self._gate.rest(self._last_step_ns)
            return COPY_POLL_S if self._gate or (self._tiers is not None and self._tiers.busy) else HEARTBEAT_S
        if self._stalled and self._scheduler.wake_ns:
            return min(max(self._scheduler.wake_ns - now_ns(), 0) / NS_PER_S, HEARTBEAT_S)
        return 0

    def _too_early_ns(self) -> int:
        """How long the next step need not be planned yet; 0 when it should be.

        The device must find it when those in flight end, and whoever comes until then may be part of it: a plan that is
        made as soon as the step before has begun makes them wait for all of that step and for the planned one.
        """
        if not 0 < len(self._flying) < self._depth:
            return 0
        newest = self._flying[-1]
        early_ns = self._due_ns - now_ns()
        return 0 if early_ns <= 0 or newest.handle.done() else early_ns

    def _foresee(self) -> None:
        """Set when the next step is due, by those in flight."""
        began_ns = max(self._flying[0].submitted_ns, self._last_ended_ns)
        ends_ns = began_ns + sum([step.foreseen_ns for step in self._flying])
        self._due_ns = ends_ns - lead_ns(self._flying[-1].foreseen_ns)

    # ------------------------------------------------------------------ messages

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Submit(requests=requests):
                for request in requests:
                    self._add(request)
            case Abort(ids=ids):
                for request_id in ids:
                    self._abort(request_id)
            case Shutdown():
                self._stopping = True

    def _add(self, wire: EngineRequest) -> None:
        request = Request(wire, arrived_ns=self._arrived_ns(wire))
        never = self._scheduler.can_ever_fit(request)
        if never is not None:
            self._refuse(wire.id, never)
            return
        try:
            if self._gate.keeps(request):
                return
        except InvalidRequest as error:
            self._refuse(wire.id, error)
            return
        self._let_in(request)

    def _let_in_those_released(self) -> None:
        for request, error in self._gate.released():
            if error is None:
                self._let_in(request)
            else:
                self._refuse(request.request_id, error)

    def _refuse(self, request_id: int, error: InvalidRequest) -> None:
        self._channel.send(Refused(request_id, error.message, error.param, error.code))

    def _let_in(self, request: Request) -> None:
        refusal = self._admission.decide(request)
        if refusal is not None:
            self._channel.send(_turned_away(request.request_id, refusal))
            return
        self._scheduler.add(request)

    def _arrived_ns(self, wire: EngineRequest) -> int | None:
        """Since when it has waited for this loop; None for now. Who was handed over before the loop began to look had
        to wait for it, but no longer than since it looked before: then it was not here."""
        handed_ns = wire.stamps[-1][1] if wire.stamps else self._looked_ns
        return max(handed_ns, self._looked_before_ns) if handed_ns < self._looked_ns else None

    def _abort(self, request_id: int) -> None:
        waiting = self._gate.drop(request_id)
        if waiting is not None:
            self._scheduler.counters.aborted += 1
            self._tell_end(last_delta(waiting, [], "abort"))
            return
        request = self._scheduler.abort(request_id)
        if request is not None:
            self._backlog.ended(request)
            if request.first_scheduled and not request.num_output:
                self._kv_gauges.prompt(request)
            self._tell_end(last_delta(request, [], "abort"))

    # ------------------------------------------------------------------ steps

    def _launch(self) -> bool:
        """Launch what may be in flight. False while it is too early for the next step: then no result is waited for,
        or the device would be without a step when those in flight end."""
        while len(self._flying) < self._depth:
            # What was late enough before the turn's messages came is so now.
            if self._was_early and self._too_early_ns():
                return False
            planned_ns = now_ns()
            planned = self._scheduler.plan()
            for request in self._scheduler.expired():
                self._backlog.ended(request)
                self._tell_end(last_delta(request, [], "error", error=too_late(request), code=DeadlineExceeded.code))
            self._stalled = planned is None and not self._flying
            if planned is None:
                return True
            handle = self._executor.submit(planned.plan)
            submitted_ns = now_ns()
            preemptions, before = self._scheduler.counters.preemptions, self._preemptions
            self._preemptions = preemptions
            work = self._backlog.planned(planned, preemptions)
            load, foreseen_ns = self._foresight.of(planned.plan)
            self._flying.append(
                _InFlight(planned, handle, load, foreseen_ns, planned_ns, submitted_ns, work, preemptions - before)
            )
            if len(self._flying) < self._depth:
                self._foresee()
                self._was_early = True
        return True

    def _harvest(self) -> None:
        step = self._flying.popleft()
        self._host.pause()
        result = step.handle.result()
        self._host.resume()
        harvested = now_ns()
        took_ns = harvested - max(step.submitted_ns, self._last_step_ns)
        self._steps += 1
        self._captured_steps += result.captured
        self._last_step_ns = harvested
        self._last_ended_ns = result.ended_ns
        if self._flying:
            self._foresee()
        ends = 0
        for update in self._scheduler.complete(step.planned, result):
            if update.finished:
                ends += 1
                self._backlog.ended(update.request)
            self._record(update)
        self._backlog.ran(step.work, took_ns / NS_PER_S, ends)
        load = step.load
        due = not self._steps % LEARN_EVERY or harvested - self._learned_ns >= LEARN_NS
        if result.typical and (load.prefill_tokens or due):
            if not load.prefill_tokens:
                self._learned_ns = harvested
            self._step_time.learn(load, (result.ended_ns - result.started_ns) / NS_PER_MS)
        self._recorder.add(step.planned, load, result, step.planned_ns, step.submitted_ns, harvested, step.preempted)

    def _record(self, update: Update) -> None:
        request = update.request
        tokens = [] if update.token is None else [update.token]
        logprobs = None if update.logprobs is None else [update.logprobs]
        first = request.num_output == len(tokens)  # its first token, or it failed before that
        if first:
            self._kv_gauges.prompt(request)
        if request.finish_reason is None:
            if first or request.preemptions:  # what has been told of its way is not all
                self._deltas.append(first_delta(request, tokens, logprobs, update.prompt_logprobs))
                return
            self._deltas.append(RequestDelta(request.request_id, tokens, logprobs, cached_tokens=request.num_cached))
            return
        self._tell_end(
            last_delta(
                request,
                tokens,
                request.finish_reason,
                logprobs=logprobs,
                error=update.error,
                code=update.code,
                prompt_logprobs=update.prompt_logprobs,
                pooled=update.pooled,
            )
        )

    def _tell_end(self, delta: RequestDelta) -> None:
        """With totals in which the request has ended."""
        self._deltas.append(delta)
        self._stats_due = self._ended = True

    # ------------------------------------------------------------------ telling

    def _emit(self) -> None:
        now = now_ns()
        self._looked_before_ns, self._looked_ns = self._looked_ns, now
        tell_steps = self._ended or self._recorder.due(now)
        if not self._deltas and not tell_steps:
            if now - self._told_ns < HEARTBEAT_S * 1e9:
                return
            if not self._has_work:  # nobody waits for what it costs to ask
                self._peak_memory = self._read_peak_memory()
        deltas, self._deltas = self._deltas, []
        self._told_ns = now
        stats = self._told_stats
        if self._stats_due or now - stats.heartbeat_ns > STATS_NS:
            stats = self._told_stats = self._stats(now)
            self._stats_due = False
        steps = self._recorder.take(now) if tell_steps else []
        self._ended = False
        self._channel.send(StepOutputs(deltas, stats, self._kv_gauges.read(now), steps))

    def _stats(self, now: int) -> EngineStats:
        kv, scheduler, counters = self._kv.stats(), self._scheduler, self._scheduler.counters
        return EngineStats(
            steps=self._steps,
            captured_steps=self._captured_steps,
            unprepared=self._executor.unprepared,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + len(self._gate),
            kv_total=kv.total,
            kv_used=kv.used,
            kv_cached=kv.cached,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            output_tokens=counters.output_tokens,
            preemptions=counters.preemptions,
            finished=counters.finished,
            aborted=counters.aborted,
            failed=counters.failed,
            heartbeat_ns=now,
            last_step_ns=self._last_step_ns,
            host_ns=self._host.total_ns,
            peak_memory=self._peak_memory,
            classes=self._gauges.read(now),
            step_time_errors=self._step_gauges.read(now),
        )

    def _tell_failure(self, error: Exception) -> None:
        try:
            steps = self._recorder.take(now_ns())
            if steps:
                self._channel.send(StepOutputs([], self._told_stats, None, steps))
            self._channel.send(Failed(f"{type(error).__name__}: {error}"))
        except ChannelClosed:
            log.info("the front end is gone and hears no more of it")

    def _check_when_idle(self) -> None:
        """Production's share of the invariant check: once, each time that the engine falls idle."""
        busy = self._has_work
        if self._was_busy and not busy:
            self._kv.check_unused()
        self._was_busy = busy


def _nothing(*_: object) -> None:
    """The default of a callback."""


def _turned_away(request_id: int, refusal: Refusal) -> Refused:
    if refusal.late:
        return Refused(request_id, refusal.message, "deadline_ms", DeadlineExceeded.code)
    return Refused(request_id, refusal.message, code="overloaded", retry_after_s=refusal.retry_after_s)
