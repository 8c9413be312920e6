"""Tiny random models of the families that read windows, ALiBi, caps or two ropes, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
GEMMA3_ROPES = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}

# Transformers' name of the family, and what its configuration gets beside `SIZES`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": 20}),
    "mistral window of a block": ("Mistral", {"sliding_window": 16, "num_key_value_heads": 6}),
    "mistral tiny window": ("Mistral", {"sliding_window": 3, "num_key_value_heads": 1}),
    "mistral window beyond the context": ("Mistral", {"sliding_window": 100}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2}),
    "qwen2 layers": ("Qwen2", {"use_sliding_window": True, "sliding_window": 13, "layer_types": MIXED}),
    "qwen3": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1, "head_dim": 16},
    ),
    "gemma2": ("Gemma2", {"sliding_window": 19, "query_pre_attn_scalar": 24, "head_dim": 16}),
    "gemma2 low caps, biases": (
        "Gemma2",
        {
            "sliding_window": 32,
            "head_dim": 16,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "layer_types": MIXED,
        },
    ),
    "gemma2 without caps": (
        "Gemma2",
        {"sliding_window": 7, "head_dim": 10, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": 17, "head_dim": 16, "rope_parameters": GEMMA3_ROPES, "num_hidden_layers": 7},
    ),
    "gemma3 layers": (
        "Gemma3Text",
        {"sliding_window": 24, "head_dim": 10, "layer_types": MIXED, "final_logit_softcapping": 2.5},
    ),
    "gemma3 window of the context": ("Gemma3Text", {"sliding_window": 512, "head_dim": 16, "layer_types": MIXED}),
    "bloom": ("Bloom", {}),
    "bloom heads a power of two": ("Bloom", {"hidden_size": 64, "n_head": 8}),
    "bloom three heads": ("Bloom", {"n_head": 3}),
}


def make_model(case: str) -> transformers.PreTrainedModel:
    """A float32 model with seeded weights that are large enough for every part to matter."""
    family, changes = CASES[case]
    if family == "Bloom":
        sizes = {"vocab_size": 211, "hidden_size": 60, "n_layer": 3, "n_head": 6}
    else:
        sizes = SIZES | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval().float()
    centre = 0.0 if family.startswith("Gemma") else 1.0
    for name, parameter in model.named_parameters():
        is_gain = name.endswith(("norm.weight", "ln_f.weight"))
        torch.nn.init.normal_(parameter.data, *((centre, 0.3) if is_gain else (0.0, 0.15)))
    return model


def save_model(case: str, folder: Path) -> transformers.PreTrainedModel:
    """`make_model`, also saved to ``folder``."""
    model = make_model(case)
    model.save_pretrained(folder)
    return model
