"""A tiny Llama in a folder as Hugging Face's are, with a tokenizer of bytes: for whatever begins at a model's files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.byte_tokenizer import VOCAB_SIZE, byte_tokenizer_spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
WEIGHTS = "model.safetensors"


def write_tiny_folder(folder: Path) -> Path:
    """Weights are random, and large enough for the logits to differ from token to token."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    h, f, kv = 64, 96, 32
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCAB_SIZE, h), "norm": (h,)}
    for layer in ("layers.0", "layers.1"):
        shapes |= {
            f"{layer}.input_layernorm": (h,),
            f"{layer}.post_attention_layernorm": (h,),
            f"{layer}.self_attn.q_proj": (h, h),
            f"{layer}.self_attn.k_proj": (kv, h),
            f"{layer}.self_attn.v_proj": (kv, h),
            f"{layer}.self_attn.o_proj": (h, h),
            f"{layer}.mlp.gate_proj": (f, h),
            f"{layer}.mlp.up_proj": (f, h),
            f"{layer}.mlp.down_proj": (h, f),
        }
    weights = {
        f"model.{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * (0.4 if name == "embed_tokens" else 1.5 * shape[1] ** -0.5)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer_spec(folder)
    return folder


def damage(folder: Path, name: str) -> None:
    """One tensor's rows in another order, as a file that was put together wrongly has them."""
    weights = load_file(folder / WEIGHTS)
    weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, folder / WEIGHTS)
