"""How text is cut before BPE, by the name that GGUF files give (``tokenizer.ggml.pre``).

The names are llama.cpp's; what each one does follows the ``tokenizer.json`` of the model family that it stands for,
because that is the tokenizer the model was trained with. A name that is not listed is refused: with the wrong cut
the ids differ, the model still answers, and nobody notices.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from firsttoken.core.errors import CheckpointError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """``pattern`` None is GPT-2's own; ``digits`` cuts every digit off first; ``ignore_merges`` takes a piece that
    is a whole token as it is; ``add_bos`` holds where the file does not say."""

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        if self.pattern is not None:
            cut = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated", invert=False)
            return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if self.digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        return byte_level

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenization()
_DIGITS = PreTokenization(digits=True)
_LLAMA_BPE = PreTokenization(pattern=_LLAMA3, ignore_merges=True, add_bos=True)

KNOWN = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": PreTokenization(pattern=_QWEN2, nfc=True),
    "tekken": PreTokenization(pattern=_TEKKEN, ignore_merges=True, add_bos=True),
}


def pre_tokenization(name: str | None, *, file: str) -> PreTokenization:
    """Look ``name`` up; raises `CheckpointError` for a missing, "default" or unknown one."""
    known = KNOWN.get(name or "")
    if known is None:
        what = "is missing" if name is None else f"is {name!r}, which does not say how text is cut"
        raise CheckpointError(
            f"the pre-tokenizer {what}; known are {', '.join(KNOWN)}. Convert the model again with a current "
            "converter, or use its Hugging Face folder",
            file=file or None,
            field="tokenizer.ggml.pre",
        )
    return known
