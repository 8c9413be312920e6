"""Tokens of pieces against tokens of the whole: what the rules allow must never differ, and what differs is refused."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from firsttoken.checkpoint.model_config import GGUFVocabulary, TokenizerSpec
from firsttoken.text.boundaries import MIN_PIECE, boundary_tokens, cut, message_gaps
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What people type and what stands around control tokens: their look-alikes, halves of characters, what merges.
FRAGMENTS = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "_end|>", "<|", "|>", "<", "<|im_end|", "|im_end|>"),
    *(
        "<s>",
        "</s>",
        "<",
        "s>",
        "e",
        "\u0301",
        "\u200d",
        "\u00a0",
        "\u3000",
        "\ufb01",
        "\u212b",
        "日本",
        "한",
        "🔥",
        "🏽",
    ),
    *(" ", "  ", "\n", "\n\n", "\r\n", "\t", "the", " the", "there", "user", "assistant", "12", "3", "'s", "'ll", "."),
]
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=24).map("".join)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def joined(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    return [token for ids in tokenizer.encode_each(pieces) for token in ids]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, pre=st.sampled_from(["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken"]))
def test_byte_level_pieces_have_the_tokens_of_the_whole(tokenizers: dict[str, Tokenizer], pre: str, text: str) -> None:
    tokenizer = tokenizers[pre]
    for boundary in ("<|im_start|>", "<|im_end|>"):
        assert tokenizer.boundaries([boundary]) == (boundary,)
        pieces = cut(text, [boundary], 1)
        assert "".join(pieces) == text
        assert len(pieces) == 1 + text.count(boundary, 1)
        assert joined(tokenizer, pieces) == whole(tokenizer, text)


@pytest.fixture(scope="session")
def tokenizers(vocabulary: GGUFVocabulary) -> dict[str, Tokenizer]:
    names = ("smollm", "gpt-2", "llama-bpe", "qwen2", "tekken")
    return {
        name: Tokenizer.build(TokenizerSpec(gguf=msgspec.structs.replace(vocabulary, pre=name), add_bos=False))
        for name in names
    }


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_sentencepiece_pieces_do_too(sentencepiece_tokenizer: Tokenizer, text: str) -> None:
    assert sentencepiece_tokenizer.boundaries(["</s>"]) == ("</s>",)
    assert joined(sentencepiece_tokenizer, cut(text, ["</s>"], 1)) == whole(sentencepiece_tokenizer, text)


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_the_default_model_does_too(smollm2: Tokenizer, text: str) -> None:
    assert joined(smollm2, cut(text, ["<|im_end|>"], 1)) == whole(smollm2, text)


@pytest.fixture(scope="session")
def smollm2(smollm2_vocabulary: GGUFVocabulary) -> Tokenizer:
    return Tokenizer.build(TokenizerSpec(gguf=smollm2_vocabulary, add_bos=False))


# ------------------------------------------------------- any added tokens at all, against the library

LETTERS = "ab<> "
ADDED = st.builds(
    AddedToken,
    content=st.text(alphabet=LETTERS, min_size=1, max_size=4),
    single_word=st.sampled_from([False, False, False, True]),
    lstrip=st.booleans(),
    rstrip=st.booleans(),
    normalized=st.sampled_from([False, False, True]),
    special=st.booleans(),
)


def small_backend(added: list[AddedToken]) -> Backend:
    """Letters and a few merges, so that ids change wherever a cut changes what is merged or stripped."""
    pairs = [("a", "b"), ("b", "a"), ("<", "<"), ("Ġ", "a"), ("ab", "a"), ("a", ">")]
    words = [*"ab<>Ġ", *("".join(pair) for pair in pairs)]
    backend = Backend(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=pairs))
    backend.normalizer = normalizers.Replace("ba", "ab")
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added)
    return backend


def ids_of(backend: Backend, *texts: str) -> list[int]:
    return [token for text in texts for token in backend.encode(text, add_special_tokens=False).ids]


def survivable(backend: Backend, text: str) -> list[int] | None:
    """None where the library itself stumbles: a token that begins with a blank behind one that takes blanks."""
    try:
        return ids_of(backend, text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return None


def test_whatever_the_added_tokens_a_cut_that_is_allowed_changes_nothing() -> None:
    allowed = 0

    @settings(max_examples=1500, deadline=None, database=None)
    @given(added=st.lists(ADDED, min_size=1, max_size=4), text=st.text(alphabet=LETTERS, max_size=16), data=st.data())
    def check(added: list[AddedToken], text: str, data: st.DataObject) -> None:
        nonlocal allowed
        backend = small_backend(added)
        content = data.draw(st.sampled_from(added)).content
        text += content + data.draw(st.text(alphabet=LETTERS, max_size=8))
        right = survivable(backend, text)
        assume(right is not None)
        for boundary in boundary_tokens(backend, [content]):
            pieces = cut(text, [boundary], 1)
            allowed += len(pieces) > 1
            assert ids_of(backend, *pieces) == right

    check()
    assert allowed > 100, "the rule must allow something, or this shows nothing"


def plain(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, normalized=flags.pop("normalized", False), **flags)


@pytest.mark.parametrize(
    ("added", "text"),
    [
        ([plain("<b>", lstrip=True)], "a <b>a"),  # takes the blank before it
        ([plain("<b>", normalized=True)], "b<b>a"),  # looked for when the text before it is another already
        ([plain("<b>"), plain("<b>a")], "b<b>a"),  # not always itself
        ([plain("<b>"), plain("a<")], "a<b>a"),  # loses its first letter to another
        ([plain("<b>"), plain("a<b>b")], "a<b>b"),
        ([plain("<b<")], "<b<b<"),  # overlaps with itself
        ([plain("<b>"), plain("a", single_word=True)], "b a<b>a"),  # another looks at what is beside it
    ],
)
def test_a_token_that_could_be_missed_is_no_boundary(added: list[AddedToken], text: str) -> None:
    content = added[0].content
    assert boundary_tokens(small_backend(added), [content]) == ()
    assert boundary_tokens(small_backend([plain(content[:2] + ">>")]), [content[:2] + ">>"])


@pytest.mark.parametrize(("added", "text"), [([plain("<b>", lstrip=True)], "a <b>a"), ([plain("<b<")], "<b<b<")])
def test_a_cut_that_is_refused_would_change_the_tokens(added: list[AddedToken], text: str) -> None:
    backend = small_backend(added)
    at = text.rindex(added[0].content)
    assert ids_of(backend, text[:at], text[at:]) != ids_of(backend, text)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, scheme=st.sampled_from(["always", "never", "first"]))
def test_metaspace_pieces_do_too(metaspace_file: Path, scheme: str, text: str) -> None:
    backend = Backend.from_file(str(metaspace_file))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # type: ignore[arg-type]
    assert boundary_tokens(backend, ["<s>"]) == ("<s>",)
    assert ids_of(backend, *cut(text, ["<s>"], 1)) == ids_of(backend, text)
    assert scheme != "first" or ids_of(backend, "a<s>", "b") != ids_of(backend, "a<s>b"), "a cut behind it is wrong"


def test_tokenizers_that_are_not_known_or_random_are_never_cut() -> None:
    backend = small_backend([plain("<t>")])
    assert boundary_tokens(backend, ["<t>"]) == ("<t>",)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.CharDelimiterSplit("x"), backend.pre_tokenizer]
    )
    assert boundary_tokens(backend, ["<t>"]) == ()
    random = small_backend([plain("<t>")])
    random.model.dropout = 0.5
    assert boundary_tokens(random, ["<t>"]) == ()
    words = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    words.add_tokens([plain("<t>")])
    assert boundary_tokens(words, ["<t>"]) == ()


# ------------------------------------------------------------------ what stands between messages


def test_the_first_token_between_all_messages_is_taken(byte_tokenizer: Tokenizer) -> None:
    gaps = message_gaps(ChatTemplate(CHATML))
    assert gaps[:2] == ["<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n"]
    assert byte_tokenizer.boundaries(gaps) == ("<|im_end|>",)


def test_where_none_is_between_all_those_between_some_are_taken(byte_tokenizer: Tokenizer) -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}{% endfor %}"
    )
    assert byte_tokenizer.boundaries(message_gaps(ChatTemplate(source))) == ("<|im_end|>", "<|im_start|>")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content }}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_shows_no_order_has_no_gaps(byte_tokenizer: Tokenizer, source: str) -> None:
    assert message_gaps(ChatTemplate(source)) == []
    assert byte_tokenizer.boundaries([]) == ()


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "a" * 100, "b" * 300]), max_size=30), st.integers(0, 30))
def test_a_text_that_begins_alike_is_cut_alike(parts: list[str], length: int) -> None:
    tokens = ("<|im_start|>", "<|im_end|>")
    text, start = "".join(parts), "".join(parts[:length])
    pieces, begun = cut(text, tokens), cut(start, tokens)
    assert "".join(pieces) == text
    assert begun[:-1] == pieces[: len(begun) - 1]
    assert all(len(piece) >= MIN_PIECE for piece in pieces[:-1])


def test_each_text_is_encoded_by_itself(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode_each([]) == []
    assert byte_tokenizer.encode_each(["fox", ""]) == [byte_tokenizer.encode("fox"), array("I")]
