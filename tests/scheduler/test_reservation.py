"""What is kept free for the growth of running requests, and what is learned of it."""

from __future__ import annotations

import timeit
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.core.kv_format import KVFormat
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kvcache import KVCache
from firsttoken.scheduler.output_lengths import MIN_SAMPLES, OutputLengths
from firsttoken.scheduler.reservation import KVReservation

PARAMS = SamplingParams(temperature=0.0, max_tokens=None)


def request(prompt: int, max_tokens: int, *, output: int = 0, service: int = 2, number: int = 1) -> Request:
    wire = EngineRequest(
        id=number, prompt=bytes(4 * prompt), params=PARAMS, seed=0, max_tokens=max_tokens, service=service
    )
    made = Request(wire)
    made.tokens.extend(array("I", bytes(4 * output)))
    return made


def taught(*outputs: int, max_tokens: int = 1000, service: int = 2) -> OutputLengths:
    lengths = OutputLengths()
    for output in outputs:
        lengths.learn(request(1, max_tokens, output=output, service=service))
    return lengths


# ---------------------------------------------------------------------- lengths


def test_nothing_is_known_before_50_have_ended():
    assert taught(*[10] * (MIN_SAMPLES - 1)).expected(request(5, 1000)) is None
    assert taught(*[10] * MIN_SAMPLES).expected(request(5, 1000)) == pytest.approx(10, rel=0.15)


def test_eight_of_ten_stay_within_what_is_expected():
    lengths = taught(*range(1, 501))
    expected = lengths.expected(request(5, 1000))
    assert 400 <= expected <= 400 * 1.1


def test_who_got_far_is_compared_with_those_who_did():
    lengths = taught(*[10] * 90, *[800] * 10)
    assert lengths.expected(request(5, 1000)) < 12
    assert 800 <= lengths.expected(request(5, 1000, output=50)) <= 880
    # Nobody was as long.
    assert lengths.expected(request(5, 1000, output=950)) == 1000


def test_outputs_of_full_length_are_expected_in_full():
    assert taught(*[1000] * 60).expected(request(5, 1000)) == 1000
    assert taught(*[1000] * 60).expected(request(5, 999)) == 999


def test_classes_and_sizes_learn_for_themselves_and_a_new_size_from_its_class():
    lengths = taught(*[16] * 100, max_tokens=16)
    for output in [100] * 60:
        lengths.learn(request(1, 4000, output=output))
    assert lengths.expected(request(5, 16)) == 16
    assert lengths.expected(request(5, 4000)) == pytest.approx(100, rel=0.12)
    assert lengths.expected(request(5, 300)) == 300  # of all sizes more than a fifth used all that they asked for
    assert lengths.expected(request(5, 16, service=0)) is None


def test_what_changed_is_learned_anew():
    lengths = taught(*[500] * 3000)
    for _ in range(2000):
        lengths.learn(request(1, 1000, output=20))
    assert lengths.expected(request(5, 1000)) < 25


@given(st.lists(st.integers(1, 3000), min_size=50, max_size=200), st.integers(0, 2999))
def test_an_expectation_is_beyond_what_is_there_and_within_max_tokens(outputs, so_far):
    lengths = taught(*outputs, max_tokens=3000)
    assert so_far < lengths.expected(request(5, 3000, output=so_far)) <= 3000


# ---------------------------------------------------------------------- blocks


SIZE = 16


class Pool:
    """A cache of ``blocks``, and requests of known length that run in it."""

    def __init__(self, blocks: int, rows: int = 1) -> None:
        kv_format = KVFormat(dtype="float32", layers=1, kv_heads=1, head_dim=1, block_tokens=SIZE)
        self.kv = KVCache(kv_format, blocks, model="m", prefix_caching=False)
        self.reservation = KVReservation(self.kv, rows)

    def start(self, one: Request) -> None:
        assert self.kv.admit(one) is not None
        self.reservation.started(one)

    def growth(self, one: Request) -> int:
        return self.reservation.growth(one, self.kv.available)


def test_nothing_is_kept_beside_nobody():
    assert Pool(8).growth(request(16, 10_000)) == 0


def test_what_those_that_run_will_take_is_kept():
    pool = Pool(20)
    pool.start(request(16, 161, number=1))  # 1 block now, 10 more
    assert pool.growth(request(16, 33, number=2)) == 0  # 11 and 3 of 20 are enough whatever happens
    # When the first ends the other has 11 blocks of its own: 22 are 1 more than there are.
    assert 20 <= pool.growth(request(16, 161, number=2)) <= 21


def test_who_ends_first_makes_room_for_who_goes_on():
    pool = Pool(16)
    pool.start(request(8 * 16, 16, number=1))  # 8 blocks, ends after 16 tokens
    # At their ends they have 9 and 11 blocks, but the 9 have been given back by then.
    assert pool.growth(request(16, 161, number=2)) <= 3


def test_worse_classes_make_way():
    pool = Pool(20)
    pool.start(request(10 * 16, 161, number=1, service=2))
    assert pool.growth(request(16, 161, number=2, service=2)) > 8
    assert pool.growth(request(16, 161, number=2, service=0)) == 0


def test_of_lengths_not_learned_no_more_than_a_rows_part_is_kept():
    """Most callers name no max_tokens, which then is the model's whole length."""
    pool = Pool(64, rows=8)
    for number in range(1, 7):
        pool.start(request(8, 100_000, number=number))
    assert pool.growth(request(8, 100_000, number=9)) <= 64 - 7


def test_whoever_left_is_not_counted():
    pool = Pool(20)
    first = request(16, 161, number=1)
    pool.start(first)
    pool.kv.release(first)
    pool.reservation.left(first)
    assert pool.growth(request(16, 10_000, number=2)) == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 200)), min_size=2, max_size=12))
def test_the_most_is_what_playing_it_out_comes_to(shapes):
    """(prompt, output) of each; the last is the one that would start. A block of a row may be begun or not."""
    pool = Pool(4000)
    *running, new = [request(prompt, output, number=number) for number, (prompt, output) in enumerate(shapes)]
    for one in running:
        pool.start(one)
    now = sum(pool.kv.blocks_for(one.num_prompt) for one in [*running, new])
    most = max(
        sum(-(-(one.num_prompt + step) // SIZE) for one in [*running, new] if one.max_tokens >= step)
        for step in range(1, 201)
    )
    told = pool.reservation.growth(new, -(10**6))  # nothing is free: it must say how much is needed
    assert abs(told - (most - now)) <= len(shapes)


def test_an_answer_is_cheap():
    pool = Pool(100_000, rows=256)
    for number in range(256):
        pool.start(request(100, 500 + number, number=number + 1))
    new = request(100, 300, number=999)
    plenty = min(timeit.repeat(lambda: pool.growth(new), number=200, repeat=10)) / 200
    scarce = min(timeit.repeat(lambda: pool.reservation.growth(new, 0), number=200, repeat=10)) / 200
    assert plenty < 20e-6
    assert scarce < 40e-6, "the curve is made once"
