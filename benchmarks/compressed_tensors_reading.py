"""Folders that the `compressed-tensors` package writes in every scheme that is read here, and firsttoken reads.

    python benchmarks/compressed_tensors_reading.py

Runs where that package is installed, beside firsttoken. What is read of each linear must be what the package makes of
it, bit by bit. Prints one JSON object; exits with 1 if anything differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

from firsttoken.checkpoint.hf_folder import open_folder
from firsttoken.models.load import load_model
from firsttoken.models.weights import StoredWeights

GROUP = 32
HIDDEN, INNER, VOCABULARY, HEADS, KV_HEADS = 64, 96, 48, 4, 2
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "group_size": GROUP, "strategy": "group"}),
    "int4_zeros": ("pack-quantized", {"num_bits": 4, "group_size": GROUP, "strategy": "group", "symmetric": False}),
    "int4_rows": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int8_words": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8_whole": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
}
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def compress(weight: torch.Tensor, scheme: QuantizationScheme, format: str) -> dict[str, torch.Tensor]:
    args = scheme.weights
    parts = weight.view(len(weight), -1, args.group_size or weight.shape[1])
    low, high = parts.amin(2), parts.amax(2)
    if args.strategy == "tensor":
        low, high = low.min().view(1), high.max().view(1)
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressed: dict[str, torch.Tensor] = BaseCompressor.get_value_from_registry(format).compress(state, scheme)
    return compressed


def write(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """A model of one layer in one scheme; gives what its linears mean, by the package."""
    format, values = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**values))
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, ignore=["lm_head"], quantization_status="compressed"
    )
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "model.layers.0.input_layernorm.weight": torch.ones(HIDDEN),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    meant = {}
    for linear, shape in LINEARS.items():
        module = f"model.layers.0.{linear}"
        parts = compress(torch.randn(shape) * 0.1 + 0.02, scheme, format)
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        found = BaseCompressor.get_value_from_registry(format).decompress(parts, scheme)
        meant[f"{module}.weight"] = found["weight"].float()
    save_file(tensors, folder / "model.safetensors")
    quantization = json.loads(config.model_dump_json())
    (folder / "config.json").write_text(json.dumps(model_config() | {"quantization_config": quantization}))
    return meant


def check(name: str) -> dict[str, Any]:
    """How many linears are read as rounded, and those that differ."""
    with tempfile.TemporaryDirectory() as made:
        meant = write(Path(made), name)
        checkpoint = open_folder(Path(made))
        load_model(checkpoint, device="cpu", dtype="float32", quantization="none")
        weights, infos = StoredWeights(checkpoint.tensors), checkpoint.tensors.infos()
        rounded = [tensor for tensor, info in infos.items() if info.rounded is not None]
        differ = [
            tensor
            for tensor in sorted({*rounded, *meant})
            if tensor not in rounded
            or tensor not in meant
            or not torch.equal(weights.matrix(tensor).dequantize(torch.float32), meant[tensor])
        ]
    return {"scheme": name, "linears": len(rounded), "differ": differ}


def model_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def main() -> int:
    torch.manual_seed(1)
    checks = [check(name) for name in SCHEMES]
    ok = all(one["linears"] and not one["differ"] for one in checks)
    print(json.dumps({"compressed_tensors": version("compressed-tensors"), "ok": ok, "checks": checks}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
