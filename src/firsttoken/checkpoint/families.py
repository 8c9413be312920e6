"""The architectures that are known, and the checks that every configuration must pass whatever file it came from."""

from __future__ import annotations

import math

import msgspec

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import CheckpointError


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What an architecture takes for granted: values of keys that ``config.json`` may leave out, fixed switches.

    ``kv_heads`` None means as many as query heads, ``head_dim`` None means hidden size / heads. A switch that is
    None is read from the configuration.
    """

    gguf: str
    kv_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    # llama.cpp's converter reorders Q and K rows of this architecture for interleaved rotary embedding.
    permuted: bool = False


# Defaults are those of the configuration classes of the same names in Hugging Face transformers.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(gguf="llama", mlp_bias=None, permuted=True),
    "MistralForCausalLM": Family(gguf="llama", kv_heads=8, attention_bias=False, output_bias=False, permuted=True),
    "Qwen2ForCausalLM": Family(gguf="qwen2", kv_heads=32, attention_bias=True, output_bias=False),
    "Qwen3ForCausalLM": Family(gguf="qwen3", kv_heads=32, head_dim=128, qk_norm=True),
}

# A GGUF of architecture "llama" may have been a Mistral: the arithmetic is the same.
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

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
    if config.head_dim % 2:
        raise fail("head_dim", f"is {config.head_dim}, rotary embedding needs an even number")
    if config.num_heads % config.num_kv_heads:
        raise fail("num_kv_heads", f"is {config.num_kv_heads}, must divide the {config.num_heads} query heads")
    if not (math.isfinite(config.rms_norm_eps) and 0 <= config.rms_norm_eps < 1):
        raise fail("rms_norm_eps", f"is {config.rms_norm_eps}, must be in [0, 1)")
    _check_rope(config, fail_prefix=file, name=names.get("rope", "rope"))
    return config


def _check_rope(config: ModelConfig, fail_prefix: str, name: str) -> None:
    rope = config.rope

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
