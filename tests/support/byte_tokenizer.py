"""A tokenizer small enough to reason about: token id = byte, then three control tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from firsttoken.checkpoint.model_config import GenerationConfig, TokenizerSpec
from firsttoken.text import tokenizer as text

BOS, EOS, EOT = 256, 257, 258
VOCAB_SIZE = 259
GENERATION = GenerationConfig(eos_token_ids=(EOS, EOT), bos_token_id=BOS)

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE, by byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelled = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in spelled]
    spelled |= {byte: chr(0x100 + position) for position, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


def byte_tokenizer_spec(folder: Path, more: tuple[str, ...] = ()) -> TokenizerSpec:
    """Writes ``tokenizer.json`` into ``folder``; ``more`` control tokens get the ids from `VOCAB_SIZE` on."""
    backend = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<|bos|>", "<|eos|>", "<|eot|>", *more]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return TokenizerSpec(
        tokenizer_json=str(path), bos_token="<|bos|>", eos_token="<|eos|>", special_tokens=tuple(names)
    )


def byte_tokenizer(folder: Path, more: tuple[str, ...] = ()) -> text.Tokenizer:
    return text.Tokenizer.build(byte_tokenizer_spec(folder, more))
