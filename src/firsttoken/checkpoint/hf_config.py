"""`ModelConfig` and `GenerationConfig` out of ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from firsttoken.checkpoint.bloom import ARCHITECTURE as BLOOM
from firsttoken.checkpoint.bloom import NAMES as BLOOM_NAMES
from firsttoken.checkpoint.bloom import read_bloom
from firsttoken.checkpoint.families import FAMILIES, Family, check_config
from firsttoken.checkpoint.generation import check_generation
from firsttoken.checkpoint.hf_common import read_dtype
from firsttoken.checkpoint.hf_rope import read_rope, read_two_ropes
from firsttoken.checkpoint.hf_windows import read_windows
from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.model_config import GenerationConfig, ModelConfig, RopeConfig
from firsttoken.checkpoint.quantized.read import read_scheme
from firsttoken.checkpoint.quantized.scheme import is_linear
from firsttoken.checkpoint.shapes import tensor_shapes

_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
    "rope": "rope_parameters",
    "windows": "sliding_window",
    "attention_scale": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
# Keys that change the arithmetic in some model and are only honoured at their neutral value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "logit_scale": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "num_local_experts": (0,),
    "num_experts": (0,),
}


def read_config(config: JSONObject) -> ModelConfig:
    """Raises `CheckpointError` naming the key for what is missing, wrong or cannot be honoured."""
    architecture = _architecture(config)
    if architecture == BLOOM:
        return check_config(read_bloom(config), config.file, BLOOM_NAMES)
    family = FAMILIES[architecture]
    _refuse_unsupported(config, family)
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    max_position = config.integer("max_position_embeddings")
    num_layers = config.integer("num_hidden_layers")
    rope, local_rope = _ropes(config, family, max_position)
    bias = config.flag("attention_bias", False)
    checked = check_config(
        ModelConfig(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=_kv_heads(config, family, heads),
            head_dim=_head_dim(config, family, hidden, heads),
            rms_norm_eps=config.number("rms_norm_eps", family.rms_norm_eps),
            max_position=max_position,
            rope=rope,
            tie_word_embeddings=config.flag("tie_word_embeddings", family.tied),
            attention_bias=bias if family.attention_bias is None else family.attention_bias,
            output_bias=bias if family.output_bias is None else family.output_bias,
            mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            windows=read_windows(config, family, num_layers, max_position),
            local_rope=local_rope,
            attention_scale=_attention_scale(config, family),
            attention_softcap=_softcap(config, family, "attn_logit_softcapping"),
            logit_softcap=_softcap(config, family, "final_logit_softcapping"),
            dtype=read_dtype(config),
        ),
        config.file,
        _NAMES,
    )
    names = (name.removesuffix(".weight") for name in tensor_shapes(checked))
    # A tied head may be written out as well, and then be seen to differ.
    linears = dict.fromkeys([*filter(is_linear, names), "lm_head"])
    return structs.replace(checked, quantized=read_scheme(config, linears))


def _architecture(config: JSONObject) -> str:
    known = ", ".join(FAMILIES)
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise config.fail("architectures", f"must list the model's class, got {names!r:.80}; known are {known}")
    if names[0] not in FAMILIES:
        raise config.fail("architectures", f"{names[0]!r:.80} is not a known architecture; known are {known}")
    architecture: str = names[0]
    return architecture


def _refuse_unsupported(config: JSONObject, family: Family) -> None:
    key, supported = family.activation
    activation = config.text(key, supported)
    if activation != supported:
        raise config.fail(key, f"{activation!r:.80} is not supported, only {supported!r} is")
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in neutral and key not in family.softcaps:
            raise config.fail(key, f"is {value!r:.80}, which is not supported")


def _ropes(config: JSONObject, family: Family, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    return read_two_ropes(config, max_position) if family.two_ropes else (read_rope(config, max_position), None)


def _attention_scale(config: JSONObject, family: Family) -> float | None:
    if family.query_scalar is None:
        return None
    scalar = config.number("query_pre_attn_scalar", family.query_scalar)
    if scalar <= 0:
        raise config.fail("query_pre_attn_scalar", f"is {scalar}, must be above 0")
    return float(scalar**-0.5)


def _softcap(config: JSONObject, family: Family, key: str) -> float | None:
    """A null turns the cap off."""
    if key in config.values or key not in family.softcaps:
        return config.optional_number(key)
    return family.softcaps[key]


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
