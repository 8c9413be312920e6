"""``config.json`` of the families with windows, ALiBi, caps and two ropes: what is read, and what is refused by key."""

from __future__ import annotations

from typing import Any

import pytest

from firsttoken.checkpoint.hf_config import read_config
from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.model_config import ModelConfig, RopeConfig
from firsttoken.core.errors import CheckpointError

# As published: google/gemma-2-2b, google/gemma-3-1b-it, bigscience/bloom-560m, mistralai/Mistral-7B-v0.1.
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pretraining_tp": 1,
    "seq_length": 2048,
    "vocab_size": 250880,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN2 = {**MISTRAL, "architectures": ["Qwen2ForCausalLM"]}
SLIDING, FULL = "sliding_attention", "full_attention"


def parse(published: dict[str, Any], **changes: Any) -> ModelConfig:
    values = {key: value for key, value in {**published, **changes}.items() if value is not ...}
    return read_config(JSONObject("config.json", values))


def test_gemma2() -> None:
    config = parse(GEMMA2)
    assert config.windows == (4096, None) * 13
    assert config.window(0) == 4096
    assert config.window(1) is None
    assert (config.attention_scale, config.attention_softcap, config.logit_softcap) == (1 / 16, 50.0, 30.0)
    assert config.tie_word_embeddings
    assert (config.rope, config.local_rope) == (RopeConfig(theta=10000.0), None)
    assert (config.head_dim, config.attention_bias, config.qk_norm, config.alibi) == (256, False, False, False)


def test_gemma2_with_keys_left_out_or_null() -> None:
    keys = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window", "head_dim")
    assert parse(GEMMA2, **dict.fromkeys(keys, ...), hidden_activation=...) == parse(GEMMA2)
    off = parse(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (off.attention_softcap, off.logit_softcap) == (None, None)


def test_gemma3() -> None:
    config = parse(GEMMA3)
    assert config.windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert (config.rope, config.local_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    assert (config.attention_scale, config.attention_softcap, config.logit_softcap) == (1 / 16, None, None)
    assert config.qk_norm
    assert config.tie_word_embeddings
    assert parse(GEMMA3, **dict.fromkeys(("rope_theta", "rope_local_base_freq"), ...)) == config


def test_gemma3_spellings_of_two_ropes() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = parse(GEMMA3, rope_scaling=linear)
    assert (old.rope, old.local_rope) == (RopeConfig(theta=1e6, kind="linear", factor=8.0), RopeConfig(theta=1e4))
    left_out: dict[str, Any] = dict.fromkeys(("rope_theta", "rope_local_base_freq", "rope_scaling"), ...)
    by_kind = {FULL: {**linear, "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    assert parse(GEMMA3, **left_out, rope_parameters=by_kind) == old
    assert parse(GEMMA3, **left_out, rope_parameters={FULL: linear}) == old


def test_gemma3_keeps_windows_as_long_as_the_context_since_they_have_a_rope_of_their_own() -> None:
    assert parse(GEMMA3, sliding_window=32768).windows[0] == 32768
    assert parse(GEMMA3, layer_types=[FULL] * 26).windows == ()


def test_bloom() -> None:
    config = parse(BLOOM)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (1024, 4096, 24)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 16, 64)
    assert (config.alibi, config.rope, config.max_position) == (True, None, 2048)
    assert config.tie_word_embeddings
    newer = {"n_embed": ..., "num_attention_heads": ..., "hidden_size": 1024, "n_head": 16}
    assert parse(BLOOM, **newer) == config


def test_mistral_and_qwen() -> None:
    assert parse(MISTRAL).windows == (4096,) * 4
    assert parse(MISTRAL, sliding_window=...).windows == (4096,) * 4
    assert parse(MISTRAL, sliding_window=None).windows == ()
    assert parse(MISTRAL, sliding_window=32768).windows == ()
    assert parse(MISTRAL, layer_types=[SLIDING] * 4).windows == (4096,) * 4
    assert parse(QWEN2).windows == ()
    assert parse(QWEN2, use_sliding_window=True).windows == ()
    assert parse(QWEN2, use_sliding_window=True, max_window_layers=3).windows == (None, None, None, 4096)
    mixed = [SLIDING, FULL, FULL, SLIDING]
    assert parse(QWEN2, use_sliding_window=True, layer_types=mixed).windows == (4096, None, None, 4096)
    assert parse(QWEN2, layer_types=[FULL] * 4).windows == ()


@pytest.mark.parametrize(
    ("published", "changes", "field"),
    [
        (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA2, {"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar"),
        (GEMMA2, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        (GEMMA2, {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        (GEMMA2, {"sliding_window": None}, "sliding_window"),
        (GEMMA2, {"sliding_window": 0}, "sliding_window"),
        (GEMMA2, {"layer_types": [SLIDING]}, "layer_types"),
        (GEMMA2, {"layer_types": "sliding"}, "layer_types"),
        (GEMMA2, {"layer_types": ["chunked_attention"] * 26}, "layer_types"),
        (GEMMA2, {"layer_types": [SLIDING] * 26, "sliding_window": None}, "layer_types"),
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (GEMMA3, {"rope_local_base_freq": -1.0}, "rope_parameters"),
        (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type"),
        (GEMMA3, {"rope_parameters": {SLIDING: {"factor": 2}}}, "rope_parameters.sliding_attention.factor"),
        (GEMMA3, {"rope_parameters": {}, "rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling"),
        (BLOOM, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        (BLOOM, {"n_inner": 1000}, "n_inner"),
        (BLOOM, {"num_attention_heads": 7}, "num_attention_heads"),
        (BLOOM, {"num_attention_heads": ..., "n_head": 0}, "n_head"),
        (BLOOM, {"n_layer": ...}, "n_layer"),
        (BLOOM, {"n_embed": ...}, "hidden_size"),
        (BLOOM, {"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon"),
        (BLOOM, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (BLOOM, {"torch_dtype": "int8"}, "dtype"),
        (MISTRAL, {"layer_types": [SLIDING, FULL, SLIDING, FULL]}, "layer_types"),
        (MISTRAL, {"sliding_window": -5}, "sliding_window"),
        (MISTRAL, {"sliding_window": "4096"}, "sliding_window"),
        (QWEN2, {"layer_types": [SLIDING] * 4}, "layer_types"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    published: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(published, **changes)
    assert (caught.value.file, caught.value.field) == ("config.json", field)
