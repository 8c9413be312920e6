import json
import re as stdlib_re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from firsttoken.checkpoint.model_config import GGUFVocabulary, TokenizerSpec
from firsttoken.core.errors import CheckpointError, InvalidRequest
from firsttoken.text.pretokenizers import KNOWN
from firsttoken.text.tokenizer import Tokenizer

TRICKY = [
    "",
    "Hello world! Café déjà vu — 123 😊",
    "I'll pay 2024-11-29",
    "a\n\n\n\n\nb\r\n\r\n  \n c   \t d   ",
    "<|im_start|>user\nHi<|im_end|>x",
    "<|im_start|>letter directly after, <|im_end|><|im_end|>",
    "<|im_start|",
    "def f(x):\n\treturn x ** 2  # ½ ² Ⅷ ٣٤ 一二三",
    "DON'T don't 'Tis we'Re ’s",
    "日本語のテキスト 한국어 עברית हिन्दी ไทย",
    "e\u0301 \u00e9 \u212b \ufb01 \u200d \u00a0 \u3000 👩‍👩‍👧 \x00 \x7f \ufeff",
    "   leading and trailing   ",
    "'''\"\"\"---===___",
]

# The cuts by another engine's published patterns, run by another regex engine: `\p{N}` first where digits stand alone.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
_CUTS = {
    "smollm": [r"\p{N}", _GPT2],
    "gpt-2": [_GPT2],
    "llama-bpe": [_CASED + r"\p{N}{1,3}" + _TAIL],
    "qwen2": [_CASED + r"\p{N}" + _TAIL],
}


def reference_ids(vocabulary: GGUFVocabulary, text: str) -> list[int]:
    """Byte-level BPE as first published: cut, spell as bytes, join the best-ranked pair until none is left."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(vocabulary.merges)}
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in alphabet}
    spelled |= {byte: chr(256 + at) for at, byte in enumerate(b for b in range(256) if b not in alphabet)}
    control = [token for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True) if kind == 3]
    result: list[int] = []
    for part in stdlib_re.split("(" + "|".join(map(stdlib_re.escape, control)) + ")", text):
        if part in control:
            result.append(ids[part])
            continue
        pieces = [part]
        for pattern in _CUTS[vocabulary.pre or ""]:
            pieces = [cut for piece in pieces for cut in _isolate(pattern, piece)]
        for piece in pieces:
            symbols = [spelled[byte] for byte in piece.encode()]
            if vocabulary.pre == "llama-bpe" and "".join(symbols) in ids:
                symbols = ["".join(symbols)]
            while len(symbols) > 1:
                rank, at = min((ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(pairwise(symbols)))
                if rank == len(ranks):
                    break
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            result += [ids[symbol] for symbol in symbols]
    return result


def _isolate(pattern: str, text: str) -> list[str]:
    cuts, end = [], 0
    for match in regex.finditer(pattern, text):
        cuts += [text[end : match.start()], match.group()]
        end = match.end()
    return [cut for cut in [*cuts, text[end:]] if cut]


@pytest.mark.parametrize("text", TRICKY)
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_ids_equal_an_independent_bpe(vocabulary: GGUFVocabulary, pre: str, text: str) -> None:
    named = msgspec.structs.replace(vocabulary, pre=pre)
    tokenizer = Tokenizer.build(TokenizerSpec(gguf=named, add_bos=False))
    assert list(tokenizer.encode(text)) == reference_ids(named, text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwen2_composes_characters_as_its_tokenizer_json_does(vocabulary: GGUFVocabulary) -> None:
    named = msgspec.structs.replace(vocabulary, pre="qwen2")
    tokenizer = Tokenizer.build(TokenizerSpec(gguf=named))
    assert list(tokenizer.encode("Cafe\u0301 12")) == reference_ids(named, "Caf\u00e9 12")


@given(st.text(max_size=40))
def test_any_text_encodes_as_the_reference_and_comes_back(byte_tokenizer: Tokenizer, vocabulary, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    assert list(ids) == reference_ids(vocabulary, text)
    assert byte_tokenizer.decode(ids) == text


@pytest.mark.model
def test_default_model_gives_the_ids_of_its_original_tokenizer(smollm2_vocabulary: GGUFVocabulary) -> None:
    tokenizer = Tokenizer.build(TokenizerSpec(gguf=smollm2_vocabulary, add_bos=False))
    known = {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }
    assert {text: list(tokenizer.encode(text)) for text in known} == known
    for text in TRICKY:
        assert list(tokenizer.encode(text)) == reference_ids(smollm2_vocabulary, text)


@pytest.mark.model
def test_folder_and_gguf_of_one_model_agree(smollm2_vocabulary: GGUFVocabulary, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    control = smollm2_vocabulary.tokens[:17]
    ids = {token: index for index, token in enumerate(smollm2_vocabulary.tokens)}
    added = [
        {"id": index, "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, token in enumerate(control)
    ]
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": smollm2_vocabulary.merges},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path))
    folder = Tokenizer.build(TokenizerSpec(tokenizer_json=str(path)))
    gguf = Tokenizer.build(TokenizerSpec(gguf=smollm2_vocabulary, add_bos=False))
    for text in TRICKY:
        expected = theirs.encode(text)
        assert list(folder.encode(text)) == expected
        assert list(gguf.encode(text)) == expected
        assert gguf.decode(expected) == folder.decode(expected) == theirs.decode(expected)


@pytest.mark.parametrize("name", [None, "default", "nonsense", ""])
def test_a_pre_tokenizer_that_says_nothing_is_refused(vocabulary: GGUFVocabulary, name: str | None) -> None:
    with pytest.raises(CheckpointError, match="smollm") as caught:
        Tokenizer.build(TokenizerSpec(gguf=msgspec.structs.replace(vocabulary, pre=name)))
    assert caught.value.field == "tokenizer.ggml.pre"
    assert caught.value.file == "tiny.gguf"


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_pre_tokenizer_keeps_the_text(vocabulary: GGUFVocabulary, name: str) -> None:
    tokenizer = Tokenizer.build(TokenizerSpec(gguf=msgspec.structs.replace(vocabulary, pre=name), add_bos=False))
    text = "It's 12,345 Wörter:\n\n  naïve FooBar_baz(x)/y\r\n\t日本 end  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "bert"}, "tokenizer.ggml.model"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges"),
        ({"merges": ["nothere neither"]}, "tokenizer.ggml.merges"),
        ({"token_types": [1, 2]}, "tokenizer.ggml.token_type"),
        ({"bos_id": 10**6}, "tokenizer.ggml"),
        ({"kind": "llama", "merges": [], "scores": [1.0]}, "tokenizer.ggml.scores"),
    ],
)
def test_a_vocabulary_that_does_not_hold_together_is_refused(vocabulary, changes: dict, field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.build(TokenizerSpec(gguf=msgspec.structs.replace(vocabulary, **changes)))
    assert caught.value.field == field


def test_control_text_can_be_kept_as_text(byte_tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user"
    parsed = byte_tokenizer.encode(text)
    plain = byte_tokenizer.encode(text, parse_special=False)
    assert parsed[0] == 1
    assert not set(plain) & byte_tokenizer.special_ids
    assert byte_tokenizer.decode(plain, skip_special_tokens=True) == text
    assert byte_tokenizer.decode(parsed, skip_special_tokens=True) == "user"


def test_user_defined_tokens_parse_but_are_text(vocabulary: GGUFVocabulary) -> None:
    kinds = list(vocabulary.token_types)
    kinds[1] = 4
    tokenizer = Tokenizer.build(TokenizerSpec(gguf=msgspec.structs.replace(vocabulary, token_types=kinds)))
    assert list(tokenizer.encode("<|im_start|>", parse_special=False)) == [1]
    assert tokenizer.decode([1], skip_special_tokens=True) == "<|im_start|>"
    assert tokenizer.special_ids == {0, 2}


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "ok \ud83d"])
def test_half_a_surrogate_pair_is_refused(byte_tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        byte_tokenizer.encode(text)
    assert caught.value.message.encode("utf-8")


# ------------------------------------------------------------------ begin and end tokens


def folder_spec(tmp_path: Path, vocabulary: GGUFVocabulary, *, template: str, **fields) -> TokenizerSpec:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    backend = Backend(models.BPE(vocab=ids, merges=[tuple(merge.split(" ")) for merge in vocabulary.merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in vocabulary.tokens[:3]])
    special = [(token, index) for index, token in enumerate(vocabulary.tokens[:3])]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return TokenizerSpec(tokenizer_json=str(path), bos_token="<|endoftext|>", eos_token="<|im_end|>", **fields)


def test_the_post_processor_decides_where_the_checkpoint_does_not(tmp_path: Path, vocabulary: GGUFVocabulary) -> None:
    spec = folder_spec(tmp_path, vocabulary, template="<|endoftext|> $A <|im_end|>")
    tokenizer = Tokenizer.build(spec)
    bare = list(tokenizer.encode("Hello there, dog", add_special_tokens=False))
    assert len(bare) > 4  # neither truncated nor padded, whatever the file says
    assert list(tokenizer.encode("Hello there, dog")) == [0, *bare, 2]
    assert list(tokenizer.encode("")) == [0, 2]
    without = Tokenizer.build(msgspec.structs.replace(spec, add_bos=False, add_eos=False))
    assert list(without.encode("Hello there, dog")) == bare


@pytest.mark.parametrize("add_bos", [None, True])
def test_exactly_one_bos(tmp_path: Path, vocabulary: GGUFVocabulary, add_bos: bool | None) -> None:
    tokenizer = Tokenizer.build(folder_spec(tmp_path, vocabulary, template="<|endoftext|> $A", add_bos=add_bos))
    once = list(tokenizer.encode("Hi"))
    assert once.count(0) == 1
    assert list(tokenizer.encode("<|endoftext|>Hi")) == once
    assert list(tokenizer.encode("<|endoftext|>Hi", add_special_tokens=False)) == once


def test_llama3_vocabularies_begin_with_bos_unless_the_file_says_no(vocabulary: GGUFVocabulary) -> None:
    named = msgspec.structs.replace(vocabulary, pre="llama-bpe")
    assert Tokenizer.build(TokenizerSpec(gguf=named)).encode("Hi")[0] == 0
    assert Tokenizer.build(TokenizerSpec(gguf=named, add_bos=False)).encode("Hi")[0] != 0


def test_asking_for_a_bos_that_does_not_exist_is_refused(vocabulary: GGUFVocabulary) -> None:
    with pytest.raises(CheckpointError, match="names none"):
        Tokenizer.build(TokenizerSpec(gguf=msgspec.structs.replace(vocabulary, bos_id=None), add_bos=True))
    with pytest.raises(CheckpointError, match="not in the vocabulary"):
        Tokenizer.build(TokenizerSpec(gguf=vocabulary, bos_token="<nope>"))


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"model": {"type": "BPE"}}', b"\xff\xfe"])
def test_a_damaged_tokenizer_json_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.build(TokenizerSpec(tokenizer_json=str(path)))


# ------------------------------------------------------------------ single tokens


def test_ids_outside_the_vocabulary(byte_tokenizer: Tokenizer) -> None:
    size = byte_tokenizer.vocab_size
    assert byte_tokenizer.decode([size, size + 10**9]) == ""  # a model's padded table may give such ids
    with pytest.raises(InvalidRequest, match="negative"):
        byte_tokenizer.decode([-1])


def test_token_bytes_and_text(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("ď🔥 fox")
    assert b"".join(byte_tokenizer.token_bytes(token) for token in ids) == "ď🔥 fox".encode()
    partial = next(token for token in ids if byte_tokenizer.token_bytes(token)[0] >= 0x80)
    assert byte_tokenizer.token_text(partial)
    assert byte_tokenizer.max_token_chars == max(map(len, byte_tokenizer._names))


def test_every_byte_has_a_token_and_comes_back(byte_tokenizer: Tokenizer, vocabulary: GGUFVocabulary) -> None:
    single = {byte_tokenizer.token_bytes(token) for token in range(byte_tokenizer.vocab_size)}
    assert {bytes((byte,)) for byte in range(256)} <= single


# ------------------------------------------------------------------ SentencePiece


def sentencepiece_reference(vocabulary: GGUFVocabulary, text: str) -> list[int]:
    """SentencePiece BPE: join the neighbours whose union scores highest, leftmost first; unknown characters by byte."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        best = None
        for at in range(len(symbols) - 1):
            joined = symbols[at] + symbols[at + 1]
            if joined in ids and (best is None or vocabulary.scores[ids[joined]] > vocabulary.scores[ids[best[1]]]):
                best = (at, joined)
        if best is None:
            break
        symbols[best[0] : best[0] + 2] = [best[1]]
    result = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result


@settings(max_examples=300)
@given(st.text(alphabet="thear nd.ď🔥 ", max_size=24))
def test_sentencepiece_ids_equal_an_independent_bpe(
    sentencepiece_tokenizer, sentencepiece_vocabulary, text: str
) -> None:
    ids = sentencepiece_tokenizer.encode(text, add_special_tokens=False)
    assert list(ids) == sentencepiece_reference(sentencepiece_vocabulary, text)
    assert list(sentencepiece_tokenizer.encode(text)) == [1, *ids]
    assert sentencepiece_tokenizer.decode(ids) == text
