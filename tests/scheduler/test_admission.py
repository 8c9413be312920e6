"""Who is let in, on the real scheduler and cache, a device of constant speed, and a virtual clock."""

from __future__ import annotations

import timeit
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.core.clock import NS_PER_MS, NS_PER_S, clock_replaced
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import RowSample, StepResult
from firsttoken.core.request import EngineRequest, Request, Status
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ClassTargets, ServiceClass, Targets
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import Scheduler, SchedulerConfig, TokenCap
from firsttoken.scheduler.admission import Admission, Refusal
from firsttoken.scheduler.tenant_queue import TenantQueue

PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
P0, P1, P2 = ServiceClass


class Engine:
    """Serves at most 100 prompt tokens a step, which take 100 ms, and each step 1 ms more: 990 tokens/s."""

    def __init__(self, targets: Targets | None = None, *, rows: int = 8, blocks: int = 1 << 14) -> None:
        targets = targets or Targets()
        self.now = 1
        self.kv = KVCache(KVFormat(dtype="float32", layers=1, kv_heads=1, head_dim=1), blocks, model="m")
        config = SchedulerConfig(max_num_seqs=rows, max_model_len=100_000)
        self.scheduler = Scheduler(config, self.kv, TokenCap(100, 100), targets=targets)
        self.admission = Admission(targets, rows)
        self.backlog = self.admission.backlog
        self.requests: dict[int, Request] = {}
        self.arrived: dict[int, float] = {}
        self.ttft: dict[int, float] = {}

    @contextmanager
    def clock(self) -> Iterator[None]:
        with clock_replaced(lambda: self.now):
            yield

    @property
    def seconds(self) -> float:
        return self.now / NS_PER_S

    def ask(
        self, prompt: int, service: int = P2, output: int = 1, deadline_ms: float = 0.0, tenant: str = ""
    ) -> Refusal | None:
        number = len(self.arrived) + 1
        self.arrived[number] = self.seconds
        wire = EngineRequest(
            id=number,
            prompt=array("I", [number]).tobytes() * prompt,
            params=PARAMS,
            seed=0,
            max_tokens=output,
            service=service,
            tenant=tenant,
            deadline_ns=self.now + round(deadline_ms * NS_PER_MS) if deadline_ms else 0,
        )
        request = Request(wire)
        refusal = self.admission.decide(request)
        if refusal is None:
            self.scheduler.add(request)
            self.requests[number] = request
        return refusal

    def abort(self, number: int) -> None:
        request = self.scheduler.abort(number)
        if request is not None:
            self.backlog.ended(request)

    def step(self) -> bool:
        """False when there was nothing to do."""
        planned = self.scheduler.plan()
        for request in self.scheduler.expired():
            self.backlog.ended(request)
        if planned is None:
            return False
        work = self.backlog.planned(planned, self.scheduler.counters.preemptions)
        prompts = sum(row.count for row in planned.plan.work if row.count > 1 or not row.sample)
        took = (1 + prompts) * NS_PER_MS
        self.now += took
        samples = [RowSample(row.slot, 0) for row in planned.plan.work if row.sample]
        ends = 0
        for update in self.scheduler.complete(planned, StepResult(planned.plan.step_id, samples)):
            number = update.request.request_id
            self.ttft.setdefault(number, self.seconds - self.arrived[number])
            if update.finished:
                ends += 1
                self.backlog.ended(update.request)
        self.backlog.ran(work, took / NS_PER_S, ends)
        return True

    def run_until(self, seconds: float) -> None:
        until = round(seconds * NS_PER_S)
        while self.now < until:
            if not self.step():
                self.now = until

    def load(self, seconds: float, every_s: float, prompt: int, service: int = P2, output: int = 1) -> list[Refusal]:
        """A request every ``every_s`` for so long; whom it refused."""
        refused = []
        begun, sent = self.seconds, 0
        while sent * every_s < seconds:
            self.run_until(begun + sent * every_s)
            refusal = self.ask(prompt, service, output)
            sent += 1
            if refusal is not None:
                refused.append(refusal)
        return refused


@pytest.fixture
def engine() -> Iterator[type[Engine]]:
    with_clock: list[contextmanager] = []

    def make(*args: object, **options: object) -> Engine:
        made = Engine(*args, **options)
        with_clock.append(made.clock())
        with_clock[-1].__enter__()
        return made

    yield make
    for clock in with_clock:
        clock.__exit__(None, None, None)


def p2(**fields: object) -> Targets:
    return Targets(p2=ClassTargets(**fields))


# ---------------------------------------------------------------------- the queue's limit


def test_no_more_than_max_waiting_wait(engine):
    one = engine(p2(max_waiting=3), rows=1)
    assert one.ask(50, output=50) is None
    one.step()  # it runs, and the only row is taken
    assert [one.ask(50) for _ in range(3)] == [None] * 3
    refusal = one.ask(50)
    assert refusal.reason == "queue"
    assert "3 requests of class p2 wait" in refusal.message
    assert "3 requests of class p2 wait already, and a new one is let in while fewer than 3 do (max_waiting)" in (
        refusal.message
    )
    assert refusal.retry_after_s >= 1
    assert one.ask(50, P0) is None  # another class has its own queue
    one.abort(2)
    assert one.ask(50) is None


def test_those_that_are_about_to_start_are_told_apart_from_those_that_wait(engine):
    one = engine(p2(max_waiting=2), rows=3)
    refusals = [refusal for refusal in (one.ask(10) for _ in range(6)) if refusal is not None]
    assert len(refusals) == 1
    assert "2 requests of class p2 wait already beside 3 that are about to start, and" in refusals[0].message


def test_a_burst_that_the_free_rows_take_does_not_wait(engine):
    one = engine(p2(max_waiting=1), rows=4)
    assert [one.ask(10) for _ in range(5)] == [None] * 5  # four rows, and one may wait
    assert one.ask(10).reason == "queue"
    one.step()
    assert one.admission.refused[P2] == {"queue": 1, "ttft": 0, "deadline": 0}


def test_after_retry_after_there_is_room(engine):
    """Nobody else comes meanwhile."""
    one = engine(p2(max_waiting=20), rows=4)
    one.load(5, 0.05, 100)  # twice what it can do
    while (refusal := one.ask(100)) is None:
        pass
    one.run_until(one.seconds + refusal.retry_after_s)
    assert one.ask(100) is None


# ---------------------------------------------------------------------- tenants


def test_a_queue_that_is_full_of_one_tenant_has_room_for_others(engine):
    one = engine(p2(max_waiting=6), rows=1)
    one.ask(50, output=50, tenant="flood")
    one.step()
    assert [one.ask(50, tenant="flood") for _ in range(6)] == [None] * 6
    assert one.ask(50, tenant="flood").reason == "queue"
    assert [one.ask(50, tenant="calm") for _ in range(3)] == [None] * 3  # half of the places, of two
    assert one.ask(50, tenant="calm").reason == "queue"
    assert one.ask(50, tenant="third") is None
    for number in range(2, 8):
        one.abort(number)
    assert one.ask(50, tenant="flood") is None


def test_a_flood_of_one_tenant_does_not_turn_away_another(engine):
    """The flood alone misses the target; who sends little is served next, and let in."""
    one = engine(p2(ttft_p99=2000), rows=4)
    one.load(4, 0.05, 100)  # twice what it can do
    begun = one.seconds
    flood = calm = 0
    for turn in range(100):
        one.run_until(begun + 0.05 * turn)
        flood += one.ask(100, tenant="flood") is not None
        if turn % 20 == 0:
            calm += one.ask(100, tenant="calm") is not None
            number = len(one.arrived)
            one.run_until(one.seconds + 0.8)
            assert one.ttft.get(number, 9.0) < 0.8
    assert flood > 20
    assert calm == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), max_size=60))
def test_the_sums_of_tenants(changes):
    queue, waiting = TenantQueue(), []
    shares = {"a": 0.1, "b": 1.0, "c": 3.0}
    for tenant, tokens, leaves in changes:
        if leaves and waiting:
            queue.remove(*waiting.pop(tokens % len(waiting)))
        else:
            queue.add(tenant, shares[tenant], tokens)
            waiting.append((tenant, tokens))
        known = {name for name, _ in waiting}
        assert len(queue) == len(known)
        for name in shares:
            own = [tokens for other, tokens in waiting if other == name]
            ahead = queue.ahead_of(name)
            assert len(own) - 1e-6 <= ahead.requests <= len(waiting)
            assert sum(own) - 1e-6 <= ahead.tokens <= sum(tokens for _, tokens in waiting)
            if known == {name}:
                assert ahead == (len(waiting), sum(own)), "alone, all that waits goes before"
        if known:
            assert any(not queue.has_less_than_its_part(name, len(waiting)) for name in known)


# ---------------------------------------------------------------------- predictions


def test_who_would_miss_the_target_by_far_is_turned_away_and_the_others_keep_near_it(engine):
    one = engine(p2(ttft_p99=2000))
    refused = one.load(60, 0.05, 100)  # 2,000 tokens/s offered, 990 can be done
    one.run_until(one.seconds + 10)
    assert {refusal.reason for refusal in refused} == {"ttft"}
    assert len(refused) == pytest.approx(600, rel=0.1)
    assert "2 s (ttft_p99)" in refused[-1].message
    assert 1 <= refused[-1].retry_after_s <= 3
    served = list(one.ttft.values())
    assert len(served) + len(refused) == 1200
    assert max(served) < 1.5 * 2 * 1.15
    # It was never idle for want of whom it turned away.
    assert len(served) * 101 > 0.95 * 62_000


def test_a_load_that_it_can_bear_is_never_refused(engine):
    one = engine(p2(ttft_p99=500))
    assert one.load(60, 0.12, 100) == []
    assert max(one.ttft.values()) < 0.5


def test_nothing_is_refused_before_anything_was_measured(engine):
    one = engine(p2(ttft_p99=100))
    assert [one.ask(500) for _ in range(20)] == [None] * 20


def test_nothing_is_refused_while_nothing_goes_before(engine):
    """However slow it was once: or nobody would ever be let in to find out that it is faster now."""
    one = engine(p2(ttft_p99=100))
    one.load(10, 0.5, 1000)
    one.run_until(one.seconds + 30)
    assert one.ask(5000) is None
    one.run_until(one.seconds + 30)
    assert one.ask(5000) is None


def test_a_step_that_took_seconds_is_no_measure(engine):
    """Kernels are compiled in it."""
    one = engine(p2(ttft_p99=3000))
    one.load(4, 0.2, 100)
    work = one.backlog.planned
    one.ask(1000)
    planned = one.scheduler.plan()
    work = work(planned, 0)
    samples = [RowSample(row.slot, 0) for row in planned.plan.work if row.sample]
    for update in one.scheduler.complete(planned, StepResult(planned.plan.step_id, samples)):
        one.backlog.ended(update.request)
    one.backlog.ran(work, 20.0, 0)
    assert one.backlog.tokens_per_s > 500
    assert one.ask(100) is None


def test_a_class_with_max_queue_is_never_refused_by_a_prediction(engine):
    targets = Targets(p0=ClassTargets(max_queue=10, ttft_p99=50), p2=ClassTargets(ttft_p99=1000))
    one = engine(targets)
    assert one.load(20, 0.05, 100, P0) == []
    assert one.ask(10, P2).reason == "ttft"


def test_better_classes_go_before_and_worse_ones_do_not(engine):
    one = engine(Targets(p1=ClassTargets(ttft_p99=1000), p2=ClassTargets(ttft_p99=1000)), rows=64)
    one.load(5, 0.04, 100, P2)
    assert one.ask(100, P2) is not None
    assert one.ask(100, P1) is None


def test_rows_are_waited_for_too(engine):
    """Prompts are no work here, but each request holds its row for 101 steps of 1 ms."""
    one = engine(p2(ttft_p99=500), rows=2)
    refused = one.load(20, 0.02, 2, output=100)
    one.run_until(one.seconds + 5)
    assert {refusal.reason for refusal in refused} == {"ttft"}
    assert 0.5 < max(one.ttft.values()) < 0.5 * 1.5 * 1.25


def test_that_nobody_ended_for_long_does_not_put_the_next_end_off_for_ever(engine):
    one = engine(rows=2)
    one.load(2, 0.05, 2, output=10)
    for _ in range(3):
        one.ask(2, output=60_000)
    one.run_until(one.seconds + 55)
    assert 10 < one.admission.headroom.wait(P2, one.now).seconds < 25  # two are to end, and one of two has in 10 s


def test_cached_prompts_count_for_what_they_take(engine):
    """A prompt that is found in the cache is owed, and done, at once: the rate is of prompts as they come."""
    one = engine(p2(ttft_p99=1000))
    for number in range(400):
        if number == 1:
            one.run_until(5)
        number = len(one.arrived) + 1
        one.arrived[number] = one.seconds
        wire = EngineRequest(
            id=number, prompt=array("I", range(1, 1001)).tobytes() + array("I", [number] * 10).tobytes(),
            params=PARAMS, seed=0, max_tokens=1,
        )  # fmt: skip
        request = Request(wire)
        assert one.admission.decide(request) is None
        one.scheduler.add(request)
        one.run_until(one.seconds + 0.04)


# ---------------------------------------------------------------------- deadlines


def test_a_deadline_that_has_passed_is_refused_for_good(engine):
    one = engine()
    one.now = 10 * NS_PER_MS
    refusal = one.ask(10, deadline_ms=-5)
    assert (refusal.reason, refusal.late) == ("deadline", True)
    assert refusal.message.startswith("deadline exceeded: it passed 5.000 ms before")


def test_a_deadline_that_cannot_be_met_by_far_is_refused(engine):
    one = engine()
    one.load(5, 0.05, 100)  # 5 s of prompts are owed
    refusal = one.ask(10, deadline_ms=200)
    assert (refusal.reason, refusal.late) == ("deadline", False)
    assert 4 <= refusal.retry_after_s <= 6
    assert one.ask(10, deadline_ms=4000) is None


# ---------------------------------------------------------------------- the autoscaler's gauge


def outlook(one: Engine, service: int = P2):
    return one.admission.headroom.outlook(service, one.now)


def test_constant_overload_counts_down_to_the_moment_of_the_first_miss(engine):
    one = engine(p2(ttft_p99=10_000), rows=64)
    told: list[tuple[float, float]] = []
    missed_at = None
    for _ in range(40):
        one.load(0.5, 1 / 16, 100)  # 1,600 tokens/s of 990: waits grow by 0.6 s each second
        told.append((one.seconds, outlook(one).until_missed_s))
        if missed_at is None and told[-1][1] == 0:
            missed_at = one.seconds
    one.run_until(one.seconds + 30)
    first_late = min(one.arrived[number] for number, ttft in one.ttft.items() if ttft > 10)
    assert missed_at == pytest.approx(first_late, abs=2)
    for at, until in told:
        if 5 < at < missed_at - 1:
            assert until == pytest.approx(first_late - at, rel=0.25, abs=1), f"told {until} s at {at} s"


def test_a_load_that_it_can_bear_never_misses(engine):
    one = engine(p2(ttft_p99=1000), rows=64)
    for _ in range(10):
        one.ask(200)  # a burst
    one.run_until(one.seconds + 10)
    one.load(20, 0.12, 100)
    assert outlook(one).until_missed_s == inf


def test_the_gauge_is_0_while_the_target_is_missed_and_recovers(engine):
    one = engine(p2(ttft_p99=500), rows=64)
    for _ in range(20):
        one.ask(200)
    one.run_until(one.seconds + 1)
    found = outlook(one)
    assert found.until_missed_s == 0
    assert found.ttft_s > 2
    one.run_until(one.seconds + 10)
    assert outlook(one).until_missed_s == inf
    assert outlook(one).ttft_s < 0.5


def test_a_class_without_a_target_has_no_gauge(engine):
    one = engine()
    one.load(2, 0.05, 100)
    found = outlook(one)
    assert found.until_missed_s is None
    assert found.ttft_s > 0


def test_an_idle_engine_predicts_next_to_nothing(engine):
    one = engine(Targets(p0=ClassTargets(ttft_p99=80), p2=ClassTargets(ttft_p99=80)))
    assert outlook(one) == (0.0, inf)
    one.ask(10)
    one.run_until(60)
    assert outlook(one) == (0.0, inf)


# ---------------------------------------------------------------------- the sums


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 300), st.sampled_from(ServiceClass), st.integers(1, 40)),
    st.tuples(st.just("abort"), st.integers(1, 40)),
    st.tuples(st.just("step")),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(ACTIONS, max_size=80))
def test_the_sums_are_those_of_the_requests(actions):
    one = Engine(rows=3, blocks=24)
    with one.clock():
        for action, *arguments in actions:
            if action == "ask":
                prompt, service, output = arguments
                output = min(output, 24 * 16 + 1 - prompt)
                one.ask(prompt, service, output)
            elif action == "abort":
                one.abort(*arguments)
            else:
                one.step()
                check_sums(one)
        while one.step():
            check_sums(one)
    assert one.backlog.waiting == one.backlog.running == [0, 0, 0]
    assert one.backlog.waiting_tokens == one.backlog.running_tokens == [0, 0, 0]


def check_sums(one: Engine) -> None:
    live = [one.scheduler.get(number) for number in one.requests]
    for service in ServiceClass:
        mine = [request for request in live if request is not None and request.service == service]
        waiting = [request for request in mine if request.status is Status.WAITING]
        running = [request for request in mine if request.status is Status.RUNNING]
        assert one.backlog.waiting[service] == len(waiting)
        assert one.backlog.running[service] == len(running)
        left = [max(r.num_tokens - r.num_computed, 0) for r in running]
        ones = left.count(1)  # the last token of a prompt, or one to decode
        assert sum(left) - ones <= one.backlog.running_tokens[service] <= sum(left)


def test_a_decision_is_cheap_whatever_waits(engine):
    one = engine(Targets(p2=ClassTargets(ttft_p99=10**9, max_waiting=10**6)), rows=64)
    one.load(3, 0.01, 100)
    for _ in range(10_000):
        one.ask(100)
    wire = EngineRequest(id=0, prompt=bytes(400), params=PARAMS, seed=0, max_tokens=9, deadline_ns=10**15)
    requests = iter([Request(wire) for _ in range(3000)])

    def decide() -> None:
        assert one.admission.decide(next(requests)) is None

    assert min(timeit.repeat(decide, number=100, repeat=20)) / 100 < 50e-6
