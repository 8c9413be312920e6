"""Small tokenizers of every kind, trained on the spot, and the default model's real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.checkpoint.model_config import GGUFVocabulary, TokenizerSpec
from firsttoken.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "I'll pay 2024-11-29; you've paid 1,234.50 already. They're here, we're there.",
    "def main():\n    for i in range(10):\n        print(i)\n\n\n    return None\n",
    "Café déjà vu, naïve façade, größer, ďábel, 🔥🔥 flames, 日本語のテキスト, 한국어, עברית",
] * 4
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def trained_vocabulary(pre: str = "smollm") -> GGUFVocabulary:
    """A byte-level vocabulary with three control tokens in front, as GGUF files hold it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return GGUFVocabulary(
        kind="gpt2",
        pre=pre,
        tokens=tokens,
        merges=[" ".join(merge) for merge in model["merges"]],
        token_types=[3 if token in CONTROL else 1 for token in tokens],
        bos_id=0,
        eos_id=2,
        file="tiny.gguf",
    )


@pytest.fixture(scope="session")
def vocabulary() -> GGUFVocabulary:
    return trained_vocabulary()


@pytest.fixture(scope="session")
def byte_tokenizer(vocabulary: GGUFVocabulary) -> Tokenizer:
    return Tokenizer.build(TokenizerSpec(gguf=vocabulary, add_bos=False))


@pytest.fixture(scope="session")
def sentencepiece_vocabulary() -> GGUFVocabulary:
    """Byte pieces and word pieces with distinct scores, as SentencePiece's BPE trainer gives them."""
    words = ("▁the", "the", "th", "he", "▁t", "er", "▁there", "ther", "re", "▁a", "an", "and", "▁and", "at", "hat")
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!'"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(letters))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    return GGUFVocabulary(
        kind="llama", pre=None, tokens=tokens, merges=[], token_types=kinds, scores=scores, bos_id=1, eos_id=2, unk_id=0
    )


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_vocabulary: GGUFVocabulary) -> Tokenizer:
    return Tokenizer.build(TokenizerSpec(gguf=sentencepiece_vocabulary))


@pytest.fixture(scope="session")
def metaspace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json whose decoder cannot be told token by token."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    path = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="session")
def smollm2_vocabulary() -> GGUFVocabulary:
    spec = open_checkpoint("smollm2", offline=True).tokenizer
    assert spec is not None
    assert spec.gguf is not None
    return spec.gguf
