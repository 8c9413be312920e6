"""The model's configuration, generation defaults and tokenizer data out of GGUF metadata."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from firsttoken.checkpoint.families import FAMILIES, FOLDER_ONLY, GGUF_ARCHITECTURES, check_config
from firsttoken.checkpoint.generation import check_generation
from firsttoken.checkpoint.gguf import GGUFFile
from firsttoken.checkpoint.gguf_metadata import GGUFMetadata
from firsttoken.checkpoint.model_config import (
    GenerationConfig,
    GGUFVocabulary,
    ModelConfig,
    RopeConfig,
    TokenizerSpec,
)

ROPE_FACTORS = "rope_freqs.weight"

# The end markers of the known families' chat formats. GGUF metadata names one or two end tokens where the original
# generation_config.json lists more; a control token with one of these texts ends the text as well.
END_TOKENS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>"}
)
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_CONTROL = 3
_FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NO_TOKEN = 0xFFFFFFFF  # written by some converters for "none"


def read_config(file: GGUFFile) -> ModelConfig:
    """`ModelConfig` of a llama, qwen2 or qwen3 file; raises `CheckpointError` for what cannot be honoured."""
    meta = file.metadata
    arch = meta.text("general.architecture")
    if arch in FOLDER_ONLY:
        raise meta.fail(
            "general.architecture", f"{arch} models are not read from GGUF files: use the folder in Hugging Face layout"
        )
    if arch not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise meta.fail("general.architecture", f"{arch!r} is not a known architecture; known are {known}")
    _refuse_unsupported(meta, arch)
    heads = meta.integer(f"{arch}.attention.head_count")
    hidden = meta.integer(f"{arch}.embedding_length")
    if heads < 1:
        raise meta.fail(f"{arch}.attention.head_count", f"is {heads}, must be 1 or more")
    family = FAMILIES[GGUF_ARCHITECTURES[arch]]
    names = _key_names(arch)
    config = ModelConfig(
        architecture=GGUF_ARCHITECTURES[arch],
        vocab_size=_vocab_size(file, arch),
        hidden_size=hidden,
        intermediate_size=meta.integer(names["intermediate_size"]),
        num_layers=meta.integer(names["num_layers"]),
        num_heads=heads,
        num_kv_heads=meta.integer(names["num_kv_heads"], default=heads),
        head_dim=_head_dim(meta, arch, hidden, heads),
        rms_norm_eps=meta.number(names["rms_norm_eps"]),
        max_position=meta.integer(names["max_position"]),
        rope=RopeConfig(),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=bool(family.attention_bias) or "blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=family.qk_norm,
        dtype=_weights_dtype(file),
    )
    rope = _read_rope(file, arch, config)
    return check_config(msgspec.structs.replace(config, rope=rope), meta.file, names)


def _key_names(arch: str) -> dict[str, str]:
    return {
        "vocab_size": f"{arch}.vocab_size",
        "hidden_size": f"{arch}.embedding_length",
        "intermediate_size": f"{arch}.feed_forward_length",
        "num_layers": f"{arch}.block_count",
        "num_heads": f"{arch}.attention.head_count",
        "num_kv_heads": f"{arch}.attention.head_count_kv",
        "head_dim": f"{arch}.attention.key_length",
        "rms_norm_eps": f"{arch}.attention.layer_norm_rms_epsilon",
        "max_position": f"{arch}.context_length",
        "rope": f"{arch}.rope",
    }


def _refuse_unsupported(meta: GGUFMetadata, arch: str) -> None:
    parts = meta.integer("split.count", default=1)
    if parts > 1:
        raise meta.fail("split.count", f"the file is one of {parts} parts: merge them with llama-gguf-split --merge")
    kind = meta.text("general.type", default="model")
    if kind != "model":
        raise meta.fail("general.type", f"the file holds {kind!r:.80}, not a model")
    if meta.integer(f"{arch}.expert_count", default=0) > 0:
        raise meta.fail(f"{arch}.expert_count", "the model is a mixture of experts, which is not supported")
    window = meta.optional_integer(f"{arch}.attention.sliding_window")
    length = meta.integer(f"{arch}.context_length")
    if window and window < length:
        raise meta.fail(
            f"{arch}.attention.sliding_window",
            f"attention over a window of {window} tokens (context {length}) is not supported",
        )
    for key, neutral in (("attention.scale", 0.0), ("logit_scale", 0.0), ("embedding_scale", 0.0)):
        value = meta.number(f"{arch}.{key}", default=neutral)
        if value != neutral:
            raise meta.fail(f"{arch}.{key}", f"is {value}, which is not supported")


def _vocab_size(file: GGUFFile, arch: str) -> int:
    declared = file.metadata.optional_integer(f"{arch}.vocab_size")
    return file.metadata.count("tokenizer.ggml.tokens") if declared is None else declared


def _head_dim(meta: GGUFMetadata, arch: str, hidden: int, heads: int) -> int:
    key, value = f"{arch}.attention.key_length", f"{arch}.attention.value_length"
    head_dim = meta.optional_integer(key)
    if head_dim is None:
        if hidden % heads:
            raise meta.fail(key, f"is missing, and {heads} heads do not divide the embedding length {hidden}")
        head_dim = hidden // heads
    value_dim = meta.integer(value, default=head_dim)
    if value_dim != head_dim:
        raise meta.fail(value, f"is {value_dim} where keys have {head_dim}; different sizes are not supported")
    rotary = meta.integer(f"{arch}.rope.dimension_count", default=head_dim)
    if rotary != head_dim:
        raise meta.fail(
            f"{arch}.rope.dimension_count", f"is {rotary} of {head_dim}; partial rotary embedding is not supported"
        )
    return head_dim


def _weights_dtype(file: GGUFFile) -> str:
    """The type most matrices have; packed ones count as bfloat16, which the known models were trained in."""
    types = Counter(tensor.type for tensor in file.tensors.values() if len(tensor.shape) == 2)
    most = types.most_common(1)
    return _FLOAT_DTYPES.get(most[0][0], "bfloat16") if most else "bfloat16"


def _read_rope(file: GGUFFile, arch: str, config: ModelConfig) -> RopeConfig:
    meta, prefix = file.metadata, f"{arch}.rope"
    theta = meta.number(f"{prefix}.freq_base", default=10000.0)
    kind = meta.text(f"{prefix}.scaling.type", default="none")
    factor = meta.number(f"{prefix}.scaling.factor", default=meta.number(f"{prefix}.scale_linear", default=1.0))
    if ROPE_FACTORS in file.tensors:
        if kind not in ("none", "linear") or factor not in (0.0, 1.0):
            raise meta.fail(
                ROPE_FACTORS, f"comes with rope scaling {kind!r} by {factor}, together they are unsupported"
            )
        return _rope_from_factors(file, theta, config.head_dim)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        return _yarn(meta, prefix, theta, factor)
    raise meta.fail(f"{prefix}.scaling.type", f"{kind!r} is not supported; supported are none, linear, yarn")


def _yarn(meta: GGUFMetadata, prefix: str, theta: float, factor: float) -> RopeConfig:
    for key, neutral in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0)):
        value = meta.number(f"{prefix}.scaling.{key}", default=neutral)
        if value != neutral:
            raise meta.fail(f"{prefix}.scaling.{key}", f"is {value}, which is not supported")
    # llama.cpp multiplies its own magnitude, 0.1 ln(factor) + 1, by this; Hugging Face names the product.
    multiplier = meta.number(
        f"{prefix}.scaling.yarn_attn_factor", default=meta.number(f"{prefix}.scaling.attn_factor", default=1.0)
    )
    attention = None if multiplier == 1.0 else multiplier * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=meta.integer(f"{prefix}.scaling.original_context_length"),
        beta_fast=meta.number(f"{prefix}.scaling.yarn_beta_fast", default=32.0),
        beta_slow=meta.number(f"{prefix}.scaling.yarn_beta_slow", default=1.0),
        attention_factor=attention,
    )


def _rope_from_factors(file: GGUFFile, theta: float, head_dim: int) -> RopeConfig:
    """Converters write Llama 3's rope scaling as one divisor a frequency; find the parameters that give them.

    Raises `CheckpointError` when they are not those of Llama 3's rule with its published constants
    (low 1, high 4, original length 8192), whatever its factor.
    """
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise file.metadata.fail(
            ROPE_FACTORS, f"is {tensor.type} of shape {list(tensor.shape)}, expected F32 of [{head_dim // 2}]"
        )
    factors = file.raw(tensor).view(np.float32)
    if np.all(factors == 1.0):
        return RopeConfig(theta=theta)
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=float(factors.max()),
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    if not np.allclose(factors, llama3_divisors(rope, head_dim), rtol=1e-3):
        raise file.metadata.fail(ROPE_FACTORS, "holds frequency factors other than Llama 3's, which are not supported")
    return rope


def llama3_divisors(rope: RopeConfig, head_dim: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What Llama 3's rule divides each frequency by, ``[head_dim / 2]`` (Llama 3.1 reference code, `apply_scaling`)."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = rope.original_max_position * frequencies / (2 * np.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(share, 0.0, 1.0)
    divisors: np.ndarray[tuple[int], np.dtype[np.float64]] = 1.0 / ((1.0 - kept) / rope.factor + kept)
    return divisors


def read_tokenizer(file: GGUFFile) -> TokenizerSpec:
    """The vocabulary as GGUF holds it. Raises `CheckpointError` for a missing or inconsistent one."""
    meta = file.metadata
    tokens = meta.strings("tokenizer.ggml.tokens")
    vocabulary = GGUFVocabulary(
        kind=meta.text("tokenizer.ggml.model"),
        pre=meta.optional_text("tokenizer.ggml.pre"),
        tokens=tokens,
        merges=meta.strings("tokenizer.ggml.merges") if "tokenizer.ggml.merges" in meta else [],
        token_types=_numbers_a_token(meta, "tokenizer.ggml.token_type", len(tokens)),
        scores=_numbers_a_token(meta, "tokenizer.ggml.scores", len(tokens)),
        bos_id=_token_id(meta, "bos_token_id", len(tokens)),
        eos_id=_token_id(meta, "eos_token_id", len(tokens)),
        unk_id=_token_id(meta, "unknown_token_id", len(tokens)),
        pad_id=_token_id(meta, "padding_token_id", len(tokens)),
        file=meta.file,
    )

    def text_of(token: int | None) -> str | None:
        return None if token is None else tokens[token]

    return TokenizerSpec(
        gguf=vocabulary,
        bos_token=text_of(vocabulary.bos_id),
        eos_token=text_of(vocabulary.eos_id),
        pad_token=text_of(vocabulary.pad_id),
        unk_token=text_of(vocabulary.unk_id),
        add_bos=meta.optional_flag("tokenizer.ggml.add_bos_token"),
        add_eos=meta.optional_flag("tokenizer.ggml.add_eos_token"),
        special_tokens=tuple(tokens[i] for i, kind in enumerate(vocabulary.token_types) if kind == _CONTROL),
    )


def _numbers_a_token(meta: GGUFMetadata, key: str, count: int) -> list[Any]:
    if key not in meta:
        return []
    values = meta.numbers(key)
    if len(values) != count:
        raise meta.fail(key, f"has {len(values)} values for {count} tokens: the file is damaged")
    listed: list[Any] = values.tolist()
    return listed


def _token_id(meta: GGUFMetadata, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}"
    token = meta.optional_integer(key)
    if token is None or token in (-1, _NO_TOKEN):
        return None
    if not 0 <= token < count:
        raise meta.fail(key, f"is {token}, outside the vocabulary of {count} tokens")
    return token


def read_generation(file: GGUFFile, vocabulary: GGUFVocabulary, vocab_size: int) -> GenerationConfig:
    """Every end token: those that metadata names, and control tokens whose text is a known end marker.

    ``vocab_size`` is the model's: raises `CheckpointError` for a named end token that it cannot produce.
    """
    meta, count = file.metadata, min(len(vocabulary.tokens), vocab_size)
    named = [_token_id(meta, name, count) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    marked = [
        token
        for token, kind in enumerate(vocabulary.token_types)
        if kind == _CONTROL and token < count and vocabulary.tokens[token] in END_TOKENS
    ]
    ends = dict.fromkeys(token for token in (*named, *marked) if token is not None)
    defaults = GenerationConfig(
        eos_token_ids=tuple(ends),
        bos_token_id=vocabulary.bos_id,
        pad_token_id=vocabulary.pad_id,
        temperature=meta.optional_number(_SAMPLING["temperature"]),
        top_p=meta.optional_number(_SAMPLING["top_p"]),
        top_k=meta.optional_integer(_SAMPLING["top_k"]),
        min_p=meta.optional_number(_SAMPLING["min_p"]),
        repetition_penalty=meta.optional_number(_SAMPLING["repetition_penalty"]),
    )
    return check_generation(defaults, meta.file, _SAMPLING)
