"""The number of compute threads follows what other programs leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from firsttoken.executor.threads import INTERVAL_NS, CPUTimes, ThreadGovernor, read_cpu_times


class Load:
    """A machine of ``cores`` cores on which others use ``others`` of them and we ``own``."""

    def __init__(self, cores, others=0.0, own=0.0):
        self.cores, self.others, self.own = frozenset(range(cores)), others, own
        self.busy_s = self.own_s = 0.0
        self.ns = 10 * INTERVAL_NS

    def pass_time(self, intervals=1.0):
        self.ns += int(intervals * INTERVAL_NS)
        seconds = intervals * INTERVAL_NS / 1e9
        self.own_s += self.own * seconds
        self.busy_s += (self.own + self.others) * seconds

    def read(self, cores):
        assert cores == self.cores
        return CPUTimes(self.busy_s, self.own_s)


def governor_of(load, most=None):
    return ThreadGovernor(most or len(load.cores), load.cores, load.read)


def after(load, governor, intervals=2):
    governor.choose(load.ns)
    for _ in range(intervals):
        load.pass_time()
        threads = governor.choose(load.ns)
    return threads


@pytest.mark.parametrize(
    ("cores", "others", "threads"),
    [
        (2, 0.0, 2),
        (2, 0.2, 2),
        (2, 0.5, 1),
        (2, 1.0, 1),
        (2, 2.0, 1),
        (8, 0.2, 8),
        (8, 3.0, 5),
        (8, 20.0, 1),
        (1, 1.0, 1),
    ],
)
def test_others_keep_the_cores_they_use(cores, others, threads):
    load = Load(cores, others, own=min(cores, 1.5))
    assert after(load, governor_of(load)) == threads


def test_it_comes_back_when_the_others_leave():
    load = Load(2, others=1.0, own=1.0)
    governor = governor_of(load)
    assert after(load, governor) == 1
    load.others = 0.0
    assert after(load, governor) == 2


def test_never_more_than_was_asked_for():
    load = Load(8)
    assert after(load, governor_of(load, most=3)) == 3


def test_a_pause_says_nothing_about_now():
    load = Load(2, others=2.0)
    governor = governor_of(load)
    governor.choose(load.ns)
    load.pass_time(intervals=20)
    assert governor.choose(load.ns) == 2
    load.pass_time()
    assert governor.choose(load.ns) == 1


def test_without_the_kernels_figures_all_threads_are_used():
    governor = ThreadGovernor(4, frozenset(range(4)), lambda cores: None)
    assert [governor.choose(i * INTERVAL_NS) for i in range(1, 4)] == [4, 4, 4]


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs Linux")
def test_the_kernels_figures_see_another_program():
    cores = frozenset(os.sched_getaffinity(0))
    busy_loop = "import time\nt = time.time()\nwhile time.time() - t < 5: pass"
    with subprocess.Popen([sys.executable, "-c", busy_loop]) as other:
        before = read_cpu_times(cores)
        time.sleep(1.0)
        after = read_cpu_times(cores)
        other.terminate()
    others = (after.busy - after.own) - (before.busy - before.own)
    # On a machine that is busy with other things it gets less than a core, but all of them count as others.
    assert 0.5 < others < len(cores) + 0.2


def test_a_core_that_the_kernel_does_not_list():
    assert read_cpu_times(frozenset({100_000})) is None
