"""The engine's stamps join the front end's once, however they are sent."""

from __future__ import annotations

import sys

import pytest

from firsttoken.core.plan import PromptLogprobs, TokenLogprobs
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.frontend.times import Beside, Books, FirstToken, RequestTimes
from firsttoken.observability.worst_gap import Gap
from firsttoken.transport.messages import RequestDelta, Spent

OWN = [(Mark.RECEIVED, 10), (Mark.PARSED, 20), (Mark.TEMPLATED, 20), (Mark.TOKENIZED, 30)]
FIRST = [(Mark.ARRIVED, 40), (Mark.SCHEDULED, 50), (Mark.FIRST_TOKEN, 60)]
LAST = [(Mark.FINISHED, 90)]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ([], FIRST + LAST),
        ([], OWN + FIRST + LAST),
        (FIRST, LAST),
        (FIRST, FIRST + LAST),
        (OWN + FIRST, OWN + FIRST + LAST),
    ],
)
def test_stamps_are_taken_once(first, last):
    times = RequestTimes(Timeline(OWN))
    times.note_at_once(RequestDelta(1, [5], stamps=first, cached_tokens=3), 70)
    times.note_at_once(RequestDelta(1, [6], finish_reason="stop", stamps=last, preemptions=1), 100)
    times.finish(100)
    assert times.timeline.stamps()[:-1] == [*OWN, *FIRST, *LAST, (Mark.DELIVERED, 100)]
    account = times.timings()
    assert account["unaccounted_ms"] == 0
    assert (times.cached_tokens, times.preemptions, list(times.token_times)) == (3, 1, [70, 100])


def test_what_was_told_of_tokens_is_not_kept_with_the_times():
    data, top = bytes(1000), [7] * 20
    found = TokenLogprobs(-1.0, 1, top, [-1.0] * 20)
    before = sys.getrefcount(data), sys.getrefcount(top)
    times = RequestTimes(Timeline(OWN))
    held = RequestDelta(
        1, [5], [found], finish_reason="stop", prompt_logprobs=PromptLogprobs(0, data, data), pooled=data
    )
    times.note_at_once(held, 100)
    del held
    assert (sys.getrefcount(data), sys.getrefcount(top)) == before


@pytest.mark.parametrize(
    ("stamps", "owned"),
    [
        ([(Mark.ARRIVED, 40), (Mark.FINISHED, 95)], {"transport_ms": 10 + 1, "queue_ms": 50}),
        ([(Mark.ARRIVED, 40), (Mark.SCHEDULED, 50), (Mark.FINISHED, 95)], {"queue_ms": 10, "prefill_ms": 40}),
        ([(Mark.ARRIVED, 94), (Mark.FINISHED, 95)], {"transport_ms": 60 + 1, "queue_ms": 0}),
    ],
)
def test_one_that_was_cut_short_here_is_completed_by_the_engines_last_word(stamps, owned):
    times = RequestTimes(Timeline(OWN))
    times.timeline.stamp(Mark.FINISHED, 90)
    times.timeline.stamp(Mark.FAILED, 91)
    spent = Spent([0] * 8 + [30], 1, 0)
    times.complete(RequestDelta(1, [], finish_reason="abort", stamps=stamps, spent=spent))
    account = times.timings()
    assert account["unaccounted_ms"] == 0
    assert {name: account[name] * 1e6 for name in owned} == pytest.approx(owned)
    assert sum(account["queue_reasons"].values()) == pytest.approx(account["queue_ms"])


def test_what_was_told_is_in_the_books_once_they_are_settled():
    books, gaps, firsts = Books(), [], []
    first = FirstToken(10, firsts.append)
    beside = Beside()
    answers = [RequestTimes(Timeline(), beside, first=first, note_gap=gaps.append) for _ in range(2)]
    for times in answers:
        books.add((times, RequestDelta(1, [5]), 20, 15, 30, 34, 39))
    books.add((answers[0], RequestDelta(1, [6, 7]), 50, 40, 60, 61, 61))
    assert (firsts, gaps, beside) == ([], [], Beside())
    for _ in range(2):
        books.settle()
        assert (first.after_ns, len(firsts)) == (20, 1), "the first of both answers"
        assert gaps == [30, 0], "since the token before came; two that came together have none between"
        assert beside == Beside(detokenize=9, write=10)
        assert [list(one.token_times) for one in answers] == [[30, 60, 60], [30]]
        assert answers[0].worst == Gap(1, 20, 30, 50, 40, 60)
