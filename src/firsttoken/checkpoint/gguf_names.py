"""GGUF tensor names to Hugging Face names, for the llama, qwen2 and qwen3 architectures."""

from __future__ import annotations

import re

TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")


def hugging_face_name(name: str) -> str | None:
    """The canonical name of a GGUF tensor; None when the architectures known here have no such tensor."""
    if name in TOP_LEVEL:
        return TOP_LEVEL[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in IN_BLOCK:
        return None
    return f"model.layers.{match[1]}.{IN_BLOCK[match[2]]}.{match[3]}"
