"""The default model in transformers, filled with this project's own dequantised weights (transformers' own GGUF
loading takes half a minute)."""

from __future__ import annotations

import torch
import transformers

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.dequantize import dequantize


def transformers_llama(checkpoint: Checkpoint) -> transformers.LlamaForCausalLM:
    """A float32 ``LlamaForCausalLM`` with the checkpoint's config and weights."""
    c = checkpoint.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tie_word_embeddings,
    )
    state = {
        name: torch.from_numpy(dequantize(checkpoint.tensors.data(name), info.type, info.shape))
        for name, info in checkpoint.tensors.infos().items()
    }
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    # A buffer made on the meta device has no values.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
