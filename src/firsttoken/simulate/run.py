"""A virtual run: the real scheduler and cache on the one side, a device that only takes time on the other.

The order within a turn is the engine loop's: what has arrived is taken in, steps are launched until ``in_flight`` of
them are under way, the oldest one's result is read. Virtual time passes in three places: while the oldest step runs,
while there is nothing to do, and while the host plans and launches a step.
"""

from __future__ import annotations

import gc
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from firsttoken.core.clock import NS_PER_MS, NS_PER_S, clock_replaced
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import RowSample, StepResult
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Targets
from firsttoken.core.timeline import Mark
from firsttoken.kvcache import KVCache
from firsttoken.kvcache.eviction import DEFAULT_POLICY, make_policy
from firsttoken.scheduler import PlannedStep, Scheduler, Update
from firsttoken.scheduler.admission import Admission
from firsttoken.scheduler.backlog import StepWork
from firsttoken.scheduler.step_learner import LEARN_EVERY, LearningStepTime, lead_ns
from firsttoken.scheduler.step_time import StepLoad, StepTime
from firsttoken.scheduler.window import BatchWindow
from firsttoken.simulate.figures import ClassFigures
from firsttoken.simulate.policies import Policy
from firsttoken.simulate.workload import OUTPUT_TOKEN, Job

GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
# Nothing is stored in a simulated block, so only its number of tokens counts.
KV_FORMAT = KVFormat(dtype="bfloat16", layers=1, kv_heads=1, head_dim=1)


Watch = Callable[[PlannedStep, int, int], None]
"""Is told of a step, and when it begins and ends, in ns."""


class Inside(NamedTuple):
    """The parts of a simulated engine."""

    scheduler: Scheduler
    kv: KVCache
    admission: Admission | None


AtRest = Callable[[Inside, int], None]
"""Is shown the engine whenever nothing is left to do in it, at a time in ns."""


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The simulated engine: ``kv_blocks`` of 16 tokens, ``host_ms`` of the loop's own work for each step, ``eviction``
    the policy of its KV cache, and the rest as in `SchedulerConfig` and `EngineConfig`."""

    kv_blocks: int
    max_num_seqs: int
    max_model_len: int
    in_flight: int
    host_ms: float = 0.0
    eviction: str = DEFAULT_POLICY


@dataclass(frozen=True)
class Outcome:
    """``refused`` counts the codes of requests that can never run, and why others were turned away; ``left`` those
    whose callers did not stay until the end, ``expired`` those that had not started by their deadline. ``virtual_ns``
    is when the last step ended."""

    classes: dict[str, ClassFigures]
    refused: Counter[str]
    left: int
    expired: int
    steps: int
    preemptions: int
    evictions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    virtual_ns: int

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens found in the cache, as a share of all prompt tokens."""
        return self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class _Live:
    job: Job
    token_times: array[int]


class _Flying(NamedTuple):
    planned: PlannedStep
    began_ns: int
    ended_ns: int
    work: StepWork | None


class _VirtualClock:
    def __init__(self) -> None:
        self.now = 0

    def read(self) -> int:
        return self.now


def simulate(
    jobs: Sequence[Job],
    policy: Policy,
    engine: EngineShape,
    step_time: StepTime,
    targets: Targets | None = None,
    *,
    window: BatchWindow | None = None,
    admission: bool = False,
    watch: Watch | None = None,
    at_rest: AtRest | None = None,
) -> Outcome:
    """Serve ``jobs`` to their ends, but for those that ``admission`` turns away as an engine's does. They are in order
    of arrival, wherever those lie that come after another. ``watch`` is told of each step when it is launched,
    ``at_rest`` of each moment without work.

    Raises `ConfigError` for a shape that no engine can have.
    """
    eviction = make_policy(engine.eviction)
    kv = KVCache(KV_FORMAT, engine.kv_blocks, model="simulated", block_hash=_quick_hash, policy=eviction)
    targets = targets or Targets()
    scheduler = policy.build(
        kv, max_num_seqs=engine.max_num_seqs, max_model_len=engine.max_model_len, targets=targets, window=window
    )
    inside = Inside(scheduler, kv, Admission(targets, engine.max_num_seqs) if admission else None)
    run = _Run(jobs, inside, step_time, engine, targets, policy.step_time, watch, at_rest)
    with clock_replaced(run.clock.read), _collector_off():
        run.to_the_end()
    return run.outcome()


@contextmanager
def _collector_off() -> Iterator[None]:
    """A run leaves no garbage in circles, and looking for it would take a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _quick_hash(parent: bytes, tokens: bytes) -> bytes:
    """Nobody attacks a simulation, and tokens are compared as well."""
    return hash((parent, tokens)).to_bytes(8, "little", signed=True)


class _Run:
    def __init__(
        self,
        jobs: Sequence[Job],
        inside: Inside,
        step_time: StepTime,
        engine: EngineShape,
        targets: Targets,
        learner: LearningStepTime | None,
        watch: Watch | None,
        at_rest: AtRest | None,
    ) -> None:
        self.clock = _VirtualClock()
        self._jobs = jobs
        self._inside = inside
        self._scheduler, self._kv, self._admission = inside
        self._step_time = step_time
        self._depth = engine.in_flight
        self._host_ns = round(engine.host_ms * NS_PER_MS)
        self._targets = targets
        self._learner = learner
        self._watch = watch
        self._at_rest = at_rest
        self._arrived = 0
        self._followers: dict[int, list[int]] = {}
        for number, job in enumerate(jobs):
            if job.after is not None:
                self._followers.setdefault(job.after, []).append(number)
        self._following: list[tuple[int, int]] = []  # when each of them comes, and who
        self._leaving: list[tuple[int, int]] = []  # when, and who
        self._left = self._expired = 0
        self._flying: deque[_Flying] = deque()
        self._device_free_ns = 0
        self._live: dict[int, _Live] = {}
        self._samples = [RowSample(slot, OUTPUT_TOKEN) for slot in range(engine.max_num_seqs)]
        self._classes: dict[str, ClassFigures] = {}
        self._refused: Counter[str] = Counter()
        self._steps = 0

    def to_the_end(self) -> None:
        """Raises `RuntimeError` when requests wait and the scheduler plans nothing."""
        while True:
            self._drain()
            self._launch()
            if self._flying:
                self._harvest()
                continue
            if not self._live and self._at_rest is not None:
                self._at_rest(self._inside, self.clock.now)
            if (next_ns := self._next_ns()) is not None:
                self.clock.now = max(self.clock.now, next_ns)
            elif self._live:
                raise RuntimeError(f"{len(self._live)} requests are left and the scheduler plans no step for them")
            else:
                return

    def _next_ns(self) -> int | None:
        """When something happens while no step runs: a request comes, a caller leaves, the batch window ends. None for
        never."""
        coming = [self._jobs[self._arrived].at_ns] if self._arrived < len(self._jobs) else []
        if self._following:
            coming.append(self._following[0][0])
        if self._scheduler.wake_ns:
            coming.append(self._scheduler.wake_ns)
        if self._live and self._leaving:
            coming.append(self._leaving[0][0])
        return min(coming, default=None)

    def outcome(self) -> Outcome:
        counters = self._scheduler.counters
        return Outcome(
            classes=self._classes,
            refused=self._refused,
            left=self._left,
            expired=self._expired,
            steps=self._steps,
            preemptions=counters.preemptions,
            evictions=self._kv.stats().evictions,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            output_tokens=counters.output_tokens,
            virtual_ns=self._device_free_ns,
        )

    def _drain(self) -> None:
        jobs = self._jobs
        while self._arrived < len(jobs):
            job = jobs[self._arrived]
            if job.after is None:
                if job.at_ns > self.clock.now:
                    break
                self._add(job, self._arrived)
            self._arrived += 1
        while self._following and self._following[0][0] <= self.clock.now:
            at_ns, number = heappop(self._following)
            self._add(replace(jobs[number], at_ns=at_ns), number)
        while self._leaving and self._leaving[0][0] <= self.clock.now:
            request = self._scheduler.abort(heappop(self._leaving)[1])
            if request is not None:
                self._left += 1
                self._forget(request)

    def _ended(self, number: int) -> None:
        """Who waited for this one's end comes next."""
        for follower in self._followers.get(number, ()):
            heappush(self._following, (self.clock.now + self._jobs[follower].at_ns, follower))

    def _forget(self, request: Request) -> _Live:
        self._ended(request.request_id)
        if self._admission is not None:
            self._admission.backlog.ended(request)
        return self._live.pop(request.request_id)

    def _add(self, job: Job, number: int) -> None:
        wire = EngineRequest(
            id=number,
            prompt=job.prompt(number),
            params=GREEDY,
            seed=0,
            max_tokens=job.output,
            service=job.service,
            priority=job.priority,
            tenant=job.tenant,
            deadline_ns=job.at_ns + round(job.deadline_ms * NS_PER_MS) if job.deadline_ms else 0,
            # It was sent when it arrived; the engine looks between two steps.
            stamps=[(Mark.TOKENIZED, job.at_ns)],
        )
        request = Request(wire)
        never = self._scheduler.can_ever_fit(request)
        if never is not None:
            self._refused[never.code or "invalid"] += 1
            self._ended(number)
            return
        refusal = self._admission.decide(request) if self._admission is not None else None
        if refusal is not None:
            self._refused[f"overloaded: {refusal.reason} of {job.service.name.lower()}"] += 1
            self._ended(number)
            return
        self._scheduler.add(request)
        self._live[number] = _Live(job, array("q"))
        if job.patience_ms:
            heappush(self._leaving, (job.at_ns + round(job.patience_ms * NS_PER_MS), number))

    def _launch(self) -> None:
        while len(self._flying) < self._depth:
            self._await_the_end()
            planned = self._scheduler.plan()
            for request in self._scheduler.expired():
                self._expired += 1
                self._forget(request)
            if planned is None:
                return
            self.clock.now += self._host_ns
            # Steps run one after the other, and not before they are launched.
            began = max(self._device_free_ns, self.clock.now)
            load = StepLoad.of(planned.plan)
            ms = self._step_time.ms(load)
            self._device_free_ns = began + round(ms * NS_PER_MS)
            # As the engine's loop does, if a step earlier: what a step took is known here when it is launched.
            if self._learner is not None and (load.prefill_tokens or not self._steps % LEARN_EVERY):
                self._learner.learn(load, ms)
            work = None
            if self._admission is not None:
                work = self._admission.backlog.planned(planned, self._scheduler.counters.preemptions)
            self._flying.append(_Flying(planned, began, self._device_free_ns, work))
            if self._watch is not None:
                self._watch(planned, began, self._device_free_ns)

    def _await_the_end(self) -> None:
        """As the engine's loop, plan the next step when those in flight are about to end. What a step takes is foreseen
        as it will be."""
        if not self._flying:
            return
        newest = self._flying[-1]
        due_ns = newest.ended_ns - lead_ns(newest.ended_ns - newest.began_ns)
        if self.clock.now < due_ns:
            self.clock.now = due_ns
            self._drain()

    def _harvest(self) -> None:
        planned, began_ns, ended_ns, work = self._flying.popleft()
        self.clock.now = max(self.clock.now, ended_ns)
        self._steps += 1
        plan, samples = planned.plan, self._samples
        result = StepResult(plan.step_id, [samples[work.slot] for work in plan.work if work.sample])
        now, live = self.clock.now, self._live
        before = len(live)
        for update in self._scheduler.complete(planned, result):
            live[update.request.request_id].token_times.append(now)
            if update.finished:
                self._finish(update)
        if self._admission is not None and work is not None:
            self._admission.backlog.ran(work, (ended_ns - began_ns) / NS_PER_S, before - len(live))

    def _finish(self, update: Update) -> None:
        request = update.request
        ended = self._forget(request)
        name = ended.job.counted_in
        figures = self._classes.get(name)
        if figures is None:
            figures = self._classes[name] = ClassFigures(self._targets.of(ended.job.service))
        figures.add(request.timeline, ended.token_times)
