"""The account of time: every nanosecond has one owner, whatever the timeline looks like."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.core.cache_miss import Miss, MissReason
from firsttoken.core.service import ServiceClass
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.observability.account import STAGES, server_timing_header, timings

MS = 1_000_000


def timeline(*stamps):
    line = Timeline()
    now = 5_000 * MS
    for mark, gap in stamps:
        now += int(gap * MS)
        line.stamp(mark, now)
    return line


def in_ns(account, names):
    return sum(round(account[name] * MS) for name in names)


gaps = st.integers(0, 10**11)


@st.composite
def lives(draw):
    """Stamps of a request's whole life with preemption cycles, or cut short by an abort."""
    marks = [Mark.RECEIVED, Mark.PARSED, Mark.TEMPLATED, Mark.TOKENIZED, Mark.ARRIVED]
    marks += [Mark.SCHEDULED, Mark.FIRST_TOKEN, Mark.PREEMPTED] * draw(st.integers(0, 4))
    marks += draw(st.sampled_from([[], [Mark.SCHEDULED], [Mark.SCHEDULED, Mark.FIRST_TOKEN]]))
    return [*marks, Mark.FINISHED, Mark.DELIVERED, Mark.DETOKENIZED, Mark.WRITTEN]


@given(lives(), st.data())
def test_a_whole_life_has_nothing_unaccounted(marks, data):
    line = Timeline()
    now = 0
    for mark in marks:
        now += data.draw(gaps)
        line.stamp(mark, now)
    account = timings(line)
    assert account["unaccounted_ms"] == 0
    assert in_ns(account, STAGES) == line.times[-1] - line.times[0] == in_ns(account, ["total_ms"])


@given(
    st.lists(st.tuples(st.sampled_from(list(Mark)), st.integers(0, 10**12)), max_size=30),
    st.none() | st.integers(0, 10**12),
)
def test_any_stamps_in_any_order_sum_up(stamps, end_ns):
    """Missing, repeated and backward stamps: the sum holds and nothing is negative."""
    account = timings(Timeline(stamps), end_ns=end_ns)
    assert in_ns(account, STAGES) == in_ns(account, ["total_ms"])
    assert all(account[stage] >= 0 for stage in STAGES)
    assert in_ns(account["transport"], account["transport"]) == in_ns(account, ["transport_ms"])
    json.dumps(account, allow_nan=False)


@given(lives(), st.data())
def test_time_over_a_missing_stamp_is_unaccounted_and_nothing_else_moves(marks, data):
    line = Timeline()
    for index, mark in enumerate(marks):
        line.stamp(mark, (index + 1) * 7 * MS)
    required = [
        i for i, mark in enumerate(marks) if mark in (Mark.PARSED, Mark.TOKENIZED, Mark.DELIVERED, Mark.DETOKENIZED)
    ]
    missing = data.draw(st.sampled_from(required))
    cut = Timeline([stamp for i, stamp in enumerate(line.stamps()) if i != missing])
    whole, account = timings(line), timings(cut)
    assert account["total_ms"] == whole["total_ms"]
    assert account["unaccounted_ms"] == 14


def test_each_state_owns_its_time():
    line = timeline(
        (Mark.RECEIVED, 0), (Mark.PARSED, 1), (Mark.TEMPLATED, 2), (Mark.TOKENIZED, 3), (Mark.ARRIVED, 4),
        (Mark.SCHEDULED, 5), (Mark.FIRST_TOKEN, 6), (Mark.PREEMPTED, 7), (Mark.RESTORING, 3), (Mark.SCHEDULED, 8),
        (Mark.FIRST_TOKEN, 9), (Mark.FINISHED, 10), (Mark.DELIVERED, 11), (Mark.DETOKENIZED, 12), (Mark.WRITTEN, 13),
    )  # fmt: skip
    found = Miss(112, MissReason.EVICTED, 2.5, ServiceClass.P1)
    account = timings(
        line,
        cached_tokens=112,
        cached_host=64,
        cached_disk=16,
        miss=found,
        preemptions=1,
        token_times=[0, 10 * MS, 40 * MS],
    )
    assert {name: account[name] for name in STAGES} == {
        "parse_ms": 1, "template_ms": 2, "tokenize_ms": 3, "transport_ms": 15, "queue_ms": 8, "kv_ms": 8,
        "prefill_ms": 15, "decode_ms": 17, "detokenize_ms": 12, "stop_ms": 0, "write_ms": 13, "unaccounted_ms": 0,
    }  # fmt: skip
    assert account["transport"] == {"to_engine_ms": 4, "from_engine_ms": 11}
    assert account["total_ms"] == 94
    assert account["cached_tokens"] == {"device": 32, "host": 64, "disk": 16}
    assert account["miss"] == {"position": 112, "reason": "evicted", "age_s": 2.5, "by": "p1"}
    assert account["preemptions"] == 1
    assert account["itl_ms"]["max"] == 30
    assert account["itl_ms"]["mean"] == 20


def test_an_abort_in_the_queue_is_queue_time():
    line = timeline((Mark.TOKENIZED, 0), (Mark.ARRIVED, 1), (Mark.FINISHED, 30), (Mark.DELIVERED, 1))
    account = timings(line)
    assert (account["queue_ms"], account["transport_ms"], account["unaccounted_ms"]) == (30, 2, 0)


def test_a_first_token_in_flight_at_a_preemption_is_queue_time():
    stamps = [(Mark.SCHEDULED, 0), (Mark.PREEMPTED, 3), (Mark.FIRST_TOKEN, 2), (Mark.PREEMPTED, 0)]
    account = timings(timeline((Mark.ARRIVED, 0), *stamps, (Mark.SCHEDULED, 4), (Mark.FINISHED, 5)))
    assert (account["prefill_ms"], account["queue_ms"], account["unaccounted_ms"]) == (8, 6, 0)


def test_an_open_account_closes_with_the_state_in_force():
    line = timeline((Mark.ARRIVED, 0), (Mark.SCHEDULED, 2))
    account = timings(line, end_ns=line.times[-1] + 5 * MS)
    assert (account["queue_ms"], account["prefill_ms"], account["total_ms"]) == (2, 5, 7)


def test_no_stamps_and_no_gaps():
    account = timings(Timeline(), token_times=[5])
    assert account["total_ms"] == 0
    assert account["itl_ms"] == {}


def test_server_timing_header():
    line = timeline(
        (Mark.RECEIVED, 0), (Mark.PARSED, 0.25), (Mark.TEMPLATED, 0), (Mark.TOKENIZED, 1.5), (Mark.ARRIVED, 0)
    )
    assert server_timing_header(timings(line)) == "parse_ms;dur=0.250, tokenize_ms;dur=1.500, total_ms;dur=1.750"


def test_unknown_marks_are_refused():
    with pytest.raises(ValueError, match="99"):
        timings(Timeline([(99, 1), (1, 2)]))
