"""BLOOM's own spelling of its configuration and of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from firsttoken.checkpoint.checkpoint import Bytes, TensorInfo, TensorSource
from firsttoken.checkpoint.hf_common import read_dtype, refuse_quantized
from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import CheckpointError

ARCHITECTURE = "BloomForCausalLM"

# Attributes of `ModelConfig` by the key that published files use.
NAMES = {
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "rms_norm_eps": "layer_norm_epsilon",
    "max_position": "seq_length",
    "intermediate_size": "n_inner",
}

_TOP = {
    "word_embeddings.weight": "model.embed_tokens.weight",
    "word_embeddings_layernorm.weight": "model.embed_norm.weight",
    "word_embeddings_layernorm.bias": "model.embed_norm.bias",
    "ln_f.weight": "model.norm.weight",
    "ln_f.bias": "model.norm.bias",
}
_BLOCK = re.compile(r"h\.(0|[1-9][0-9]{0,4})\.(.+)")


def read_bloom(config: JSONObject) -> ModelConfig:
    """Raises `CheckpointError` naming the key for what is missing, wrong or cannot be honoured.

    Follows ``BloomConfig`` of Hugging Face transformers, whose older spellings published models still have.
    ``seq_length`` is the length the model was trained at, which is as far as requests may go.
    """
    refuse_quantized(config)
    if config.flag("apply_residual_connection_post_layernorm", False):
        raise config.fail("apply_residual_connection_post_layernorm", "is true, which is not supported")
    hidden = config.integer(_spelled(config, "n_embed", "hidden_size"))
    heads_key = _spelled(config, "num_attention_heads", "n_head")
    heads = config.integer(heads_key)
    if heads < 1 or hidden % heads:
        raise config.fail(heads_key, f"is {heads}, must divide the hidden size {hidden}")
    inner = config.optional_integer("n_inner")
    if inner is not None and inner != 4 * hidden:
        raise config.fail("n_inner", f"is {inner}, must be 4 x {hidden} or null")
    return ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=config.integer(_spelled(config, "num_hidden_layers", "n_layer")),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        rms_norm_eps=config.number("layer_norm_epsilon", 1e-5),
        max_position=config.integer("seq_length", 2048),
        rope=None,
        alibi=True,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        dtype=read_dtype(config),
    )


def _spelled(config: JSONObject, alias: str, key: str) -> str:
    """The one of two keys that the file has; an alias goes before the proper one, as in transformers."""
    return alias if alias in config else key


def canonical_name(name: str) -> str:
    """``h.0.mlp...``, with or without ``transformer.`` before it, as ``model.layers.0.mlp...``; others as they are."""
    bare = name.removeprefix("transformer.")
    if bare in _TOP:
        return _TOP[bare]
    match = _BLOCK.fullmatch(bare)
    return name if match is None else f"model.layers.{match[1]}.{match[2]}"


class BloomTensors:
    """`TensorSource` under canonical names over one with BLOOM's. Raises `CheckpointError` when two become one."""

    def __init__(self, source: TensorSource, file: str) -> None:
        self._source = source
        self._stored: dict[str, str] = {}
        self._infos: dict[str, TensorInfo] = {}
        for stored, info in source.infos().items():
            name = canonical_name(stored)
            if name in self._stored:
                raise CheckpointError(f"is the same tensor as {self._stored[name]}", file=file, field=stored)
            self._stored[name] = stored
            self._infos[name] = msgspec.structs.replace(info, name=name)

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def data(self, name: str) -> Bytes:
        """See `TensorSource.data`."""
        return self._source.data(self._stored.get(name, name))
