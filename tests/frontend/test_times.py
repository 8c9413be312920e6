"""The engine's stamps join the front end's once, however they are sent."""

from __future__ import annotations

import pytest

from firsttoken.core.timeline import Mark, Timeline
from firsttoken.frontend.times import RequestTimes
from firsttoken.transport.messages import RequestDelta

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
    times.note(RequestDelta(1, [5], stamps=first, cached_tokens=3), 70)
    times.note(RequestDelta(1, [6], finish_reason="stop", stamps=last, preemptions=1), 100)
    times.finish(100)
    assert times.timeline.stamps()[:-1] == [*OWN, *FIRST, *LAST, (Mark.DELIVERED, 100)]
    account = times.timings()
    assert account["unaccounted_ms"] == 0
    assert (times.cached_tokens, times.preemptions, list(times.token_times)) == (3, 1, [70, 100])
