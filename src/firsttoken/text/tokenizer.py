"""Text to token ids and back, on the `tokenizers` library."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from firsttoken.checkpoint.model_config import TokenizerSpec
from firsttoken.core.errors import CheckpointError, InvalidRequest
from firsttoken.text.boundaries import boundary_tokens
from firsttoken.text.byte_level import token_to_bytes
from firsttoken.text.control_tokens import ControlTokens
from firsttoken.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from firsttoken.text.gguf_tokenizer import build_backend

_WORD_START = "\u2581"


class _FileParts(msgspec.Struct):
    """The parts of a ``tokenizer.json`` that are read here; the library reads the rest."""

    decoder: dict[str, Any] | None = None


class _ByteTable(dict[int, bytes]):
    """Token id -> bytes, filled when first asked, so that building a tokenizer costs nothing for it. Only ids that
    have bytes are kept, so it is bounded by the vocabulary whatever ids are asked for."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        super().__init__()
        self._spell = spell
        self.texts: dict[int, str] = {}  # for `ByteDetokenizer`

    def __missing__(self, token: int) -> bytes:
        found = self._spell(token)
        if found:
            self[token] = found
        return found


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads; `encode` releases the GIL while it works.

    Attributes: ``vocab_size`` (ids run from 0 to ``vocab_size - 1``; the model's own table may be padded beyond),
    ``bos_id`` and ``eos_id`` (None where the checkpoint names none), ``special_ids`` (control tokens).
    """

    def __init__(self, backend: Backend, decoder: dict[str, Any] | None, spec: TokenizerSpec, add_bos: bool) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        _mark_special(backend, spec.special_tokens)
        names = spec.gguf.tokens if spec.gguf else _names(backend)
        self._names: Sequence[str | None] = names
        self.vocab_size = len(names)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        bos_id, eos_id = (spec.gguf.bos_id, spec.gguf.eos_id) if spec.gguf else (None, None)
        self.bos_id = _token_id(backend, "bos_token", spec.bos_token, bos_id)
        self.eos_id = _token_id(backend, "eos_token", spec.eos_token, eos_id)
        self._prefix, self._suffix = _affixes(backend)
        if spec.add_bos is not None or add_bos:
            self._prefix = _with(self._prefix, self.bos_id, add_bos if spec.add_bos is None else spec.add_bos)
        if spec.add_eos is not None:
            self._suffix = _with(self._suffix, self.eos_id, spec.add_eos)
        self._spell, self._strip_start = _speller(decoder)
        self._bytes = _ByteTable(self._spell_token)
        self._visible_bytes: dict[frozenset[int], _ByteTable] = {}

    @classmethod
    def build(cls, spec: TokenizerSpec) -> Tokenizer:
        """Build from ``spec``; raises `CheckpointError` naming file and field when it cannot be done exactly."""
        if spec.gguf is not None:
            backend, add_bos = build_backend(spec.gguf)
            kind = {"type": "ByteLevel"} if spec.gguf.kind == "gpt2" else _SENTENCEPIECE
            return cls(backend, kind, spec, add_bos)
        if spec.tokenizer_json is None:
            raise CheckpointError("the checkpoint has no tokenizer: a tokenizer.json file is needed")
        try:
            raw = Path(spec.tokenizer_json).read_bytes()
            parts = msgspec.json.decode(raw, type=_FileParts)
            backend = Backend.from_str(raw.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"not a readable tokenizer: {error}", file=spec.tokenizer_json) from error
        return cls(backend, parts.decoder, spec, add_bos=False)

    # ------------------------------------------------------------------ encode

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> array[int]:
        """Token ids of ``text`` as ``array('I')``.

        ``add_special_tokens`` adds what the checkpoint puts around a text; BOS is not added where ``text`` itself
        begins with it. With ``parse_special=False`` text that looks like a control token stays text. Raises
        `InvalidRequest` when ``text`` is not valid Unicode.
        """
        try:
            if parse_special:
                # The batch call is the one that releases the GIL.
                ids = array("I", self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            else:
                ids = self._controls.encode(text)
        except TypeError:
            check_unicode(text, param="prompt")
            raise
        return self.with_affixes(ids) if add_special_tokens else ids

    def plain_ids(self, text: str) -> list[int]:
        """Token ids of a text by itself, in which nothing is a control token."""
        return self.encode(text, add_special_tokens=False, parse_special=False).tolist()

    def encode_each(self, texts: Sequence[str]) -> list[array[int]]:
        """Token ids of each text by itself, with nothing added, in one call of the library. Raises `InvalidRequest`
        when one is not valid Unicode."""
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                check_unicode(text, param="prompt")
            raise
        return [array("I", one.ids) for one in found]

    def with_affixes(self, ids: array[int]) -> array[int]:
        """``ids`` of a text with what the checkpoint puts around one; no second BOS where they begin with it."""
        prefix = self._prefix
        if not prefix and not self._suffix:
            return ids
        if prefix and ids and prefix[-1] == ids[0] == self.bos_id:
            prefix = prefix[:-1]
        return array("I", [*prefix, *ids, *self._suffix])

    def to_json(self) -> str:
        """A ``tokenizer.json`` that encodes as this does, what is put around a text included."""
        backend = Backend.from_str(self._backend.to_str())
        around = {name: index for index in (*self._prefix, *self._suffix) if (name := self._names[index]) is not None}
        if around:
            before, after = ([str(self._names[index]) for index in ids] for ids in (self._prefix, self._suffix))
            backend.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after], special_tokens=list(around.items())
            )
        return backend.to_str()

    def boundaries(self, gaps: Sequence[str]) -> tuple[str, ...]:
        """The tokens before which a text may be cut and tokenised in pieces; see `boundaries.boundary_tokens`."""
        return boundary_tokens(self._backend, gaps)

    def control_tokens(self, writes: Collection[str] = ()) -> ControlTokens:
        """Those that a chat template which ``writes`` these texts can make, and nobody else may."""
        return ControlTokens(self._backend, writes)

    @cached_property
    def _controls(self) -> ControlTokens:
        return self.control_tokens()

    # ------------------------------------------------------------------ decode

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ``ids``; ill-formed bytes become U+FFFD. An id without a text (beyond ``vocab_size``) gives
        nothing; raises `InvalidRequest` for a negative one."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(list(ids)) + detokenizer.finish()

    def detokenizer(
        self, *, skip_special_tokens: bool = True, continuation: bool = False, shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A fresh incremental detokenizer. ``continuation``: the text goes on after a prompt, so that a
        SentencePiece vocabulary keeps the space before its first word. ``shown``: control tokens that are not skipped;
        of such sets there should be few, since a table is kept for each."""
        if self._spell is None:
            skipped = self.special_ids - shown if skip_special_tokens else frozenset()
            return WindowDetokenizer(
                lambda ids: self._backend.decode([i for i in ids if i not in skipped], skip_special_tokens=False)
            )
        table = self._table_showing(shown) if skip_special_tokens else self._bytes
        return ByteDetokenizer(table, table.texts, strip_start=self._strip_start and not continuation)

    def _table_showing(self, shown: frozenset[int]) -> _ByteTable:
        table = self._visible_bytes.get(shown)
        if table is None:
            hidden = self.special_ids - shown
            table = _ByteTable(lambda token: b"" if token in hidden else self._bytes[token])
            self._visible_bytes[shown] = table
        return table

    def special_id(self, text: str) -> int | None:
        """The control token that is spelt so; None where there is none."""
        found = self._backend.token_to_id(text)
        return found if found in self.special_ids else None

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for (empty beyond the vocabulary); raises `InvalidRequest` if negative."""
        return self._bytes[token]

    def _spell_token(self, token: int) -> bytes:
        if token < 0:
            raise InvalidRequest(f"token id {token} is negative; ids run from 0 to {self.vocab_size - 1}")
        spelling = self._names[token] if token < self.vocab_size else None
        if spelling is None:  # beyond the vocabulary, or a gap in it
            return b""
        if self._spell is None:
            return self._backend.decode([token], skip_special_tokens=False).encode("utf-8")
        return self._spell(spelling)

    def token_text(self, token: int) -> str:
        """The text of one token on its own; bytes that are not a whole character become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token: a text of more than n times as many cannot fit in n tokens."""
        return max((len(name) for name in self._names if name is not None), default=1)


def check_unicode(text: str, *, param: str) -> None:
    """Raises `InvalidRequest` when ``text`` holds half of a surrogate pair (and so has no UTF-8 form)."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} is not valid Unicode: half a surrogate pair (U+{ord(text[error.start]):04X}) "
            f"at character {error.start}",
            param=param,
        ) from None


_SENTENCEPIECE: dict[str, Any] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": _WORD_START}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def _speller(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes] | None, bool]:
    """How the decoder spells one token in bytes (None: it cannot be told token by token), and whether it strips one
    leading space."""
    if decoder is not None and decoder.get("type") == "ByteLevel":
        return token_to_bytes, False
    steps = _SENTENCEPIECE["decoders"]
    if decoder is not None and decoder.get("type") == "Sequence" and decoder.get("decoders") in (steps, steps[:3]):
        return _sentencepiece_bytes, len(decoder["decoders"]) == len(steps)
    return None, False


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes((int(token[3:5], 16),))
        except ValueError:
            pass
    return token.replace(_WORD_START, " ").encode("utf-8")


def _mark_special(backend: Backend, tokens: tuple[str, ...]) -> None:
    """Declare control tokens that the files list apart from the vocabulary. One that has no id is left out: it would
    get an id that the model does not have. One that is declared already keeps the flags it has."""
    declared = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    new = [token for token in tokens if token not in declared and backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in new])


def _token_id(backend: Backend, name: str, token: str | None, index: int | None) -> int | None:
    if token is None:
        return index
    found = backend.token_to_id(token)
    if found is None:
        raise CheckpointError(f"{token!r} is not in the vocabulary", field=name)
    return found


def _affixes(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer's own post-processor puts before and after a text."""
    full = backend.encode("a", add_special_tokens=True)
    text = [index for index, added in enumerate(full.special_tokens_mask) if not added]
    if (
        full.ids[slice(text[0], text[-1] + 1) if text else slice(0)]
        != backend.encode("a", add_special_tokens=False).ids
    ):
        raise CheckpointError("the post-processor rewrites the text it is given; only adding tokens is supported")
    return (tuple(full.ids[: text[0]]), tuple(full.ids[text[-1] + 1 :])) if text else (tuple(full.ids), ())


def _names(backend: Backend) -> list[str | None]:
    """Every id's spelling; None where an id has none."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    names: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for name, index in vocabulary.items():
        names[index] = name
    return names


def _with(affix: tuple[int, ...], token: int | None, wanted: bool) -> tuple[int, ...]:
    """``affix`` with exactly one ``token``, or with none."""
    rest = tuple(index for index in affix if index != token)
    if not wanted:
        return rest
    if token is None:
        raise CheckpointError("the checkpoint asks for a begin or end token on every text but names none")
    return (token, *rest)
