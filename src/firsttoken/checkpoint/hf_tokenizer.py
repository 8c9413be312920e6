"""What a Hugging Face folder says about its tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from firsttoken.checkpoint.json_files import JSONObject, decode_json, read_bytes, read_object, read_text
from firsttoken.checkpoint.model_config import TokenizerSpec
from firsttoken.core.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TOKENIZER_BYTES = 256 << 20


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The little of ``tokenizer.json`` that is needed here; the rest is skipped, not built."""

    added_tokens: list[_AddedToken] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


class _Model(msgspec.Struct, frozen=True):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


def read_tokenizer_config(folder: Path) -> JSONObject:
    """``tokenizer_config.json``, empty when there is none."""
    path = folder / TOKENIZER_CONFIG_FILE
    return read_object(path) if path.is_file() else JSONObject(str(path), {})


def read_tokenizer(folder: Path, config: JSONObject) -> tuple[TokenizerSpec | None, tuple[int, ...]]:
    """The tokenizer and its own end token's id (as a tuple of none or one); None when the folder has none.

    Raises `CheckpointError` for damaged files.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return None, ()
    raw = read_bytes(path, MAX_TOKENIZER_BYTES)
    content: _TokenizerFile = decode_json(raw, _TokenizerFile, str(path))
    eos = _token_text(config, "eos_token")
    spec = TokenizerSpec(
        tokenizer_json=str(path),
        bos_token=_token_text(config, "bos_token"),
        eos_token=eos,
        pad_token=_token_text(config, "pad_token"),
        unk_token=_token_text(config, "unk_token"),
        # Not what tokenizer_config.json says: the post-processor in tokenizer.json was built from it and decides.
        add_bos=None,
        add_eos=None,
        special_tokens=tuple(token.content for token in content.added_tokens if token.special),
    )
    return spec, _id_of(eos, content, str(path))


def _id_of(text: str | None, content: _TokenizerFile, file: str) -> tuple[int, ...]:
    if text is None:
        return ()
    for token in content.added_tokens:
        if token.content == text:
            return (token.id,)
    model: _Model = decode_json(content.model, _Model, file, "model")
    # Unigram vocabularies are lists of [text, score], the others map text to id.
    if bytes(model.vocab)[:1] == b"{":
        vocab: dict[str, int] = decode_json(model.vocab, dict[str, int], file, "model.vocab")
        return (vocab[text],) if text in vocab else ()
    pieces: list[tuple[str, float]] = decode_json(model.vocab, list[tuple[str, float]], file, "model.vocab")
    return next(((index,) for index, (piece, _) in enumerate(pieces) if piece == text), ())


def _token_text(config: JSONObject, key: str) -> str | None:
    """A special token is a string, or an object with its text as ``content``."""
    value: Any = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise config.fail(key, f"must be a token's text, got {value!r:.80}")
    return value


def read_chat_template(folder: Path, config: JSONObject) -> str | None:
    """``chat_template.jinja``, else the template in ``tokenizer_config.json`` (of several, the one named "default")."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return read_text(path)
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        template = named.get("default")
        if isinstance(template, str):
            return template
        raise config.fail("chat_template", f"has no template named 'default' (named are {list(named)!r:.80})")
    raise CheckpointError(
        f"must be a template or a list of named ones, got {value!r:.80}", file=config.file, field="chat_template"
    )
