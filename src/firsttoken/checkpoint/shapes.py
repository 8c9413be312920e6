"""Models of drawn weights: published configurations without weights, for benchmarks, and tiny odd ones for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from firsttoken.checkpoint.checkpoint import Bytes, Checkpoint, CheckpointText, TensorInfo
from firsttoken.checkpoint.fingerprint import fingerprint_text
from firsttoken.checkpoint.model_config import ModelConfig, RopeConfig
from firsttoken.core.errors import CheckpointError

PREFIX = "random:"


def _llama3_rope(factor: float) -> RopeConfig:
    return RopeConfig(
        theta=500000.0,
        kind="llama3",
        factor=factor,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


# The values of each model's published config.json.
SHAPES: dict[str, ModelConfig] = {
    "llama-3.1-8b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position=131072,
        rope=_llama3_rope(8.0),
    ),
    "llama-3.2-1b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position=131072,
        rope=_llama3_rope(32.0),
        tie_word_embeddings=True,
    ),
    "llama-3-70b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position=8192,
        rope=RopeConfig(theta=500000.0),
    ),
    "qwen3-8b": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position=40960,
        rope=RopeConfig(theta=1000000.0),
        qk_norm=True,
    ),
    "smollm2-135m": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position=8192,
        rope=RopeConfig(theta=100000.0),
        tie_word_embeddings=True,
    ),
    "tiny-llama": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=307,
        hidden_size=72,
        intermediate_size=116,
        num_layers=3,
        num_heads=6,
        num_kv_heads=3,
        head_dim=12,
        rms_norm_eps=1e-5,
        max_position=512,
        rope=_llama3_rope(8.0),
        tie_word_embeddings=True,
    ),
    "tiny-qwen2": ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=311,
        hidden_size=56,
        intermediate_size=88,
        num_layers=2,
        num_heads=7,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        max_position=512,
        rope=RopeConfig(theta=10000.0),
        attention_bias=True,
    ),
    "tiny-qwen3": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=293,
        hidden_size=48,
        intermediate_size=100,
        num_layers=2,
        num_heads=5,
        num_kv_heads=5,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position=512,
        rope=RopeConfig(theta=1000000.0),
        qk_norm=True,
    ),
}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every tensor a model of this configuration stores."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
        layer[f"self_attn.{name}.weight"] = (rows, hidden)
        if config.attention_bias:
            layer[f"self_attn.{name}.bias"] = (rows,)
    layer["self_attn.o_proj.weight"] = (hidden, query)
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = (config.head_dim,)
        layer["self_attn.k_norm.weight"] = (config.head_dim,)
    layer["post_attention_layernorm.weight"] = (hidden,)
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        layer[f"mlp.{name}.weight"] = (rows, columns)
        if config.mlp_bias:
            layer[f"mlp.{name}.bias"] = (rows,)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class RandomTensors:
    """`TensorSource` of a model without a file: it lists its tensors as BF16, their values are the loader's to draw."""

    def __init__(self, shape: str, config: ModelConfig) -> None:
        self._shape = shape
        self._infos: dict[str, TensorInfo] = {}
        for name, size in tensor_shapes(config).items():
            info = TensorInfo(name, size, "BF16", 0)
            self._infos[name] = msgspec.structs.replace(info, nbytes=2 * info.num_elements)

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def data(self, name: str) -> Bytes:
        """Always raises `CheckpointError`: random tensors are filled on the device, never read."""
        raise CheckpointError(
            "has no stored bytes: random weights are drawn on the device", file=self._shape, field=name
        )


def open_random(model: str, name: str | None = None) -> Checkpoint:
    """Open ``random:<shape>``; raises `CheckpointError` listing the shapes when it is not one of them."""
    shape = model.removeprefix(PREFIX)
    if shape not in SHAPES:
        raise CheckpointError(
            f"{shape!r:.80} is not a known shape, nor a folder; known are {', '.join(SHAPES)}", file=model
        )
    return random_checkpoint(model, SHAPES[shape], name=name)


def random_checkpoint(
    model: str,
    config: ModelConfig,
    read_text: Callable[[], CheckpointText] = CheckpointText,
    name: str | None = None,
) -> Checkpoint:
    """A model of this configuration whose weights are drawn, called ``model``."""
    return Checkpoint(
        name=name or model,
        source="random",
        path=model,
        config=config,
        fingerprint=fingerprint_text("random", msgspec.json.encode(config)),
        tensors=RandomTensors(model, config),
        read_text=read_text,
    )
