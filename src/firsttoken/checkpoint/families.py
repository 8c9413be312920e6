"""The architectures that are known, and the checks that every configuration must pass whatever file it came from."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from firsttoken.checkpoint.model_config import ModelConfig, RopeConfig
from firsttoken.core.errors import CheckpointError


class Windows(StrEnum):
    """Which layers have a sliding window, by the rule of the architecture."""

    NONE = "none"
    ALL = "all"
    UPPER = "upper"  # those from max_window_layers on, if use_sliding_window
    PERIODIC = "periodic"  # all but each n-th


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What an architecture takes for granted: values of keys that ``config.json`` may leave out, fixed switches.

    ``kv_heads`` None means as many as query heads, ``head_dim`` None means hidden size / heads. A switch that is
    None is read from the configuration. ``activation`` is the key that names the MLP's and the only value it may have.
    """

    gguf: str | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    tied: bool = False
    windows: Windows = Windows.NONE
    window: int = 4096
    window_period: int = 0
    # Two rope tables, of the layers with a window and of the others.
    two_ropes: bool = False
    query_scalar: float | None = None
    # Caps that are honoured, with their defaults.
    softcaps: dict[str, float | None] = {}
    # llama.cpp's converter reorders Q and K rows of this architecture for interleaved rotary embedding.
    permuted: bool = False


GELU = "gelu_pytorch_tanh"

# Defaults are those of the configuration classes of the same names in Hugging Face transformers.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(gguf="llama", mlp_bias=None, permuted=True),
    "MistralForCausalLM": Family(
        gguf="llama", kv_heads=8, attention_bias=False, output_bias=False, permuted=True, windows=Windows.ALL
    ),
    "Qwen2ForCausalLM": Family(
        gguf="qwen2", kv_heads=32, attention_bias=True, output_bias=False, windows=Windows.UPPER
    ),
    "Qwen3ForCausalLM": Family(gguf="qwen3", kv_heads=32, head_dim=128, qk_norm=True, windows=Windows.UPPER),
    "Gemma2ForCausalLM": Family(
        kv_heads=4,
        head_dim=256,
        activation=("hidden_activation", GELU),
        tied=True,
        windows=Windows.PERIODIC,
        window_period=2,
        query_scalar=256.0,
        softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": Family(
        kv_heads=4,
        head_dim=256,
        qk_norm=True,
        activation=("hidden_activation", GELU),
        tied=True,
        windows=Windows.PERIODIC,
        window_period=6,
        two_ropes=True,
        query_scalar=256.0,
        softcaps={"final_logit_softcapping": None},
    ),
    "BloomForCausalLM": Family(),
}

# A GGUF of architecture "llama" may have been a Mistral: the arithmetic is the same.
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Known families whose GGUF files are not: Gemma's vocabularies take no space in front of a text, which GGUF's other
# SentencePiece vocabularies do, and BLOOM's have a pre-tokenizer of their own.
FOLDER_ONLY = frozenset({"gemma2", "gemma3", "bloom"})

# Far above any model, low enough that arithmetic on sizes stays harmless.
LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": 4096,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position": 1 << 30,
}


def check_config(config: ModelConfig, file: str, names: dict[str, str]) -> ModelConfig:
    """Return ``config`` if its sizes make sense; else raise `CheckpointError` naming the field as the file spells it.

    ``names`` maps attributes of `ModelConfig` to the file's own key.
    """

    def fail(attribute: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=file, field=names.get(attribute, attribute))

    for attribute, limit in LIMITS.items():
        value = getattr(config, attribute)
        if not 1 <= value <= limit:
            raise fail(attribute, f"is {value}, must be from 1 to {limit}")
    if config.rope is not None and config.head_dim % 2:
        raise fail("head_dim", f"is {config.head_dim}, rotary embedding needs an even number")
    if config.num_heads % config.num_kv_heads:
        raise fail("num_kv_heads", f"is {config.num_kv_heads}, must divide the {config.num_heads} query heads")
    if not (math.isfinite(config.rms_norm_eps) and 0 <= config.rms_norm_eps < 1):
        raise fail("rms_norm_eps", f"is {config.rms_norm_eps}, must be in [0, 1)")
    for attribute in ("attention_scale", "attention_softcap", "logit_softcap"):
        value = getattr(config, attribute)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise fail(attribute, f"gives {value}, must give a finite number above 0")
    for window in config.windows:
        if window is not None and not 1 <= window <= LIMITS["max_position"]:
            raise fail("windows", f"is {window}, must be from 1 to {LIMITS['max_position']}")
    for rope in (config.rope, config.local_rope):
        if rope is not None:
            _check_rope(rope, fail_prefix=file, name=names.get("rope", "rope"))
    return config


def _check_rope(rope: RopeConfig, fail_prefix: str, name: str) -> None:
    def fail(message: str) -> CheckpointError:
        return CheckpointError(message, file=fail_prefix, field=name)

    if not (math.isfinite(rope.theta) and rope.theta > 0):
        raise fail(f"has the base frequency {rope.theta}, must be a finite number above 0")
    if rope.kind == "default":
        return
    if not (math.isfinite(rope.factor) and rope.factor >= 1):
        raise fail(f"of type {rope.kind} has factor {rope.factor}, must be 1 or more")
    if rope.kind in ("llama3", "yarn") and rope.original_max_position < 1:
        raise fail(f"of type {rope.kind} has original length {rope.original_max_position}, must be 1 or more")
    if rope.kind == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        low, high = rope.low_freq_factor, rope.high_freq_factor
        raise fail(f"of type llama3 has low_freq_factor {low} and high_freq_factor {high}, must be 0 < low < high")
    if rope.kind == "yarn" and not 0 < rope.beta_slow <= rope.beta_fast:
        raise fail(f"of type yarn has beta_slow {rope.beta_slow} and beta_fast {rope.beta_fast}: 0 < slow <= fast")
