"""``config.json`` decides, and what cannot be honoured is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firsttoken.checkpoint.hf_config import read_config
from firsttoken.checkpoint.json_files import JSONObject, read_object
from firsttoken.checkpoint.model_config import ModelConfig, RopeConfig
from firsttoken.core.errors import CheckpointError


@pytest.fixture
def parse(llama_config: dict[str, Any]) -> Any:
    def parse(**changes: Any) -> ModelConfig:
        values = {key: value for key, value in {**llama_config, **changes}.items() if value is not ...}
        return read_config(JSONObject("config.json", values))

    return parse


def test_llama(parse: Any) -> None:
    assert parse() == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position=128,
        rope=RopeConfig(theta=5000.0),
        dtype="float32",
    )


def test_switches_are_read(parse: Any) -> None:
    config = parse(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=32, dtype="bfloat16")
    assert config.attention_bias
    assert config.output_bias
    assert config.mlp_bias
    assert config.tie_word_embeddings
    assert (config.head_dim, config.dtype) == (32, "bfloat16")


def test_families_decide_what_they_take_for_granted(parse: Any) -> None:
    qwen2 = parse(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"])
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    mistral = parse(architectures=["MistralForCausalLM"], num_attention_heads=16, num_key_value_heads=...)
    assert (mistral.num_kv_heads, mistral.attention_bias) == (8, False)
    assert parse(num_key_value_heads=...).num_kv_heads == 4
    assert parse(num_key_value_heads=None).num_kv_heads == 4


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_CONFIG = RopeConfig(
    theta=5000.0, kind="llama3", factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "mscale": 1.0}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_scaling": None}, RopeConfig(theta=5000.0)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig(theta=5000.0)),
        ({"rope_scaling": LLAMA3}, LLAMA3_CONFIG),
        ({"rope_theta": ..., "rope_parameters": {**LLAMA3, "rope_theta": 5000.0}}, LLAMA3_CONFIG),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(theta=7.0)),
        ({"rope_theta": ...}, RopeConfig(theta=10000.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(theta=5000.0, kind="linear", factor=2.0)),
        (
            {"rope_scaling": {**YARN, "truncate": False}},
            RopeConfig(
                theta=5000.0,
                kind="yarn",
                factor=4.0,
                original_max_position=32,
                beta_fast=16.0,
                mscale=1.0,
                truncate=False,
            ),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            RopeConfig(theta=5000.0, kind="yarn", factor=4.0, original_max_position=128, attention_factor=1.5),
        ),
    ],
)
def test_rope(changes: dict[str, Any], rope: RopeConfig, parse: Any) -> None:
    assert parse(**changes).rope == rope


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures"),
        ({"architectures": ...}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.bits"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_parameters"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}}, "rope_scaling.mrope_section"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.original_max_position_embeddings"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3}, "rope_scaling"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_theta": 0}, "rope_parameters"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"hidden_size": 66}, "head_dim"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"num_attention_heads": 0}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"torch_dtype": "float64"}, "dtype"),
        ({"attention_bias": "yes"}, "attention_bias"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], field: str, parse: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(**changes)
    assert (caught.value.file, caught.value.field) == ("config.json", field)


def test_unknown_architecture_lists_the_known(parse: Any) -> None:
    known = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    with pytest.raises(CheckpointError, match=f"'OPTForCausalLM'.*{known}"):
        parse(architectures=["OPTForCausalLM"])


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 64, "use_sliding_window": False},
        {"sliding_window": 128},
        {"layer_types": ["full_attention"]},
        {"sliding_window": 128, "layer_types": ["sliding_attention"]},
        {"partial_rotary_factor": 1.0},
    ],
)
def test_harmless_windows_are_accepted(changes: dict[str, Any], parse: Any) -> None:
    assert parse(**changes) == parse()


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"null", b'{"a":' * 5000])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_object(path)
    assert caught.value.file == str(path)


def test_an_oversized_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(CheckpointError, match="at most"):
        read_object(path)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options: dict[str, Any] = {} if family != "Mistral" else {"sliding_window": None}
    theirs = getattr(transformers, f"{family}Config")(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 2.0,
            "rope_theta": 77.0,
            "original_max_position_embeddings": 128,
        },
        architectures=[f"{family}ForCausalLM"],
        **options,
    )
    theirs.save_pretrained(tmp_path)
    config = read_config(read_object(tmp_path / "config.json"))
    assert config.architecture == f"{family}ForCausalLM"
    for ours, name in (
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "intermediate_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("max_position", "max_position_embeddings"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("tie_word_embeddings", "tie_word_embeddings"),
    ):
        assert getattr(config, ours) == getattr(theirs, name)
    written = json.loads((tmp_path / "config.json").read_text())
    assert config.head_dim == written.get("head_dim", 12)
    assert config.rope == RopeConfig(theta=77.0, kind="yarn", factor=2.0, original_max_position=128)
