"""Logits of tiny random models against transformers. Largest difference seen: 2e-5; allowed: 1e-4."""

from __future__ import annotations

import pytest
import torch
import transformers

from firsttoken.checkpoint.model_config import ModelConfig, RopeConfig
from firsttoken.models import load_model
from tests.support.tiny_models import Runner, make_checkpoint, make_config

TOLERANCE = 1e-4
HF_CLASSES = {
    "LlamaForCausalLM": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "MistralForCausalLM": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "Qwen2ForCausalLM": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "Qwen3ForCausalLM": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow"),
}


def hf_model(config: ModelConfig) -> torch.nn.Module:
    """The transformers model of ``config`` with seeded weights that are large enough for every part to matter."""
    config_class, model_class = HF_CLASSES[config.architecture]
    rope = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    rope |= {key: getattr(config.rope, key) for key in ROPE_KEYS[config.rope.kind]}
    if config.rope.original_max_position:
        rope["original_max_position_embeddings"] = config.rope.original_max_position
    biases = {} if config.architecture != "LlamaForCausalLM" else {"mlp_bias": config.mlp_bias}
    if config.architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        biases["attention_bias"] = config.attention_bias
    torch.manual_seed(7)
    model = model_class(
        config_class(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_word_embeddings,
            **biases,
        )
    ).eval()
    for name, parameter in model.named_parameters():
        centre, spread = (1.0, 0.3) if "norm" in name else (0.0, 0.15)
        torch.nn.init.normal_(parameter.data, centre, spread)
    return model


CASES = {
    "llama": make_config(),
    "llama heads not a power of two": make_config(num_heads=9, num_kv_heads=3, head_dim=16, hidden_size=144),
    "llama one kv head": make_config(num_kv_heads=1),
    "llama no sharing": make_config(num_kv_heads=6),
    "llama wide heads": make_config(head_dim=32),
    "llama tied": make_config(tie_word_embeddings=True),
    "llama biases": make_config(attention_bias=True, output_bias=True, mlp_bias=True),
    "llama linear rope": make_config(rope=RopeConfig(kind="linear", factor=4.0)),
    "llama llama3 rope": make_config(rope=RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_position=64)),
    "llama yarn rope": make_config(rope=RopeConfig(kind="yarn", factor=4.0, original_max_position=128), head_dim=16),
    "mistral": make_config("MistralForCausalLM"),
    "qwen2": make_config("Qwen2ForCausalLM"),
    "qwen2 tied, grouped": make_config("Qwen2ForCausalLM", tie_word_embeddings=True, num_heads=8, num_kv_heads=1),
    "qwen3": make_config("Qwen3ForCausalLM", head_dim=24),
    "qwen3 biases": make_config("Qwen3ForCausalLM", attention_bias=True, output_bias=True, tie_word_embeddings=True),
}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_logits_equal(config: ModelConfig, tokens: list[int]) -> None:
    reference = hf_model(config)
    state = {name: tensor for name, tensor in reference.state_dict().items() if "inv_freq" not in name}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    model = load_model(make_checkpoint(config, state), device="cpu", dtype="float32", quantization="none")
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert expected.abs().max() > 0.5
    assert (Runner(model).whole(tokens) - expected).abs().max() < TOLERANCE
