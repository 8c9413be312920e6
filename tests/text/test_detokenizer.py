from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from firsttoken.checkpoint.model_config import TokenizerSpec
from firsttoken.text.tokenizer import Tokenizer


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def stream(tokenizer: Tokenizer, parts: list[list[int]], **options) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    return [*(detokenizer.push(part) for part in parts), detokenizer.finish()]


def ids_of_bytes(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token a byte."""
    single = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    return [single[bytes((byte,))] for byte in raw]


@pytest.fixture(params=["byte_tokenizer", "sentencepiece_tokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def test_a_character_split_over_tokens_is_shown_whole(tokenizer: Tokenizer) -> None:
    ids = ids_of_bytes(tokenizer, "ď🔥".encode())
    pieces = stream(tokenizer, [[token] for token in ids])
    assert pieces == ["", "ď", "", "", "", "🔥", ""]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_character_cut_off_at_the_end_is_one_replacement(tokenizer: Tokenizer, kept: int) -> None:
    ids = ids_of_bytes(tokenizer, b"x" + "🔥".encode()[:kept])
    pieces = stream(tokenizer, [[token] for token in ids])
    assert pieces == ["x"] + [""] * kept + ["\ufffd"]
    assert tokenizer.decode(ids) == "x\ufffd"


def test_bytes_that_are_not_utf8_become_replacements(tokenizer: Tokenizer) -> None:
    ids = ids_of_bytes(tokenizer, b"\xf0\x27x\xff\xc0\x80\xed\xa0\x80")
    text = "".join(stream(tokenizer, [[token] for token in ids]))
    assert text == b"\xf0\x27x\xff\xc0\x80\xed\xa0\x80".decode("utf-8", "replace")
    assert text.encode("utf-8")


@given(ids=st.lists(st.integers(0, 605), max_size=30), cuts=st.lists(st.integers(0, 40)), skip=st.booleans())
def test_any_split_gives_the_text_of_the_whole(byte_tokenizer, sentencepiece_tokenizer, ids, cuts, skip) -> None:
    for tokenizer in (byte_tokenizer, sentencepiece_tokenizer):
        pieces = stream(tokenizer, split(ids, cuts), skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
        "".join(pieces).encode("utf-8")


@given(ids=st.lists(st.integers(0, 599), max_size=30), skip=st.booleans())
def test_byte_level_decoding_equals_the_library(byte_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    expected = byte_tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert byte_tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(text=st.text(max_size=20), skip=st.booleans())
def test_sentencepiece_decoding_equals_the_library_on_text(sentencepiece_tokenizer, text: str, skip: bool) -> None:
    ids = list(sentencepiece_tokenizer.encode(text))
    expected = sentencepiece_tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert sentencepiece_tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_a_continuation_keeps_the_space_before_its_first_word(sentencepiece_tokenizer: Tokenizer) -> None:
    ids = list(sentencepiece_tokenizer.encode("the and", add_special_tokens=False))
    assert "".join(stream(sentencepiece_tokenizer, [ids])) == "the and"
    assert "".join(stream(sentencepiece_tokenizer, [ids], continuation=True)) == " the and"


def test_special_tokens_are_skipped_wherever_they_stand(byte_tokenizer: Tokenizer) -> None:
    fire = ids_of_bytes(byte_tokenizer, "🔥".encode())
    ids = [1, *fire[:2], 2, *fire[2:], 2]
    assert "".join(stream(byte_tokenizer, [[token] for token in ids])) == "🔥"
    assert "<|im_end|>" in "".join(stream(byte_tokenizer, [ids], skip_special_tokens=False))


@given(data=st.data())
def test_other_decoders_stream_through_a_window(metaspace_file: Path, data: st.DataObject) -> None:
    tokenizer = Tokenizer.build(TokenizerSpec(tokenizer_json=str(metaspace_file)))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    cuts = data.draw(st.lists(st.integers(0, 40)))
    whole = Backend.from_file(str(metaspace_file)).decode(ids, skip_special_tokens=True)
    assert "".join(stream(tokenizer, split(ids, cuts))) == whole
    assert tokenizer.decode(ids, skip_special_tokens=True) == whole


def test_the_table_stays_within_the_vocabulary(byte_tokenizer: Tokenizer) -> None:
    detokenizer = byte_tokenizer.detokenizer()
    for token in range(10**6, 10**6 + 1000):
        assert detokenizer.push([token]) == ""
    assert len(byte_tokenizer._bytes) <= byte_tokenizer.vocab_size
    assert len(byte_tokenizer._bytes.texts) <= byte_tokenizer.vocab_size


def test_what_is_known_of_a_token_alone_is_not_taken_for_its_text_among_others(sentencepiece_tokenizer: Tokenizer):
    """All requests share it: one that begins, or has half a character, must not see another's."""
    the = list(sentencepiece_tokenizer.encode("the", add_special_tokens=False))
    for _ in range(2):
        assert "".join(stream(sentencepiece_tokenizer, [[token] for token in the])) == "the"
        assert "".join(stream(sentencepiece_tokenizer, [[token] for token in the * 2], continuation=True)) == " the the"
    first, *_ = ids_of_bytes(sentencepiece_tokenizer, "ď".encode())
    (letter,) = ids_of_bytes(sentencepiece_tokenizer, b"x")
    for _ in range(2):
        assert stream(sentencepiece_tokenizer, [[letter], [first], [letter]]) == ["x", "", "\ufffdx", ""]
