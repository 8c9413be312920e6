"""Busy, stuck, idle and dead are told apart."""

import pytest

from firsttoken.observability.health import Progress
from firsttoken.transport.messages import EngineStats

S = 1_000_000_000


@pytest.fixture
def progress():
    return Progress(1000 * S, stuck_after_s=10, dead_after_s=60)


def stats(at, *, running=0, waiting=0, step=0):
    return EngineStats(running=running, waiting=waiting, heartbeat_ns=at * S, last_step_ns=step * S)


def test_idle_from_ready_on(progress):
    health = progress.check(1001 * S)
    assert (health.state, health.heartbeat_age_ms, health.step_age_ms) == ("idle", 1000, None)


def test_busy_while_steps_end(progress):
    progress.update(stats(1005, running=3, waiting=2, step=1004))
    health = progress.check(1013 * S)
    assert (health.state, health.running, health.waiting) == ("busy", 3, 2)
    assert (health.heartbeat_age_ms, health.step_age_ms) == (8000, 9000)


def test_stuck_when_no_step_ends_though_the_loop_turns(progress):
    progress.update(stats(1005, running=1, step=1004))
    progress.update(stats(1016, running=1, step=1004))
    assert progress.check(1016 * S).state == "stuck"
    progress.update(stats(1017, running=1, step=1017))
    assert progress.check(1017 * S).state == "busy"


def test_a_dead_engine_runs_nothing(progress):
    progress.update(stats(1005, running=3, waiting=2, step=1004))
    progress.gone()
    health = progress.check(1006 * S)
    assert (health.state, health.running, health.waiting) == ("dead", 0, 0)


def test_waiting_requests_alone_are_work(progress):
    progress.update(stats(1005, waiting=1, step=1004))
    progress.update(stats(1020, waiting=1, step=1004))
    assert progress.check(1020 * S).state == "stuck"


def test_a_request_after_a_long_idle_time_is_not_stuck_at_once(progress):
    progress.update(stats(5000, step=1001))
    progress.submitted(5000 * S)
    assert progress.check(5005 * S).state == "busy"
    progress.update(stats(5006, running=1, step=1001))
    assert progress.check(5009 * S).state == "busy"
    assert progress.check(5011 * S).state == "stuck"


def test_a_submission_that_is_never_answered_is_stuck(progress):
    progress.submitted(1001 * S)
    assert progress.check(1012 * S).state == "stuck"


def test_a_heartbeat_from_before_the_submission_does_not_end_the_work(progress):
    progress.submitted(1002 * S)
    progress.update(stats(1001))
    assert progress.check(1011 * S).state == "busy"
    progress.update(stats(1003))
    assert progress.check(1011 * S).state == "idle"


def test_idle_again_when_all_are_gone(progress):
    progress.update(stats(1005, running=20, step=1005))
    progress.update(stats(1006, step=1005))
    assert progress.check(1007 * S).state == "idle"


def test_a_silent_idle_loop_is_stuck_then_dead(progress):
    assert progress.check(1011 * S).state == "stuck"
    assert progress.check(1061 * S).state == "dead"


def test_gone_is_dead_at_once(progress):
    progress.update(stats(1005, running=1, step=1005))
    progress.gone()
    assert progress.check(1005 * S).state == "dead"


def test_limits_are_checked():
    with pytest.raises(ValueError, match="5 and 1"):
        Progress(0, stuck_after_s=5, dead_after_s=1)
