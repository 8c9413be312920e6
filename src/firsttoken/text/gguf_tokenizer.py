"""A `tokenizers.Tokenizer` from the vocabulary in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from firsttoken.checkpoint.model_config import GGUFVocabulary
from firsttoken.core.errors import CheckpointError
from firsttoken.text.pretokenizers import pre_tokenization

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_WORD_START = "\u2581"


def build_backend(vocabulary: GGUFVocabulary) -> tuple[Backend, bool]:
    """The backend, and whether it prepends BOS where the file does not say.

    Kinds: "gpt2" (byte-level BPE, cut by the pre-tokenizer that the file names) and "llama" (SentencePiece BPE with
    byte fallback). Raises `CheckpointError` for anything else and for a vocabulary that does not hold together.
    """
    if len(vocabulary.token_types) not in (0, len(vocabulary.tokens)):
        raise CheckpointError(
            f"{len(vocabulary.token_types)} token types for {len(vocabulary.tokens)} tokens",
            file=vocabulary.file or None,
            field="tokenizer.ggml.token_type",
        )
    for field in ("bos_id", "eos_id", "unk_id"):
        index = getattr(vocabulary, field)
        if index is not None and not 0 <= index < len(vocabulary.tokens):
            raise CheckpointError(
                f"{field} {index} is outside the vocabulary of {len(vocabulary.tokens)} tokens",
                file=vocabulary.file or None,
                field="tokenizer.ggml",
            )
    if vocabulary.kind == "gpt2":
        backend, add_bos = _byte_level(vocabulary)
    elif vocabulary.kind == "llama":
        backend, add_bos = _sentencepiece(vocabulary), True
    else:
        raise CheckpointError(
            f"tokenizer model {vocabulary.kind!r} is not supported; known are 'gpt2' and 'llama'",
            file=vocabulary.file or None,
            field="tokenizer.ggml.model",
        )
    _register_added(backend, vocabulary)
    return backend, add_bos


def _byte_level(vocabulary: GGUFVocabulary) -> tuple[Backend, bool]:
    pre = pre_tokenization(vocabulary.pre, file=vocabulary.file)
    backend = Backend(_bpe(vocabulary, _split_merges(vocabulary), ignore_merges=pre.ignore_merges))
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(vocabulary: GGUFVocabulary) -> Backend:
    unk = None if vocabulary.unk_id is None else vocabulary.tokens[vocabulary.unk_id]
    merges = _split_merges(vocabulary) if vocabulary.merges else _merges_from_scores(vocabulary)
    backend = Backend(_bpe(vocabulary, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD_START), normalizers.Replace(" ", _WORD_START)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _bpe(vocabulary: GGUFVocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception for a merge outside the vocabulary
        raise CheckpointError(
            f"the merges do not fit the vocabulary: {error}",
            file=vocabulary.file or None,
            field="tokenizer.ggml.merges",
        ) from error


def _split_merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    try:
        return [(left, right) for left, right in (merge.split(" ") for merge in vocabulary.merges)]
    except ValueError:
        bad = next(index for index, merge in enumerate(vocabulary.merges) if merge.count(" ") != 1)
        raise CheckpointError(
            f"merge {bad} is {vocabulary.merges[bad][:80]!r}; expected two tokens with one space between",
            file=vocabulary.file or None,
            field="tokenizer.ggml.merges",
        ) from None


def _merges_from_scores(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: it joins the neighbours whose union scores highest. Every way to build a piece
    from two others is therefore a merge, ranked by the piece's score."""
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{len(vocabulary.scores)} scores for {len(vocabulary.tokens)} tokens",
            file=vocabulary.file or None,
            field="tokenizer.ggml.scores",
        )
    special = {_UNKNOWN, _CONTROL, _BYTE}
    types = vocabulary.token_types or [1] * len(vocabulary.tokens)
    pieces = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, types, strict=True)
        if kind not in special
    }
    ranked: list[tuple[float, str, str]] = []
    for piece, score in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((score, left, right))
    ranked.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in ranked]


def _register_added(backend: Backend, vocabulary: GGUFVocabulary) -> None:
    """Control tokens parse as one token wherever they stand; user-defined ones too, but they count as text."""
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _of_type(vocabulary, _CONTROL)])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in _of_type(vocabulary, _USER_DEFINED)])


def _of_type(vocabulary: GGUFVocabulary, kind: int) -> Iterator[str]:
    return (token for token, found in zip(vocabulary.tokens, vocabulary.token_types, strict=False) if found == kind)
