"""What each line of a targets file changes, as those see it who send requests to an engine."""

from __future__ import annotations

import time

import pytest

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.targets_file import read_targets
from firsttoken.core.timeline import Mark
from firsttoken.transport.messages import Refused
from tests.support.scripted_engine import ask, count_up

pytestmark = pytest.mark.clock


@pytest.fixture
def promise(start, tmp_path):
    """Starts an engine for the lines of a targets file."""

    def make(text, **options):
        file = tmp_path / "targets.toml"
        file.write_text(text)
        return start(count_up, targets=read_targets(file), **options)

    return make


def waited_ms(last):
    times = {}
    for mark, ns in last.stamps:
        times.setdefault(mark, ns)
    return (times[Mark.SCHEDULED] - times[Mark.ARRIVED]) / NS_PER_MS


def until(true):
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("ms", [40, 400])
def test_max_queue_is_how_long_kv_is_not_taken_from_worse_ones(promise, ms):
    engine = promise(f'[class.p0]\nmax_queue = "{ms}ms"\n', blocks=12, step_s=0.015)
    engine.submit(ask(1, range(120), max_tokens=60))
    until(lambda: engine.executor.plans)
    engine.submit(ask(2, range(1000, 1070), max_tokens=2, service=0))
    tokens, last, stats = engine.collect([1, 2])
    assert ms <= waited_ms(last[2]) < ms + 300
    assert last[2].stamps[-1][1] < last[1].stamps[-1][1], "it need not wait for the end of the other"
    assert stats.preemptions == last[1].preemptions == 1
    assert tokens[1] == list(range(120, 180))


@pytest.mark.parametrize(("bound", "passed"), [("300ms", True), ("60s", False)])
def test_starts_within_is_when_a_worse_one_starts_whatever_better_ones_send(promise, bound, passed):
    engine = promise(f'[class.p2]\nstarts_within = "{bound}"\n', seqs=1, step_s=0.005)
    better = [ask(i, [i], max_tokens=5, service=0) for i in range(40)]
    engine.submit(*better, ask(99, [7], max_tokens=1))
    _, last, _ = engine.collect([*range(40), 99])
    started = {i: dict(last[i].stamps)[Mark.SCHEDULED] for i in last}
    assert (started[99] < max(started[i] for i in range(40))) == passed
    assert waited_ms(last[99]) >= (150 if passed else 900)


@pytest.mark.parametrize(("weights", "floors"), [((2, 1), (4, 3)), ((1, 6), (1, 6))])
def test_weights_divide_what_better_prompts_leave(promise, weights, floors):
    text = f"[class.p1]\nweight = {weights[0]}\n[class.p2]\nweight = {weights[1]}\n"
    engine = promise(text, blocks=100, max_len=1000, step_s=0.03)
    slots = {}

    def begun():
        for plan in engine.executor.plans:
            slots.update({start.request_id: start.slot for start in plan.starts})
        return len(slots)

    for service in (2, 1, 0):
        engine.submit(ask(service, range(1000 * service, 1000 * service + 400), max_tokens=1, service=service))
        until(lambda count=3 - service: begun() == count)
    engine.collect([0, 1, 2])
    contended = next(plan for plan in engine.executor.plans if len(plan.work) == 3)
    counts = {work.slot: work.count for work in contended.work}
    assert (counts[slots[1]], counts[slots[2]]) == floors
    assert counts[slots[0]] == 64 - sum(floors)


@pytest.mark.parametrize("most", [2, 5])
def test_no_more_than_max_waiting_wait(promise, most):
    engine = promise(f"[class.p2]\nmax_waiting = {most}\n", seqs=1, step_s=0.005)
    engine.submit(ask(0, [5], max_tokens=100))
    until(lambda: engine.executor.plans)
    engine.submit(*(ask(i, [5], max_tokens=1) for i in range(1, 9)))
    engine.submit(*(ask(i, [5], max_tokens=1, service=1) for i in range(11, 19)))
    _, last, _ = engine.collect([*range(9), *range(11, 19)])
    refused = [i for i, end in last.items() if isinstance(end, Refused)]
    assert sorted(refused) == list(range(1 + most, 9)), "another class has a queue of its own"
    assert all(last[i].code == "overloaded" and last[i].retry_after_s >= 1 for i in refused)
