"""A whole engine in miniature: the real scheduler and cache, and an executor that remembers what it wrote where."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from firsttoken.core.clock import NS_PER_MS, clock_replaced
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import PLAN_DECODER, PLAN_ENCODER, RowSample, StepPlan, StepResult
from firsttoken.core.request import EngineRequest, Request, Status
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Targets
from firsttoken.core.timeline import Mark
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import PlannedStep, PromptOrder, Scheduler, SchedulerConfig, TokenCap, Update

VOCABULARY = 5


def kv_value(before: int, token: int) -> int:
    """Stands for the KV of a token: depends on it and on all tokens before it."""
    return hash((before, token))


def next_token(value: int, stop_ids: tuple[int, ...], masked: bool) -> int:
    """The greedy choice of the model: depends on the whole prefix. ``masked``: no stop token may come."""
    token = value % VOCABULARY
    while masked and token in stop_ids:
        token = (token + 1) % VOCABULARY
    return token


@dataclass
class Row:
    request_id: int
    tokens: list[int]
    blocks: list[int]
    num_prompt: int
    stop_ids: tuple[int, ...]
    min_tokens: int


class MemoryModel:
    """An executor whose memory is ``block -> values``, and which checks every value that it reads."""

    def __init__(self, block_tokens: int, slots: int) -> None:
        self.block_tokens = block_tokens
        self.slots = slots
        self.rows: dict[int, Row] = {}
        self.memory: dict[tuple[int, int], int] = {}
        self.failing: set[int] = set()
        self.last_step = -1

    def run(self, plan: StepPlan) -> tuple[StepResult, set[int]]:
        """The result of a step, and the blocks it wrote."""
        assert plan.step_id == self.last_step + 1, "steps must be numbered in order"
        self.last_step = plan.step_id
        self._update_rows(plan)
        self._check_order(plan)
        writes: dict[tuple[int, int], int] = {}
        samples: list[RowSample] = []
        for work in plan.work:
            row = self.rows[work.slot]
            end = work.start + work.count
            assert work.count >= 1
            assert end <= len(row.tokens), f"{row} has no token {end - 1} yet"
            assert work.sample == (end == len(row.tokens)), "a row samples exactly when it reaches the known end"
            value = 0
            for position, token in enumerate(row.tokens[:end]):
                value = kv_value(value, token)
                place = (row.blocks[position // self.block_tokens], position % self.block_tokens)
                if position < work.start:
                    assert self.memory.get(place) == value, f"{row} reads foreign KV at position {position}"
                else:
                    assert place not in writes, f"two rows write {place} in one step"
                    writes[place] = value
            if work.sample:
                samples.append(self._sample(work.slot, row, value))
        # Last: no row may depend on what another row of the same step writes.
        self.memory.update(writes)
        return StepResult(plan.step_id, samples), {block for block, _ in writes}

    def _sample(self, slot: int, row: Row, value: int) -> RowSample:
        token = next_token(value, row.stop_ids, len(row.tokens) - row.num_prompt < row.min_tokens)
        row.tokens.append(token)
        if row.request_id in self.failing:
            return RowSample(slot, 0, error="non-finite logits")
        return RowSample(slot, token)

    def _update_rows(self, plan: StepPlan) -> None:
        assert len(set(plan.retire)) == len(plan.retire)
        for slot in plan.retire:
            del self.rows[slot]
        for start in plan.starts:
            assert 0 <= start.slot < self.slots
            assert start.slot not in self.rows, f"slot {start.slot} is taken"
            tokens = list(array("I", start.tokens))
            self.rows[start.slot] = Row(
                start.request_id,
                tokens,
                list(start.blocks),
                start.num_prompt,
                start.stop_ids,
                start.params.min_tokens,
            )
        for more in plan.blocks:
            assert more.blocks
            self.rows[more.slot].blocks.extend(more.blocks)
        for row in self.rows.values():
            assert len(set(row.blocks)) == len(row.blocks)

    @staticmethod
    def _check_order(plan: StepPlan) -> None:
        slots = [work.slot for work in plan.work]
        assert len(set(slots)) == len(slots), "a slot works twice in one step"
        single = [work.count == 1 and work.sample for work in plan.work]
        assert single == sorted(single, reverse=True), "rows with one sampled token come first"


@dataclass
class World:
    """Scheduler, cache and memory model, with the checks that hold after every step."""

    blocks: int = 8
    slots: int = 3
    alone: int = 12
    mixed: int = 5
    block_tokens: int = 4
    max_model_len: int = 1000
    cache_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    order: PromptOrder = PromptOrder()  # noqa: RUF009 (frozen)
    targets: Targets = Targets()  # noqa: RUF009

    def __post_init__(self) -> None:
        kv_format = KVFormat(dtype="float32", layers=1, kv_heads=1, head_dim=8, block_tokens=self.block_tokens)
        self.kv = KVCache(kv_format, self.blocks, model="test", **self.cache_options)
        config = SchedulerConfig(max_num_seqs=self.slots, max_model_len=self.max_model_len, **self.options)
        self.scheduler = Scheduler(config, self.kv, TokenCap(self.alone, self.mixed), self.order, self.targets)
        self.executor = MemoryModel(self.block_tokens, self.slots)
        self.in_flight: deque[tuple[PlannedStep, StepResult]] = deque()
        self.requests: dict[int, Request] = {}
        self.ended: dict[int, str] = {}
        self.streamed: dict[int, list[int]] = {}
        self.first_token_step: dict[int, int] = {}
        self.steps = 0

    def add(self, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Request:
        """Queue a request with the next id; ``fields`` are those of `EngineRequest`, and ``min_tokens``,
        ``stop_token_ids`` of its parameters."""
        params = SamplingParams(
            max_tokens=max(max_tokens, 1),
            temperature=0,
            min_tokens=fields.pop("min_tokens", 0),
            stop_token_ids=fields.pop("stop_token_ids", None),
        )
        number = len(self.requests) + 1
        wire = EngineRequest(
            id=number, prompt=array("I", prompt).tobytes(), params=params, seed=0, max_tokens=max_tokens, **fields
        )
        request = Request(wire)
        self.scheduler.add(request)
        self.requests[number] = request
        self.streamed[number] = []
        return request

    def plan(self) -> PlannedStep | None:
        """Plan a step and run it (its result is kept for `complete`), checking what must hold for it."""
        decoding = [r for r in self.requests.values() if self._decodes(r)]
        planned = self.scheduler.plan()
        self.expire()
        self.check()
        if planned is None:
            return None
        self.steps += 1
        plan = PLAN_DECODER.decode(PLAN_ENCODER.encode(planned.plan))
        self._check_plan(planned, decoding)
        result, written = self.executor.run(plan)
        findable = {block for shard in self.kv.index.shards() for block in shard.blocks}
        assert not written & findable, f"registered blocks {written & findable} were written again"
        for sample in result.samples:
            request = next(r for w, r in zip(plan.work, planned.requests, strict=True) if w.slot == sample.slot)
            self.first_token_step.setdefault(request.request_id, plan.step_id)
        self.in_flight.append((planned, result))
        return planned

    def complete(self) -> list[Update]:
        planned, result = self.in_flight.popleft()
        updates = self.scheduler.complete(planned, result)
        for update in updates:
            number = update.request.request_id
            assert number not in self.ended, "an update after the end"
            if update.token is not None:
                self.streamed[number].append(update.token)
            if update.finished:
                assert update.request.finish_reason is not None
                self.ended[number] = update.request.finish_reason
        self.check()
        return updates

    def abort(self, number: int) -> None:
        request = self.scheduler.abort(number)
        assert (request is None) == (number in self.ended)
        if request is not None:
            self.ended[number] = "abort"
        self.check()

    def expire(self) -> list[int]:
        """Take in those that ended because they were late."""
        late = [request.request_id for request in self.scheduler.expired()]
        for number in late:
            assert number not in self.ended
            self.ended[number] = "error"
        return late

    def step(self) -> PlannedStep | None:
        """One step in lockstep."""
        planned = self.plan()
        if self.in_flight:
            self.complete()
        return planned

    def drain(self, depth: int = 1, limit: int = 3000) -> None:
        """Run until every request has ended, then check that nothing is held and all outputs are right."""
        for _ in range(limit):
            if not self.in_flight and not self.scheduler.num_running and not self.scheduler.num_waiting:
                break
            planned = self.plan()
            if self.in_flight and (planned is None or len(self.in_flight) >= depth):
                self.complete()
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0, "requests never ended"
        while self.in_flight:
            self.complete()
        assert self.ended.keys() == self.requests.keys()
        assert self.kv.stats().used == 0
        for number in self.requests:
            self.check_output(number)

    def check(self) -> None:
        self.kv.check()
        running = [r for r in self.requests.values() if r.status is Status.RUNNING]
        waiting = [r for r in self.requests.values() if r.status is Status.WAITING]
        assert len(running) == self.scheduler.num_running
        assert len(waiting) == self.scheduler.num_waiting
        slots = [r.slot for r in running]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.slots for slot in slots)
        for request in self.requests.values():
            assert request.num_pending >= 0
            if request.status is not Status.RUNNING:
                assert not self.kv.blocks_of(request)
            if request.status is not Status.FINISHED:
                assert 0 <= request.num_computed <= request.num_tokens + request.num_pending
                assert request.num_output + request.num_pending <= request.max_tokens
            assert self.streamed[request.request_id] == list(request.tokens[request.num_prompt :])
            if request.status is not Status.WAITING:
                assert min(request.queue_ns) >= 0
                assert sum(request.queue_ns) == queued_ns(request), "what it waited for is not all of its wait"

    def check_output(self, number: int) -> None:
        """The tokens are those of the request alone, in full (or, cut short, the beginning of them)."""
        request = self.requests[number]
        alone, reason = self.alone_output(request)
        tokens = list(request.tokens[request.num_prompt :])
        assert request.finish_reason == self.ended[number]
        if request.finish_reason in ("abort", "error"):
            assert tokens == alone[: len(tokens)]
        else:
            assert tokens == alone
            assert request.finish_reason == reason

    def alone_output(self, request: Request) -> tuple[list[int], str]:
        value = 0
        for token in request.tokens[: request.num_prompt]:
            value = kv_value(value, token)
        stop_ids = tuple(request.stop_ids)
        output: list[int] = []
        while len(output) < request.max_tokens:
            masked = len(output) < request.params.min_tokens
            token = next_token(value, tuple(sorted(stop_ids)), masked)
            value = kv_value(value, token)
            output.append(token)
            if token in stop_ids and not masked:
                return output, "stop"
        return output, "length"

    @staticmethod
    def _decodes(request: Request) -> bool:
        return request.status is Status.RUNNING and not request.all_planned and request.num_wanted == 1

    def _check_plan(self, planned: PlannedStep, decoding: list[Request]) -> None:
        work = planned.plan.work
        assert len(work) == len(planned.requests)
        ids = {request.request_id for request in planned.requests}
        if self.order.decodes_wait and not any(request.request_id in ids for request in decoding):
            decoding = []  # all of them wait for prompts
        for request in decoding:
            if request.status is Status.RUNNING:
                assert request.request_id in ids, "a decode row was left out"
            else:
                assert request.request_id not in ids, "a victim is in the plan"
        survivors = [request for request in decoding if request.status is Status.RUNNING]
        cap = self.mixed if survivors else self.alone
        assert planned.plan.num_tokens - len(survivors) <= cap, "more prefill than the budget"
        for row, request in zip(work, planned.requests, strict=True):
            assert request.status is Status.RUNNING
            assert request.slot == row.slot


def queued_ns(request: Request) -> int:
    """Time in the queue by the request's timeline."""
    total = since = 0
    for mark, ns in request.timeline.stamps():
        if mark in (Mark.ARRIVED, Mark.PREEMPTED):
            total += ns - since if since else 0
            since = ns
        elif mark in (Mark.SCHEDULED, Mark.RESTORING, Mark.FINISHED):
            total += ns - since if since else 0
            since = 0
    return total


class Clock:
    """Virtual time in ms; with ``tick_ns`` it goes on by so much each time that it is read."""

    def __init__(self) -> None:
        self.ms = 1000.0
        self.tick_ns = 0

    def read(self) -> int:
        self.ms += self.tick_ns / NS_PER_MS
        return round(self.ms * NS_PER_MS)


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_replaced(clock.read):
        yield clock


@pytest.fixture
def world() -> type[World]:
    return World
