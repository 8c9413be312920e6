"""The frontier: goodput, what no other point beats, the rate that can be carried, and its picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.bench.arrivals import Mix
from firsttoken.core.service import ClassTargets, Targets
from firsttoken.core.step_sizes import StepSizes
from firsttoken.scheduler import TokenCap
from firsttoken.scheduler.step_time import FittedStepTime, StepLoad
from firsttoken.simulate.frontier import Point, capacity, measure, pareto
from firsttoken.simulate.frontier_picture import draw_frontier
from firsttoken.simulate.policies import find_policy
from firsttoken.simulate.run import EngineShape
from firsttoken.simulate.workload import poisson_jobs

ENGINE = EngineShape(kv_blocks=1000, max_num_seqs=8, max_model_len=1000, in_flight=2)
MIX = Mix((16,), (1,))
TARGETS = Targets(p2=ClassTargets(ttft_p99=100.0))
POLICY = find_policy(
    "fcfs-512", lambda _: TokenCap(64, 16), FittedStepTime(StepSizes(), ((1, 10.0), (2, 10.0)), 0.0, 0.0, 0.0)
)


@dataclass
class PerPrompt:
    """A step takes 10 ms for each prompt of 16 tokens: 100 requests a second are all that can be served."""

    def ms(self, load: StepLoad) -> float:
        return 10 * (load.prefill_tokens / 16 or 1)


def test_goodput_is_that_of_the_load_while_it_can_be_carried() -> None:
    found = [
        measure(POLICY, "0", poisson_jobs(rate, 10, MIX, 1), rate, ENGINE, PerPrompt(), TARGETS) for rate in (20, 200)
    ]
    assert found[0].policy == "fcfs-512"
    assert found[0].offered_rps == 20
    assert found[0].goodput_rps == pytest.approx(20, rel=0.01)
    assert found[0].ttft_p99_ms < 100 < 1000 < found[1].ttft_p99_ms
    assert found[1].goodput_rps < 10


def test_a_window_is_part_of_the_name_and_of_the_latency() -> None:
    jobs = poisson_jobs(20, 10, MIX, 1)
    none, some = (measure(POLICY, window, jobs, 20, ENGINE, PerPrompt(), TARGETS) for window in ("0", "30"))
    assert some.policy == "fcfs-512, window 30"
    assert some.ttft_p99_ms > none.ttft_p99_ms + 20


def test_capacity_is_where_the_targets_begin_to_be_missed() -> None:
    found = capacity(POLICY, ENGINE, PerPrompt(), TARGETS, MIX, seconds=8, seed=1)
    assert 60 < found < 100
    slower = Targets(p2=ClassTargets(ttft_p99=1000.0))
    assert found < capacity(POLICY, ENGINE, PerPrompt(), slower, MIX, seconds=8, seed=1) < 120
    never = Targets(p2=ClassTargets(ttft_p99=1.0))
    assert capacity(POLICY, ENGINE, PerPrompt(), never, MIX, seconds=8, seed=1) == 0


POINTS = st.builds(Point, st.just("p"), st.just(1.0), st.floats(0, 100), st.floats(0.1, 100), st.just(1.0))


@given(st.lists(POINTS, min_size=1, max_size=30))
def test_nothing_beats_a_point_of_the_frontier(points: list[Point]) -> None:
    front = pareto(points)
    assert front
    for best in front:
        assert not any(
            other.goodput_rps >= best.goodput_rps
            and other.ttft_p99_ms <= best.ttft_p99_ms
            and (other.goodput_rps, other.ttft_p99_ms) != (best.goodput_rps, best.ttft_p99_ms)
            for other in points
        )
    for point in points:
        assert any(best.goodput_rps >= point.goodput_rps and best.ttft_p99_ms <= point.ttft_p99_ms for best in front)
    assert [best.goodput_rps for best in front] == sorted(best.goodput_rps for best in front)


def test_each_latency_has_its_own_frontier() -> None:
    soon, even = Point("soon", 10, 8, 50, 90), Point("even", 10, 9, 70, 20)
    assert pareto([soon, even]) == [soon, even]
    assert pareto([soon, even], "itl_p99_ms") == [even]


@pytest.mark.parametrize("goodput", [0.0, 40.0])
def test_the_picture_is_drawn_whatever_the_points(tmp_path: Path, goodput: float) -> None:
    path = tmp_path / "new" / "frontier.png"
    draw_frontier(path, "title", [Point("a", 10, goodput, 50, 0), Point("b", 10, goodput / 2, 0, 5)])
    assert path.read_bytes().startswith(b"\x89PNG")
