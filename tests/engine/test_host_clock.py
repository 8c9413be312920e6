"""The loop's CPU time: work counts, waiting does not, in the engine's own stats too."""

from __future__ import annotations

import time

from firsttoken.engine.host_clock import HostClock


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_counts_work_between_resume_and_pause_only() -> None:
    clock = HostClock()
    clock.pause()  # before it ever ran: nothing
    assert clock.total_ns == 0
    clock.resume()
    burn(0.02)
    time.sleep(0.05)  # no CPU time
    clock.pause()
    assert 20e6 <= clock.total_ns < 40e6
    total = clock.total_ns
    burn(0.01)
    assert clock.total_ns == total
    clock.resume()
    burn(0.01)
    clock.pause()
    assert total + 10e6 <= clock.total_ns < total + 25e6


def test_a_share_is_of_the_time_since_it_was_asked_for_last() -> None:
    clock = HostClock()
    clock.resume()
    burn(0.01)
    clock.pause()
    assert clock.share() == 0
    began = time.monotonic()
    clock.resume()
    burn(0.02)
    clock.pause()
    burn(0.02)  # waiting for a device by looking again and again
    used = 0.02 / (time.monotonic() - began)
    assert 0.8 * used < clock.share() < 1.3 * used
