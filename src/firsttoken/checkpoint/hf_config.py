"""`ModelConfig` and `GenerationConfig` out of ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

from typing import Any

from firsttoken.checkpoint.families import FAMILIES, Family, check_config
from firsttoken.checkpoint.generation import check_generation
from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.model_config import GenerationConfig, ModelConfig, RopeConfig

_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
    "rope": "rope_parameters",
}
_DTYPES = frozenset({"float32", "float16", "bfloat16"})
# Keys that change the arithmetic in some model and are only honoured at their neutral value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "num_local_experts": (0,),
    "num_experts": (0,),
}
_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
# In every kind: names of the kind, the base, and notes that change nothing.
_ROPE_COMMON = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})


def read_config(config: JSONObject) -> ModelConfig:
    """Raises `CheckpointError` naming the key for what is missing, wrong or cannot be honoured."""
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    _refuse_unsupported(config)
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    max_position = config.integer("max_position_embeddings")
    _refuse_window(config, max_position)
    bias = config.flag("attention_bias", False)
    return check_config(
        ModelConfig(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=config.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_kv_heads(config, family, heads),
            head_dim=_head_dim(config, family, hidden, heads),
            rms_norm_eps=config.number("rms_norm_eps", family.rms_norm_eps),
            max_position=max_position,
            rope=read_rope(config, max_position),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            attention_bias=bias if family.attention_bias is None else family.attention_bias,
            output_bias=bias if family.output_bias is None else family.output_bias,
            mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            dtype=_dtype(config),
        ),
        config.file,
        _NAMES,
    )


def _architecture(config: JSONObject) -> str:
    known = ", ".join(FAMILIES)
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise config.fail("architectures", f"must list the model's class, got {names!r:.80}; known are {known}")
    if names[0] not in FAMILIES:
        raise config.fail("architectures", f"{names[0]!r:.80} is not a known architecture; known are {known}")
    architecture: str = names[0]
    return architecture


def _refuse_unsupported(config: JSONObject) -> None:
    for key in ("quantization_config", "compression_config"):
        scheme = config.object(key)
        if scheme is not None:
            method = scheme.get("quant_method") or "unnamed"
            raise config.fail(
                key, f"weights quantized by {method!r:.80} are not supported: use the unquantized model or a GGUF file"
            )
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise config.fail("hidden_act", f"{activation!r:.80} is not supported, only 'silu' is")
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise config.fail(key, f"is {value!r:.80}, which is not supported")


def _refuse_window(config: JSONObject, max_position: int) -> None:
    layers = config.get("layer_types")
    windowed = layers is not None and (not isinstance(layers, list) or any(kind != "full_attention" for kind in layers))
    used = config.flag("use_sliding_window", True)
    window = config.optional_integer("sliding_window")
    harmless = window is None or not used or window >= max_position
    if not harmless:
        raise config.fail(
            "sliding_window",
            f"attention over a window of {window} tokens is not supported (max_position_embeddings is {max_position})",
        )
    # Layers may be called sliding without harm when the window is as long as the context.
    if windowed and (window is None or window < max_position):
        raise config.fail("layer_types", "only full_attention layers are supported")


def _kv_heads(config: JSONObject, family: Family, heads: int) -> int:
    if config.values.get("num_key_value_heads", 0) is None:
        return heads  # an explicit null
    return config.integer("num_key_value_heads", family.kv_heads or heads)


def _head_dim(config: JSONObject, family: Family, hidden: int, heads: int) -> int:
    if "head_dim" in config:
        return config.integer("head_dim")
    if family.head_dim is not None and "head_dim" not in config.values:
        return family.head_dim
    if heads < 1 or hidden % heads:
        raise config.fail("head_dim", f"is missing, and {heads} heads do not divide hidden_size {hidden}")
    return hidden // heads


def _dtype(config: JSONObject) -> str:
    dtype = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise config.fail("dtype", f"{dtype!r:.80} is not supported; supported are {', '.join(sorted(_DTYPES))}")
    return dtype


def read_rope(config: JSONObject, max_position: int) -> RopeConfig:
    """Both spellings: ``rope_theta`` + ``rope_scaling``, and the newer ``rope_parameters``.

    Keys and kinds follow ``modeling_rope_utils`` of Hugging Face transformers; a kind or key that is not honoured
    raises `CheckpointError`.
    """
    new, old = config.object("rope_parameters"), config.object("rope_scaling")
    rope = new or old or JSONObject(config.file, {}, "rope_scaling")
    kind = _rope_kind(rope)
    if new is not None and old is not None and _rope_kind(old) != kind:
        raise config.fail("rope_scaling", f"is of type {_rope_kind(old)!r} and rope_parameters of type {kind!r}")
    for key in rope.values:
        if key not in _ROPE_KEYS[kind] and key not in _ROPE_COMMON and rope.get(key) is not None:
            raise rope.fail(key, f"is not supported for rotary embedding of type {kind}")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.fail("partial_rotary_factor", "rotary embedding of a part of the head is not supported")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=rope.number("factor"),
            original_max_position=rope.integer("original_max_position_embeddings"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=rope.number("factor"),
        original_max_position=rope.integer(
            "original_max_position_embeddings", config.integer("original_max_position_embeddings", max_position)
        ),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _rope_kind(rope: JSONObject) -> str:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _ROPE_KEYS:
        raise rope.fail("rope_type", f"{kind!r:.80} is not supported; supported are {', '.join(_ROPE_KEYS)}")
    return kind


def read_generation(config: JSONObject, generation: JSONObject, tokenizer_eos: tuple[int, ...]) -> GenerationConfig:
    """The folder's defaults. Every end token counts: the generation config's, the model config's, the tokenizer's."""
    vocab_size = config.integer("vocab_size")
    for source in (generation, config):
        for token in source.token_ids("eos_token_id"):
            if token >= vocab_size:
                raise source.fail("eos_token_id", f"{token} is outside the vocabulary of {vocab_size} tokens")
    # A tokenizer may know more tokens than the model can produce.
    known = (token for token in tokenizer_eos if token < vocab_size)
    ends = dict.fromkeys((*generation.token_ids("eos_token_id"), *config.token_ids("eos_token_id"), *known))
    defaults = GenerationConfig(
        eos_token_ids=tuple(ends),
        bos_token_id=_first(generation.token_ids("bos_token_id") or config.token_ids("bos_token_id")),
        pad_token_id=_first(generation.token_ids("pad_token_id")),
        temperature=generation.optional_number("temperature"),
        top_p=generation.optional_number("top_p"),
        top_k=generation.optional_integer("top_k"),
        min_p=generation.optional_number("min_p"),
        repetition_penalty=generation.optional_number("repetition_penalty"),
    )
    return check_generation(defaults, generation.file, {})


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
