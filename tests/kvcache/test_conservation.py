"""Every token of a prompt is either found in the cache or computed, once an admission, whatever happens meanwhile."""

from __future__ import annotations

import random
from array import array
from collections import deque

import pytest

from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import RowSample, StepResult
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import Scheduler, SchedulerConfig, TokenCap
from firsttoken.scheduler.step import PlannedStep

PARAMS = SamplingParams()


class Bookkeeper:
    """Follows each admission by the plans alone: what it began with, and what was computed of it."""

    def __init__(self, chance: random.Random, blocks: int) -> None:
        self.chance = chance
        self.kv = KVCache(
            KVFormat(dtype="float32", layers=1, kv_heads=1, head_dim=8, block_tokens=4),
            blocks,
            model="m",
            shard_tokens=lambda request: 16,
        )
        config = SchedulerConfig(max_num_seqs=4, max_model_len=100)
        self.scheduler = Scheduler(config, self.kv, TokenCap(24, 8))
        self.requests: list[Request] = []
        self.flying: deque[PlannedStep] = deque()
        self.known: dict[int, int] = {}  # tokens at the admission, of those that prefill
        self.next: dict[int, int] = {}
        self.admitted = self.found = self.computed = self.cut_off = self.whole = 0

    def add(self) -> None:
        begin = [1] * self.chance.choice([0, 8, 16]) + [2] * self.chance.choice([0, 4, 20])
        prompt = begin + [self.chance.randrange(2) for _ in range(self.chance.randint(1, 12))]
        wire = EngineRequest(
            id=len(self.requests),
            prompt=array("I", prompt).tobytes(),
            params=PARAMS,
            seed=0,
            max_tokens=self.chance.randint(1, 30),
            service=self.chance.randrange(3),
        )
        self.requests.append(Request(wire))
        self.scheduler.add(self.requests[-1])

    def plan(self) -> None:
        planned = self.scheduler.plan()
        self.drop_who_left()
        if planned is None:
            return
        self.flying.append(planned)
        starts = {start.slot: start for start in planned.plan.starts}
        for work, request in zip(planned.plan.work, planned.requests, strict=True):
            number = request.request_id
            if work.slot in starts:
                known = len(starts[work.slot].tokens) // 4
                self.admitted += known
                self.found += work.start
                self.known[number], self.next[number] = known, work.start
                if not request.preemptions:
                    assert request.num_cached == work.start
                    assert request.miss is None or request.miss.position >= request.num_cached
            if number in self.known:
                assert work.start == self.next[number], "computed twice, or left out"
                self.next[number] += work.count
                self.computed += work.count
                if self.next[number] == self.known[number]:
                    assert work.sample
                    self.whole += 1
                    del self.known[number]

    def drop_who_left(self) -> None:
        """Those that were preempted or aborted amid their prompt; a preempted one may have started again already."""
        for number in list(self.known):
            request = self.requests[number]
            if request.slot < 0 or not self.kv.blocks_of(request) or request.num_computed < self.next[number]:
                self.cut_off += self.known.pop(number) - self.next[number]

    def complete(self) -> None:
        planned = self.flying.popleft()
        samples = [RowSample(work.slot, self.chance.randrange(2)) for work in planned.plan.work if work.sample]
        self.scheduler.complete(planned, StepResult(planned.plan.step_id, samples))


@pytest.mark.parametrize("seed", range(12))
def test_hits_and_computed_tokens_are_all_tokens(seed: int) -> None:
    chance = random.Random(seed)
    keeper = Bookkeeper(chance, blocks=chance.choice([28, 40, 90]))
    while len(keeper.requests) < 150 or keeper.scheduler.num_running or keeper.scheduler.num_waiting:
        if len(keeper.requests) < 150 and keeper.scheduler.num_waiting < 6:
            keeper.add()
        if chance.random() < 0.06:
            keeper.scheduler.abort(chance.randrange(len(keeper.requests)))
            keeper.drop_who_left()
        if len(keeper.flying) < 2:
            keeper.plan()
            keeper.kv.check()
        if keeper.flying and chance.random() < 0.7:
            keeper.complete()
    while keeper.flying:
        keeper.complete()
    keeper.drop_who_left()
    keeper.kv.check_unused()
    stats, counters = keeper.kv.stats(), keeper.scheduler.counters
    assert not keeper.known
    assert (stats.hit_tokens, stats.hit_tokens + stats.missed_tokens) == (keeper.found, keeper.admitted)
    assert keeper.found + keeper.computed + keeper.cut_off == keeper.admitted
    # All that may happen has happened.
    assert counters.preemptions > 0
    assert counters.aborted > 0
    assert keeper.cut_off > 0
    assert keeper.found > 0
    assert keeper.whole > 50
    missed = [request for request in keeper.requests if request.first_scheduled and request.miss is not None]
    assert len(missed) == stats.never_seen + stats.evicted + stats.diverged
    prompts = sum(request.num_prompt for request in keeper.requests if request.first_scheduled)
    assert prompts == counters.prompt_tokens
