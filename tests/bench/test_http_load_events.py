"""Server-sent events, what an answer says, URLs, and what is sent: without a server."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.bench.arrivals import TRACE_BLOCK_TOKENS, Arrival, Burst, Mix
from firsttoken.bench.http import events
from firsttoken.bench.http.answer import StreamedAnswer, spread
from firsttoken.bench.http.dialect import Dialect
from firsttoken.bench.http.events import Event, EventStream, EventTooLong
from firsttoken.bench.http.prompts import WORDS, Prompts, Words
from firsttoken.bench.http.target import Target
from firsttoken.core.errors import ConfigError

STREAM = 'data: {"a": "ä\\n"}\n\n: a comment\n\nevent: error\ndata: one\ndata:two\n\ndata: [DONE]\n\n'.encode()
EVENTS = [Event(b"", '{"a": "ä\\n"}'.encode()), Event(b"error", b"one\ntwo"), Event(b"", b"[DONE]")]


@given(cuts=st.lists(st.integers(0, len(STREAM) + 12), max_size=12), line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_do_not_depend_on_where_pieces_are_cut(cuts: list[int], line_end: bytes) -> None:
    raw = STREAM.replace(b"\n", line_end)
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    stream = EventStream()
    found = [one for begin, end in pairwise(places) for one in stream.feed(raw[begin:end])]
    found += stream.feed(b": behind\n\n")  # a lone CR at the very end may be half of a line's end
    assert found == EVENTS


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_cut_at_each_byte(line_end: bytes) -> None:
    raw = STREAM.replace(b"\n", line_end)
    for place in range(len(raw) + 1):
        stream = EventStream()
        assert [*stream.feed(raw[:place]), *stream.feed(raw[place:]), *stream.feed(b": behind\n\n")] == EVENTS, place
    stream = EventStream()
    found = [one for place in range(len(raw)) for one in stream.feed(raw[place : place + 1])]
    assert [*found, *stream.feed(b": behind\n\n")] == EVENTS


def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 100)
    stream = EventStream()
    stream.feed(b"data: " + b"x" * 90)
    with pytest.raises(EventTooLong):
        stream.feed(b"x" * 10)


# ---------------------------------------------------------------- tokens of an answer


def answer_of(*chunks: dict[str, object]) -> StreamedAnswer:
    """Each chunk came at its number."""
    answer = StreamedAnswer()
    for number, chunk in enumerate(chunks):
        answer.feed(number, b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return answer


def choice(text: str, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": finish, **more}]}


def said(content: str | None, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"delta": {"content": content, **more}, "finish_reason": finish}]}


def used(tokens: int) -> dict[str, object]:
    return {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}}


def test_usage_of_each_chunk_counts_tokens() -> None:
    answer = answer_of(
        said("") | used(0), said("ab") | used(2), said("c") | used(5), said(None, "length") | used(5), {"choices": []}
    )
    assert answer.arrivals() == ([(1, 2), (2, 3)], "usage of each chunk")
    assert (answer.finish_reason, answer.prompt_tokens) == ("length", 5)


def test_token_ids_count_tokens() -> None:
    answer = answer_of(choice("a", token_ids=[1, 2]), choice("", "stop", token_ids=[3]), {"choices": []} | used(3))
    assert answer.arrivals() == ([(0, 2), (1, 1)], "token ids")


def test_usage_at_the_end_is_spread_by_characters() -> None:
    answer = answer_of(choice("a"), choice("bcdefgh"), choice("", "stop"), {"choices": []} | used(6))
    assert answer.arrivals() == ([(0, 1), (1, 5)], "usage at the end, by characters")


def test_usage_on_the_last_chunk_only_is_no_usage_of_each_chunk() -> None:
    answer = answer_of(choice("a"), choice("b"), choice("c", "stop") | used(3))
    assert answer.arrivals() == ([(0, 1), (1, 1), (2, 1)], "usage at the end, by characters")


def test_without_usage_chunks_with_text_are_counted() -> None:
    answer = answer_of(said(None, role="assistant"), said("a"), said("bc"), said("", "stop"))
    assert answer.arrivals() == ([(1, 1), (2, 1)], "chunks")


def test_reasoning_and_tool_calls_are_tokens_too() -> None:
    calls = [{"function": {"arguments": "{"}}]
    answer = answer_of(said(None, reasoning_content="hm"), said(None, reasoning="so"), said(None, tool_calls=calls))
    assert [at for at, _ in answer.arrivals()[0]] == [0, 1, 2]


def test_tokens_without_any_text_are_not_lost() -> None:
    answer = answer_of(choice(""), choice("", "length"), {"choices": []} | used(2))
    assert sum(count for _, count in answer.arrivals()[0]) == 2


@given(total=st.integers(0, 1000), weights=st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_spreading_keeps_the_total_and_leaves_no_text_without_a_token(total: int, weights: list[int]) -> None:
    counts = spread(total, weights)
    places = sum(weight > 0 for weight in weights)
    assert sum(counts) == (total if places else 0)
    assert min(counts) >= 0
    assert sum(count > 0 for count in counts) == min(total, places)


def test_errors_in_the_stream_are_kept() -> None:
    assert answer_of(choice("a"), {"error": {"message": "m", "code": "c"}}).error == "in-band error: c"
    assert answer_of({"error": "plain"}).error == "in-band error: plain"
    answer = StreamedAnswer()
    answer.feed(0, b"event: error\ndata: {}\n\n")
    answer.feed(1, b"data: <html>\n\n")
    assert answer.error == "in-band error: no words"
    other = StreamedAnswer()
    other.feed(0, b"data: <html>\n\n")
    assert other.error == "an event that is not JSON"
    third = StreamedAnswer()
    third.feed(0, b'data: {"choices": 3}\n\n')
    assert third.error is not None
    assert "unknown shape" in third.error


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://h", "http://h/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/api/v1/", "https://h/api/v1"),
        ("https://h:443/v1/chat/completions", "https://h/v1"),
        ("http://[::1]:80/v1/completions", "http://[::1]/v1"),
    ],
)
def test_urls(url: str, found: str) -> None:
    assert Target.parse(url).url == found


@pytest.mark.parametrize("url", ["http://", "http://h:x", "http://h/v1?a=b", "http://u@h", "http://ä", "http://h/a b"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError):
        Target.parse(url)


def test_what_a_server_refuses_by_name_goes_first() -> None:
    full = Dialect("m")
    without = full.without("Unsupported parameter: 'ignore_eos'")
    assert without is not None
    assert (without.ignore_eos, without.continuous_usage_stats, without.vocab) == (False, True, full.vocab)
    smaller = full.without("token id 31,999 is out of the vocabulary")
    assert smaller is not None
    assert smaller.vocab == 1000
    renamed = full.without("Use 'max_completion_tokens' instead of 'max_tokens'")
    assert renamed is not None
    assert json.loads(renamed.body([1], 3))["max_completion_tokens"] == 3


def test_a_server_that_refuses_everything_is_given_up() -> None:
    dialect: Dialect | None = Dialect("m")
    steps = 0
    while dialect is not None:
        last, dialect = dialect, dialect.without("no")
        steps += 1
    assert steps < 12
    assert (last.fields, last.vocab) == ([], None)
    assert set(json.loads(last.body("x", 3))) == {"model", "prompt", "max_tokens", "stream"}


def test_prompts_share_what_their_blocks_say() -> None:
    length = TRACE_BLOCK_TOKENS + 10
    for prompts, size in ((Prompts(1000, Words(), "a"), 1), (Prompts(None, Words(0, 1.0), "a"), 1)):
        one, two, three = (prompts.make(Arrival(0, length, 1, blocks)) for blocks in ((7, 8), (7, 9), ()))
        if isinstance(one, str) and isinstance(two, str) and isinstance(three, str):
            one, two, three = one.split(" "), two.split(" "), three.split(" ")
        assert len(one) == len(two) == len(three) == length * size
        assert one[:TRACE_BLOCK_TOKENS] == two[:TRACE_BLOCK_TOKENS]
        assert one[TRACE_BLOCK_TOKENS:] != two[TRACE_BLOCK_TOKENS:]
        assert one[:20] != three[:20]
    assert Prompts(1000, Words(), "a").make(Arrival(0, 5, 1)) == Prompts(1000, Words(), "a").make(Arrival(0, 5, 1))
    assert Prompts(1000, Words(), "b").make(Arrival(0, 5, 1)) != Prompts(1000, Words(), "a").make(Arrival(0, 5, 1))


def test_words_are_counted_as_the_server_does() -> None:
    words = Words(fixed=20, each=2.0)
    assert words.count(100) == 40
    assert words.count(1) == 1
    assert len(set(WORDS)) > 100


def test_bursts() -> None:
    burst = Burst.parse("3,every 0.5s")
    assert burst == Burst.parse("3,0.5") == Burst(3, 0.5)
    found = burst.arrivals(1.2, Mix((4,), (2,)), 1)
    assert [arrival.at_s for arrival in found] == [0, 0, 0, 0.5, 0.5, 0.5, 1, 1, 1]
    for bad in ("3", "0,1", "3,every 0s", "x,1"):
        with pytest.raises(ValueError, match="is no burst"):
            Burst.parse(bad)
