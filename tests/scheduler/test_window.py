"""The batch windows: when each of them lets waiting requests go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.core.clock import NS_PER_MS, NS_PER_S
from firsttoken.core.errors import ConfigError
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ClassTargets, ServiceClass, Targets
from firsttoken.core.timeline import Mark
from firsttoken.scheduler.step_time import StepLoad
from firsttoken.scheduler.window import (
    AdaptiveWindow,
    BatchWindow,
    Hold,
    PredictedWindow,
    StaticWindow,
    find_window,
)

IDLE = StepLoad(0, 0, 0, 0)
BUSY = StepLoad(4, 400, 0, 0)
LIMIT = 30
PROMISED = Targets(p2=ClassTargets(ttft_p99=100.0))


def ms(value: float) -> int:
    return round(value * NS_PER_MS)


def tell(window: BatchWindow, *, p95: float, waiting: int, times: int = 1, began_s: float = 10.0) -> None:
    """First tokens after ``p95`` ms each, so far apart that the window may move at every one."""
    for number in range(times):
        window.first_token(round((began_s + number) * NS_PER_S), p95, waiting)


class Linear:
    """``least`` ms whatever is computed, 1 ms more for each 100 prompt tokens."""

    def __init__(self, least: float) -> None:
        self.least = least

    def ms(self, load: StepLoad) -> float:
        return self.least + load.prefill_tokens / 100


# ---------------------------------------------------------------- by name


def test_windows_by_name() -> None:
    def find(name: str, targets: Targets = PROMISED) -> object:
        return find_window(name, targets, queue_limit=8, step_time=Linear(10))

    assert find("0") is None
    assert find("0ms") is None
    for text in ("2.5", "2ms", "500us", "1s"):
        assert isinstance(find(text), StaticWindow)
    assert isinstance(find("adaptive"), AdaptiveWindow)
    assert isinstance(find("predicted"), PredictedWindow)
    for text in ("wide", "", "-1", "nan", "inf", "2 h", "1e3", "ms", "2."):
        with pytest.raises(ConfigError, match=f"'{text}' is no batch window: give a time as in 2ms, adaptive or pred"):
            find(text)
    with pytest.raises(ConfigError, match="state one"):
        find("adaptive", Targets())
    with pytest.raises(ConfigError, match="at most 1000 ms, got 1001 ms"):
        find("1001")


# ---------------------------------------------------------------- the specified rule


def grown(times: int = 20) -> AdaptiveWindow:
    window = AdaptiveWindow(100, LIMIT)
    tell(window, p95=50, waiting=LIMIT, times=times)
    return window


def test_it_begins_with_nothing_held() -> None:
    window = AdaptiveWindow(100, LIMIT)
    window.arrived(0, 64)
    assert window.hold_until_ns(5, 0, 1, BUSY) == 5


def test_a_deep_queue_with_time_to_spare_grows_it_by_half() -> None:
    window = AdaptiveWindow(100, LIMIT)
    tell(window, p95=89, waiting=25)
    assert window.ms == pytest.approx(1.5)
    tell(window, p95=89, waiting=25, began_s=11)
    assert window.ms == pytest.approx(1.5**2)


def test_late_first_tokens_with_a_short_queue_shrink_it_to_four_fifths() -> None:
    window = grown()
    before = window.ms
    tell(window, p95=121, waiting=9, began_s=100)
    assert window.ms == pytest.approx(0.8 * before)


@pytest.mark.parametrize(
    ("p95", "waiting"),
    [
        (121, 10),  # late, but the queue is a third of its limit: to go sooner would not help
        (119, 0),  # not late enough
        (91, 30),  # deep, but hardly earlier than the target
        (50, 24),  # early, but 80 % and no more
        (50, 0),
        (500, 30),  # late and deep: neither
    ],
)
def test_between_the_thresholds_it_stays(p95: float, waiting: int) -> None:
    window = grown()
    tell(window, p95=50, waiting=0, began_s=100)
    before = window.ms
    tell(window, p95=p95, waiting=waiting, began_s=110)
    assert window.ms == before


def test_a_busy_host_keeps_it_from_shrinking_and_lets_it_grow() -> None:
    window = AdaptiveWindow(100, LIMIT, cpu_share=lambda: 0.95)
    tell(window, p95=50, waiting=0)
    assert window.ms == pytest.approx(1.5)
    tell(window, p95=500, waiting=0, began_s=100)
    assert window.ms == pytest.approx(1.5)


def test_it_moves_every_tenth_of_a_second_at_most() -> None:
    window = AdaptiveWindow(100, LIMIT)
    for number in range(50):
        window.first_token(NS_PER_S + ms(number), 50, LIMIT)
    assert window.ms == pytest.approx(1.5)


def test_a_p95_ignores_the_slowest_and_what_is_long_ago() -> None:
    window = AdaptiveWindow(100, LIMIT)
    window.first_token(0, 5000, 0)
    for number in range(40):
        window.first_token(6 * NS_PER_S + number, 50 if number else 5000, LIMIT)
    window.first_token(6 * NS_PER_S + ms(100), 50, LIMIT)
    assert window.ms == pytest.approx(1.5)


@given(st.lists(st.tuples(st.floats(0.1, 1e5), st.integers(0, 100), st.booleans()), max_size=200))
def test_it_stays_within_its_bounds(news: list[tuple[float, int, bool]]) -> None:
    busy = False
    window = AdaptiveWindow(100, LIMIT, low_ms=2, high_ms=40, cpu_share=lambda: float(busy))
    now = 0
    for took, waiting, busy in news:  # noqa: B007  # read by the window
        now += ms(101)
        window.first_token(now, took, waiting)
        assert 2 <= window.ms <= 40
        assert now <= max(now, window.hold_until_ns(now, now, waiting, BUSY)) <= now + ms(40)


def test_after_idle_the_first_burst_is_answered_at_once() -> None:
    window = grown()
    busy = 31 * NS_PER_S
    assert window.hold_until_ns(busy, busy, 4, BUSY) == busy + ms(50)
    later = 40 * NS_PER_S
    window.arrived(later, 64)
    assert window.ms == 1
    for number in range(31):
        window.arrived(later + number, 64)
        assert window.hold_until_ns(later + number, later, 2 + number, IDLE) <= later + number


@pytest.mark.parametrize(
    ("target", "limit", "bounds"), [(0, 1, (1, 2)), (1, 0, (1, 2)), (1, 1, (0, 2)), (1, 1, (2, 2)), (1, 1, (3, 2))]
)
def test_an_adaptive_window_that_makes_no_sense_is_refused(
    target: float, limit: int, bounds: tuple[float, float]
) -> None:
    with pytest.raises(ConfigError, match="adaptive window"):
        AdaptiveWindow(target, limit, low_ms=bounds[0], high_ms=bounds[1])


# ---------------------------------------------------------------- the model's


def told(least: float, gap_ms: float, tokens: int = 100) -> PredictedWindow:
    window = PredictedWindow(Linear(least))
    for number in range(100):
        window.arrived(round(number * gap_ms * NS_PER_MS), tokens)
    return window


def test_nothing_is_held_where_steps_cost_what_their_tokens_do() -> None:
    assert told(0, 1).hold_until_ns(7, 0, 1, IDLE) == 7


def test_it_waits_for_one_that_comes_sooner_than_its_own_step_would_cost() -> None:
    window = told(10, gap_ms=4)
    assert window.hold_until_ns(7, 0, 1, IDLE) == ms(10)
    # Two wait 4 ms each for what saves 10; three would wait 12 together.
    assert window.hold_until_ns(7, 0, 2, IDLE) == ms(10)
    assert window.hold_until_ns(7, 0, 3, IDLE) == 7


def test_rows_that_decode_pay_for_the_step_already() -> None:
    assert told(10, gap_ms=4).hold_until_ns(7, 0, 1, BUSY) == 7


def test_it_never_waits_longer_than_it_saves() -> None:
    window = told(10, gap_ms=4)
    assert window.hold_until_ns(ms(12), ms(1), 1, IDLE) == ms(11) < ms(12)


def test_without_news_of_arrivals_nothing_is_held() -> None:
    window = PredictedWindow(Linear(10))
    window.arrived(0, 64)
    assert window.hold_until_ns(0, 0, 1, IDLE) == 0


# ---------------------------------------------------------------- holding


def request(number: int, at_ms: float, service: ServiceClass = ServiceClass.P2, *, deadline_ms: float = 0) -> Request:
    wire = EngineRequest(
        id=number,
        prompt=b"\1\0\0\0" * 8,
        params=SamplingParams(),
        seed=0,
        max_tokens=4,
        service=service,
        deadline_ns=ms(deadline_ms),
    )
    made = Request(wire)
    made.timeline.marks, made.timeline.times = [int(Mark.ARRIVED)], [ms(at_ms)]
    return made


def test_a_hold_lasts_from_the_first_of_an_empty_queue() -> None:
    hold = Hold(StaticWindow(20), Targets())
    hold.arrived(request(0, 5), queue_was_empty=True)
    hold.arrived(request(1, 15), queue_was_empty=False)
    assert hold.keeps(ms(24.9), 2, IDLE)
    assert hold.wake_ns == ms(25)
    assert not hold.keeps(ms(25), 2, IDLE)
    assert hold.wake_ns == 0


def test_who_joins_those_that_were_let_go_is_not_held() -> None:
    hold = Hold(StaticWindow(20), Targets())
    hold.arrived(request(0, 0), queue_was_empty=True)
    assert not hold.keeps(ms(20), 1, IDLE)
    hold.arrived(request(1, 21), queue_was_empty=False)
    assert not hold.holding
    hold.arrived(request(2, 40), queue_was_empty=True)
    assert hold.keeps(ms(41), 1, IDLE)


def test_a_class_with_max_queue_ends_the_hold_of_all_at_once() -> None:
    hold = Hold(StaticWindow(50), Targets(p0=ClassTargets(max_queue=10)))
    hold.arrived(request(0, 0), queue_was_empty=True)
    assert hold.keeps(ms(30), 1, IDLE)
    hold.arrived(request(1, 30, ServiceClass.P0), queue_was_empty=False)
    assert not hold.keeps(ms(30), 2, IDLE)
    hold.arrived(request(2, 60, ServiceClass.P0), queue_was_empty=True)
    assert not hold.keeps(ms(60), 1, IDLE)


@pytest.mark.parametrize("first", [True, False])
def test_no_hold_takes_more_than_half_of_what_is_left_to_a_deadline(first: bool) -> None:
    hold = Hold(StaticWindow(50), Targets())
    if not first:
        hold.arrived(request(0, 0), queue_was_empty=True)
    hold.arrived(request(1, 4, deadline_ms=24), queue_was_empty=first)
    assert hold.keeps(ms(13.9), 1, IDLE)
    assert hold.wake_ns == ms(14)
    hold.arrived(request(2, 5, deadline_ms=3), queue_was_empty=False)
    assert not hold.keeps(ms(5), 2, IDLE)


def test_no_hold_takes_more_than_half_of_starts_within() -> None:
    hold = Hold(StaticWindow(50), Targets(p2=ClassTargets(starts_within=30)))
    hold.arrived(request(0, 5), queue_was_empty=True)
    assert hold.keeps(ms(6), 1, IDLE)
    assert hold.wake_ns == ms(20)


def test_a_hold_ends_with_the_last_that_waits() -> None:
    hold = Hold(StaticWindow(50), Targets())
    hold.arrived(request(0, 0), queue_was_empty=True)
    assert hold.keeps(ms(1), 1, IDLE)
    assert not hold.keeps(ms(2), 0, IDLE)
    assert hold.wake_ns == 0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1000.5])
def test_a_static_window_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="batch window must be 0 ms or more"):
        StaticWindow(value)
