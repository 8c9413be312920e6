"""The engine's thread keeps to one processor, and only it."""

from __future__ import annotations

import os
import threading

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.engine.affinity import _ranges, check_core, keep_to

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinities")


def test_one_thread_keeps_to_a_core_and_others_do_not():
    before = os.sched_getaffinity(0)
    core = max(before)
    check_core(core)
    found = []

    def work() -> None:
        keep_to(core)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [{core}]
    assert os.sched_getaffinity(0) == before


def test_a_core_that_may_not_be_used_is_refused(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    with pytest.raises(ConfigError, match=r"may be used \(0-2, 5\), got 4"):
        check_core(4)


def test_ranges_are_short():
    assert _ranges({7}) == "7"
    assert _ranges({3, 1, 2, 8, 9, 11}) == "1-3, 8-9, 11"
