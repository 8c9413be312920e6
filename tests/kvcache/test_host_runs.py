from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.kvcache.host.pool import blocks_of
from firsttoken.kvcache.host.run_allocator import Run, RunAllocator


@given(st.integers(1, 9), st.lists(st.tuples(st.sampled_from("tgpx"), st.integers(0, 1 << 16)), max_size=80))
def test_runs_are_disjoint_inside_segments_and_all_blocks_are_accounted_for(segment: int, actions) -> None:
    runs = RunAllocator(segment)
    held: list[Run] = []
    used: set[int] = set()
    for action, number in actions:
        if action == "x":
            runs.grow(runs.num_blocks + number % 12)
        elif action == "t":
            count = 1 + number % 12
            free = runs.num_blocks - len(used)
            taken = runs.take(count)
            assert (taken is None) == (count > free)
            blocks = blocks_of(taken or [])
            assert len(blocks) == (count if taken else 0)
            assert not used & set(blocks)
            used.update(blocks)
            held.extend(taken or [])
        elif held:
            run = held.pop(number % len(held))
            if action == "p" and run.length > 1:  # only a part of it
                keep = 1 + number % (run.length - 1)
                held.append(Run(run.first, keep))
                run = Run(run.first + keep, run.length - keep)
            runs.give(run)
            used -= set(blocks_of([run]))
        runs.check()
        assert runs.num_free == runs.num_blocks - len(used)
        assert all(run.first // segment == (run.first + run.length - 1) // segment for run in held)


def test_the_shortest_run_that_fits_is_taken_so_that_long_ones_stay() -> None:
    runs = RunAllocator(100)
    runs.grow(100)
    everything = runs.take(100)
    assert everything == [Run(0, 100)]
    for hole in (Run(0, 40), Run(50, 8), Run(70, 12)):
        runs.give(hole)
    assert runs.take(8) == [Run(50, 8)]
    assert runs.take(9) == [Run(70, 9)]
    assert runs.largest == 40
    # No run is long enough: the longest whole, and the rest from the next best.
    assert runs.take(41) == [Run(0, 40), Run(79, 1)]
    runs.check()


def test_neighbours_join_again() -> None:
    runs = RunAllocator(10)
    runs.grow(20)
    taken = [runs.take(2) for _ in range(10)]
    for (run,) in taken[::2] + taken[1::2]:  # type: ignore[misc]
        runs.give(run)
    assert runs.num_runs == 2
    assert runs.largest == 10


@pytest.mark.parametrize("run", [Run(0, 3), Run(2, 1), Run(-1, 1), Run(9, 2), Run(0, 0)])
def test_what_is_not_in_use_cannot_be_given_back(run: Run) -> None:
    runs = RunAllocator(10)
    runs.grow(10)
    runs.take(2)
    with pytest.raises(ValueError, match=r"not all in use|outside"):
        runs.give(run)
    runs.check()
    runs.give(Run(0, 2))
    with pytest.raises(ValueError, match="not all in use"):
        runs.give(Run(0, 2))


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one block, got 0"):
        RunAllocator(0)
    with pytest.raises(ValueError, match="at least one block must be taken, got 0"):
        RunAllocator(4).take(0)
