"""The batch window in the loop: who is held starts when the window ends, though nothing else happens."""

from __future__ import annotations

import time

import pytest

from firsttoken import LLM, SamplingParams
from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ClassTargets, Targets
from firsttoken.core.timeline import Mark
from firsttoken.transport.messages import Abort
from tests.support.scripted_engine import ask, count_up

pytestmark = pytest.mark.clock

TINY = {"max_model_len": 128, "threads": 1, "quantization": "none", "dtype": "float32"}
PROMISED = Targets(p2=ClassTargets(ttft_p99=100.0))


def waited_ms(last):
    times = dict(last.stamps)
    return (times[Mark.SCHEDULED] - times[Mark.ARRIVED]) / NS_PER_MS


def started(engine):
    """Ids by the steps in which somebody started."""
    return [{start.request_id for start in plan.starts} for plan in engine.executor.plans if plan.starts]


def test_who_is_held_starts_when_the_window_ends_and_the_loop_sleeps_till_then(start, depth):
    engine = start(count_up, depth=depth, batch_window="600ms")
    engine.submit(ask(1, [5], max_tokens=3))
    tokens, last, stats = engine.collect([1])
    assert tokens[1] == [6, 7, 8]
    assert 600 <= waited_ms(last[1]) < 1500
    assert stats.host_ns < 200 * NS_PER_MS, "the loop was busy with waiting"
    assert stats.host_ns == engine.config.host.total_ns, "an adaptive window hears of the loop's own work"


def test_who_comes_meanwhile_joins_the_step(start):
    engine = start(count_up, batch_window="400ms")
    engine.submit(ask(1, [5]))
    time.sleep(0.05)
    engine.submit(ask(2, [7]), ask(3, [9]))
    _, last, _ = engine.collect([1, 2, 3])
    assert started(engine) == [{1, 2, 3}]
    assert waited_ms(last[2]) < waited_ms(last[1]) - 30


def test_a_class_with_max_queue_goes_at_once_and_takes_the_others_along(start):
    engine = start(count_up, batch_window="1s")
    engine.submit(ask(1, [5]))
    time.sleep(0.05)
    engine.submit(ask(2, [7], service=0))
    _, last, _ = engine.collect([1, 2])
    assert started(engine) == [{1, 2}]
    assert waited_ms(last[2]) < 500


def test_a_window_makes_nobody_miss_a_deadline(start):
    engine = start(count_up, batch_window="1s")
    engine.submit(ask(1, [5], deadline_ns=now_ns() + 400 * NS_PER_MS))
    _, last, _ = engine.collect([1])
    assert last[1].finish_reason == "length"
    assert 100 < waited_ms(last[1]) < 400


def test_others_go_on_while_somebody_is_held(start, depth):
    engine = start(count_up, depth=depth, step_s=0.005, batch_window="150ms")
    engine.submit(ask(1, [5], max_tokens=200))
    while not engine.executor.plans:
        time.sleep(0.002)
    engine.submit(ask(2, [7]))
    tokens, last, _ = engine.collect([1, 2])
    assert waited_ms(last[2]) >= 150
    assert tokens[1] == list(range(6, 206))
    numbers = [number for number, plan in enumerate(engine.executor.plans) if plan.starts]
    assert numbers[1] - numbers[0] > 5


def test_who_is_held_can_leave_and_the_next_is_held_anew(start):
    engine = start(count_up, batch_window="300ms")
    engine.submit(ask(1, [5]))
    engine.client.send(Abort([1]))
    _, last, stats = engine.collect([1])
    assert (last[1].finish_reason, stats.waiting, engine.executor.plans) == ("abort", 0, [])
    engine.submit(ask(2, [7]))
    _, last, _ = engine.collect([2])
    assert waited_ms(last[2]) >= 300


@pytest.mark.parametrize("window", ["adaptive", "predicted"])
def test_the_rules_hold_nobody_on_an_idle_engine(start, window):
    engine = start(count_up, batch_window=window, targets=PROMISED)
    for number in range(3):
        engine.submit(ask(number, [5]))
        _, last, _ = engine.collect([number])
        assert waited_ms(last[number]) < 300


def test_a_real_engine_holds_by_its_option():
    with LLM("random:tiny-llama", batch_window="200ms", **TINY) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        outputs = llm.generate([[1, 2], [3]], params)
        assert all(200 <= output.metrics["queue_ms"] < 1200 for output in outputs)
        real_time = llm.generate([[4]], params, service_class="p0")[0]
        assert real_time.metrics["queue_ms"] < 150


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ("wide", "batch_window: 'wide' is no batch window: give a time as in 2ms, adaptive or predicted"),
        ("2s", "batch_window: a batch window must be 0 ms or more and at most 1000 ms, got 2000 ms"),
        ("adaptive", r"batch_window: the adaptive window follows a target for the first token \(ttft_p99\): state one"),
    ],
)
def test_a_window_that_makes_no_sense_is_refused_by_its_name(window, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        LLM("random:tiny-llama", batch_window=window, **TINY)
