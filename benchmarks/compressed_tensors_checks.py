"""What the `compressed-tensors` package makes of folders that ``firsttoken quantize`` wrote.

    python benchmarks/compressed_tensors_checks.py FOLDER ...

Runs where that package is installed, beside firsttoken. It reads each folder's configuration, decompresses every
linear and compresses it again: the weights must be those that firsttoken reads, and the tensors those in the file, bit
by bit. Prints one JSON object; exits with 1 if anything differs.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.models.weights import StoredWeights


def check(folder: Path) -> dict[str, Any]:
    """How many linears a folder has, and the names of those that differ."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scheme = QuantizationConfig.model_validate(config["quantization_config"])
    theirs = scheme.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    ours = StoredWeights(open_checkpoint(str(folder)).tensors)
    linears: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            module, _, part = name.rpartition(".")
            linears.setdefault(module, {})[part] = tensor
    differ, count = [], 0
    for module, parts in linears.items():
        if "weight_scale" not in parts:
            continue
        count += 1
        bias = parts.pop("bias", None)
        weight = compressor.decompress(parts, theirs)["weight"]
        mine = ours.matrix(f"{module}.weight").dequantize(torch.float32)
        again = compressor.compress({"weight": mine, "weight_scale": parts["weight_scale"].float()}, theirs)
        same = torch.equal(weight, mine.to(weight.dtype)) and all(
            torch.equal(again[part].float(), tensor.float()) for part, tensor in parts.items()
        )
        if not same or (bias is not None and bias.dtype != torch.bfloat16):
            differ.append(module)
    return {"folder": folder.name, "format": scheme.format, "linears": count, "differ": differ}


def main() -> int:
    checks = [check(Path(folder)) for folder in sys.argv[1:]]
    ok = all(one["linears"] and not one["differ"] for one in checks)
    print(json.dumps({"compressed_tensors": version("compressed-tensors"), "ok": ok, "checks": checks}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
