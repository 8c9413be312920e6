"""One answer's text does not depend on how its tokens were split over deltas."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firsttoken.core.plan import TokenLogprobs
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.frontend.answer import Answer
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer

STOPS = st.lists(st.text("abcX\ufffd", min_size=1, max_size=3), max_size=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(tokenizer, params, tokens, pieces, end):
    """Push ``tokens`` in pieces of the given sizes, ending with ``end``; what the caller saw, joined."""
    answer = Answer(0, params, {EOS}, tokenizer)
    text, seen, logprobs, rest, reason = "", [], [], list(tokens), (None, None)
    while reason[0] is None:
        size = pieces.pop() if pieces else len(rest)
        piece, rest = rest[:size], rest[size:]
        delta = answer.push(piece, [TokenLogprobs(-1.0 * t, 1) for t in piece], None if rest else end)
        text += delta.text
        seen += delta.token_ids
        logprobs += delta.logprobs
        reason = (delta.finish_reason, delta.stop_reason)
    assert [-entry.logprob for entry in logprobs] == seen
    assert answer.num_tokens == len(seen)
    return text, seen, reason


# A stop string is complete in the token right before the end token, which came with it or one step later.
STOP_THEN_END = {"tokens": [97], "stops": ["a"], "include": False, "min_tokens": 0, "end": "stop"}
# A stop string that half a character completes: it is found only when the end token says that no more will come.
HALF_CHARACTER = {"tokens": [97, 0xC4], "stops": ["a\ufffd"], "include": False, "min_tokens": 0, "end": "stop"}


@settings(max_examples=300, deadline=None)
@example(pieces=[1], **STOP_THEN_END)
@example(pieces=[2], **STOP_THEN_END)
@example(pieces=[1], **HALF_CHARACTER)
@example(pieces=[2, 1], **HALF_CHARACTER)
@given(
    tokens=st.lists(st.sampled_from([*b"abcX", 0xC4, 0x8F, 0xF0, BOS]), min_size=1, max_size=24),
    pieces=st.lists(st.integers(1, 5), max_size=24),
    stops=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    end=st.sampled_from(["stop", "length", "abort"]),
)
def test_any_split_gives_the_same_answer(tokenizer, tokens, pieces, stops, include, min_tokens, end):
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=99)
    if end == "stop":
        tokens = [*tokens, EOS]
    whole = run(tokenizer, params, tokens, [], end)
    assert run(tokenizer, params, tokens, list(pieces), end) == whole
    text, seen, reason = whole
    assert seen == tokens[: len(seen)]
    if reason[0] == "stop" and isinstance(reason[1], str):
        assert len(seen) > min_tokens
    else:
        assert seen == tokens
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    if not min_tokens and not include:
        assert not any(stop in text for stop in stops)
