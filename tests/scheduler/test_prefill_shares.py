"""How a step's prefill tokens are divided between classes, and inside one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.scheduler.queue import Ticket
from firsttoken.scheduler.shares import ClassFloors, PrefillShares

FLOORS = ClassFloors((4.0, 2.0, 1.0))


def ticket(number: int, wanted: int, service: int = 2, *, aged: bool = False) -> Ticket:
    wire = EngineRequest(
        id=number,
        prompt=array("I", [1] * wanted).tobytes(),
        params=SamplingParams(max_tokens=5),
        seed=0,
        max_tokens=5,
        service=service,
    )
    made = Ticket(Request(wire), number, 0)
    made.aged = aged
    return made


def divide(
    running: list[tuple[int, int]],
    tokens: int,
    entering: Sequence[tuple[int, int]] = (),
    place: float = 0.0,
) -> tuple[list[int], list[int]]:
    """The tokens of running prompts and of those that enter, each given as ``(wanted, class)``, best first. Of a class,
    those that enter stand at ``place``, and running ones at 0, 1, 2 and so on."""
    prefills = [ticket(number, *each) for number, each in enumerate(running)]
    entrants = [ticket(100 + number, *each) for number, each in enumerate(entering)]
    for number, each in enumerate(prefills):
        each.place = float(number)
    for each in entrants:
        each.place = place or 1000.0
    waiting = [sum(each.service == service for each in entrants) for service in range(3)]
    shares = PrefillShares(FLOORS, prefills, tokens, waiting=waiting)
    for each in entrants:
        if shares.open_for(each.service) and shares.may_enter(each):
            shares.enter(each)
    got = {request.request_id: count for request, count in shares.settle()}
    return [got.get(n, 0) for n in range(len(running))], [got.get(100 + n, 0) for n in range(len(entering))]


def test_inside_a_class_prompts_are_served_in_order_of_rank() -> None:
    assert divide([(100, 2), (50, 2), (10, 2)], 140) == ([100, 40, 0], [])
    assert divide([(30, 2)], 40, [(5, 2), (9, 2)]) == ([30], [5, 5])
    assert divide([(100, 2)], 40, [(5, 2)]) == ([40], [0])


def test_one_that_waits_goes_before_running_ones_that_rank_behind_it() -> None:
    assert divide([(100, 2), (50, 2)], 40, [(5, 2)], place=-1.0) == ([35, 0], [5])
    assert divide([(30, 2), (50, 2)], 40, [(9, 2)], place=0.5) == ([30, 1], [9])
    assert divide([(30, 2), (50, 2)], 30, [(9, 2)], place=0.5) == ([30, 0], [0])
    assert divide([(30, 0), (50, 2)], 44, [(9, 2)], place=0.5) == ([30, 5], [9])


def test_better_classes_first_beyond_the_floors() -> None:
    assert divide([(100, 0), (100, 2)], 40) == ([36, 4], [])
    assert divide([(100, 0), (100, 1), (100, 2)], 60) == ([54, 4, 2], [])
    assert divide([(100, 2)], 40, [(100, 0)]) == ([4], [36])
    assert divide([(10, 0), (100, 2)], 40, [(7, 2)]) == ([10, 30], [0])
    assert divide([(100, 1), (100, 2)], 40, [(10, 0)]) == ([28, 2], [10]), "the rest goes to the next class"


def test_an_aged_request_enters_by_a_floor_of_its_own() -> None:
    first, aged = ticket(1, 100, 0), ticket(2, 100, 2, aged=True)
    shares = PrefillShares(FLOORS, [first], 40, waiting=[1, 0, 1], aged=True)
    assert shares.may_enter(aged)
    shares.enter(aged)
    assert not shares.may_enter(ticket(3, 1, 2, aged=True)), "one a step"
    assert {request.request_id: count for request, count in shares.settle()} == {1: 36, 2: 4}
    kept = PrefillShares(FLOORS, [first], 40, waiting=[1, 0, 1], aged=True)
    assert {request.request_id: count for request, count in kept.settle()} == {1: 40}, "it does not fit: none is lost"


def test_the_tokens_of_a_victim_go_to_others() -> None:
    victim, other = ticket(1, 100, 1), ticket(2, 100, 2)
    shares = PrefillShares(FLOORS, [victim, other], 40, waiting=[1, 0, 0])
    shares.leave(victim)
    assert [count for _, count in shares.settle()] == [40]


PROMPTS = st.lists(st.tuples(st.integers(2, 80), st.integers(0, 2)), max_size=6)


@settings(max_examples=500, deadline=None)
@given(PROMPTS, st.integers(1, 120), PROMPTS, st.sampled_from([-1.0, 0.5, 1.5, 1000.0]))
@example([(2, 1), (2, 2)], 2, [(50, 0)], 1000.0)
def test_no_token_is_lost_or_given_twice_and_no_class_is_passed(
    running: list[tuple[int, int]], tokens: int, entering: list[tuple[int, int]], place: float
) -> None:
    running.sort(key=lambda each: each[1])
    entering.sort(key=lambda each: each[1])
    got, got_entering = divide(running, tokens, entering, place)
    everybody = [*zip(running, got, strict=True), *zip(entering, got_entering, strict=True)]
    assert all(0 <= count <= wanted for (wanted, _), count in everybody)
    given_out = sum(count for _, count in everybody)
    assert given_out <= tokens
    # Nothing is left while anybody wants it who runs or was let in.
    assert given_out == tokens or all(count == wanted for (wanted, _), count in everybody)
    best = min((service for _, service in [*running, *entering]), default=0)
    worse = [count for (_, service), count in everybody if service > best]
    if any(count < wanted for (wanted, service), count in everybody if service == best):
        assert sum(worse) <= max(-(-tokens // 10), 2), "the best class wants more, and others have more than floors"
    floor = min(-(-tokens // 10), tokens - 1)
    waiting_worse = [(wanted, count) for (wanted, service), count in zip(running, got, strict=True) if service > best]
    if waiting_worse and floor:
        firsts = {service: wanted for wanted, service in reversed(running) if service > best}
        assert sum(count for _, count in waiting_worse) >= min(floor, *firsts.values())
