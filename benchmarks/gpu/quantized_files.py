"""Weights with zero points, as others' files have them, on a GPU: right, what they cost, and a whole model.

    python -m benchmarks.gpu.quantized_files [--model smollm2] [--text docs/architecture.md] [--output FILE]

Products of every group, few rows and many, at odd sizes against float64. The same products at an 8B's sizes with zero
points and without, in a CUDA graph over more weights than the second-level cache holds. Then ``MODEL`` is rounded with
zero points into a folder, and ``firsttoken eval`` compares it as it is stored with the same weights in bfloat16. Exits
with 1 where a product is wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.gpu.attention import graph_us
from benchmarks.gpu.products import PRODUCTS
from firsttoken.checkpoint.hf_folder import open_folder
from firsttoken.kernels.linear.small import Workspace
from firsttoken.kernels.packed_linear.config import MAX_ROWS, SHARED_FLOATS, SHARED_TILES, default_config
from firsttoken.kernels.packed_linear.layout import GROUPS, PackedWeight, pack_int4, unpack
from firsttoken.kernels.packed_linear.rounded import config_for, round_rows, rounded_linear
from firsttoken.kernels.packed_linear.small import packed_linear
from firsttoken.models.weights import StoredWeights
from firsttoken.quantization.compressed import write_linear
from firsttoken.quantization.rounded import RoundedWeight

GROUP = 32
# What errors may be: of each result's size and the mean of all for bfloat16's own rounding, and weights that are scaled
# before; of the norm of all where rows are FP8, and weights from hundreds of rows on.
MOST = {"few": 2**-7, "scaled": 2**-5, "many": 0.06}
# More than an H200's second-level cache.
BYTES_IN_TURNS = 200 << 20


def weight_of(n: int, k: int, group: int, device: str, *, zeros: bool) -> PackedWeight:
    values = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=device)
    shape = (n, k // group)
    points = torch.randint(-8, 8, shape, dtype=torch.int8, device=device) if zeros else None
    return pack_int4(values, (torch.rand(shape, device=device) * 0.02).bfloat16(), points)


def check_products(device: str, rows: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """The largest error of each kind of product."""
    found = []
    for group in GROUPS:
        for zeros in (False, True):
            errors = {"few": 0.0, "scaled": 0.0, "many": 0.0}
            for n, k in sizes:
                if k % group:
                    continue
                weight = weight_of(n, k, group, device, zeros=zeros)
                for m in rows:
                    x = torch.randn(m, k, device=device).bfloat16()
                    want = x.double() @ unpack(weight).double().T
                    for kind, error in _errors(x, weight, want).items():
                        errors[kind] = max(errors[kind], error)
            right = all(error < MOST[kind] for kind, error in errors.items())
            found.append({"group": group, "zeros": zeros, "right": right, **errors})
            print(found[-1], file=sys.stderr, flush=True)
    return found


def _errors(x: Tensor, weight: PackedWeight, want: Tensor) -> dict[str, float]:
    m, n = len(x), weight.n
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    errors = {}
    if m <= MAX_ROWS:
        packed_linear(x, weight, out, config=default_config(n, weight.k, m, "int4"))
        apart = (out.double() - want).abs() / (want.abs() + want.abs().mean())
        errors["few" if m <= 16 else "scaled"] = round(float(apart.max()), 5)
    many_rows(x, weight, out)()
    return errors | {"many": round(float((out.double() - want).norm() / want.norm()), 5)}


def many_rows(x: Tensor, weight: PackedWeight, out: Tensor) -> Callable[[], None]:
    m, (n, k) = len(x), weight.shape
    config = config_for(weight, m)
    workspace = Workspace.allocate(SHARED_FLOATS, SHARED_TILES, x.device)
    scratch = torch.empty(n * -(-k // 64) * 64, dtype=torch.uint8, device=x.device)
    return lambda: rounded_linear(
        round_rows(x, weight, config=config), weight, out, workspace=workspace, scratch=scratch, config=config
    )  # fmt: skip


def time_products() -> list[dict[str, Any]]:
    found = []
    for name, (n, k) in PRODUCTS.items():
        copies = BYTES_IN_TURNS // (n * k // 2) + 1
        for m in (1, 8, 64, 512):
            us = {}
            for zeros in (False, True):
                weights = [weight_of(n, k, 128, "cuda", zeros=zeros) for _ in range(copies)]
                x = torch.randn(m, k, device="cuda").bfloat16()
                out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
                us["with" if zeros else "without"] = round(graph_us(_chain(x, weights, out), copies), 2)
            found.append({"product": name, "rows": m, "us": us, "ratio": round(us["with"] / us["without"], 3)})
            print(found[-1], file=sys.stderr, flush=True)
    return found


def _chain(x: Tensor, weights: list[PackedWeight], out: Tensor) -> Callable[[], None]:
    m, (n, k) = len(x), weights[0].shape
    if m > 8:
        products = [many_rows(x, weight, out) for weight in weights]
    else:
        config = default_config(n, k, m, "int4")
        products = [_few(x, weight, out, config) for weight in weights]

    def run() -> None:
        for product in products:
            product()

    return run


def _few(x: Tensor, weight: PackedWeight, out: Tensor, config: Any) -> Callable[[], None]:
    return lambda: packed_linear(x, weight, out, config=config)


# ---------------------------------------------------------------- a whole model


def check_model(model: str, text: Path, device: str) -> dict[str, Any]:
    """``firsttoken eval`` of a folder with zero points, beside itself in bfloat16."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        options = ["--method", "rtn", "--tokens", "64", "--context", "32", "--device", "cpu", "--no-self-check"]
        _firsttoken("quantize", model, "--scheme", "int4", "--group-size", str(GROUP), "--out", str(folder), *options)
        with_zeros(folder)
        told = _firsttoken(
            "eval", str(folder), "--text", str(text), "--device", device, "--quantization", "int4",
            "--reference", str(folder), "--reference-quantization", "none", "--json",
        )  # fmt: skip
    result: dict[str, Any] = json.loads(told)
    return {key: result[key] for key in ("perplexity", "top1_agreement", "kl", "tokens")}


def _firsttoken(*arguments: str) -> str:
    command = [sys.executable, "-m", "firsttoken.cli.main", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout


def with_zeros(folder: Path) -> None:
    """Its linears rounded once more, from least to most of each group."""
    tensors = open_folder(folder).tensors
    weights, infos = StoredWeights(tensors), tensors.infos()
    places: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        kept = load_file(path)
        modules = {name.removesuffix(".weight_packed") for name in kept if name.endswith(".weight_packed")}
        new = {name: tensor for name, tensor in kept.items() if name.rpartition(".")[0] not in modules}
        for module in modules:
            assert infos[f"{module}.weight"].rounded is not None
            weight = asymmetric(weights.matrix(f"{module}.weight").dequantize(torch.float32))
            new |= {f"{module}.{part}": tensor.clone() for part, tensor in write_linear(weight).items()}
        save_file(new, path)
        places |= dict.fromkeys(new, path.name)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((folder / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["weights"] |= {"symmetric": False, "group_size": GROUP}
    (folder / "config.json").write_text(json.dumps(config))


def asymmetric(w: Tensor) -> RoundedWeight:
    groups = w.view(len(w), -1, GROUP)
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = ((high - low) / 15).clamp_min(1e-8).bfloat16()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    values = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15) - 8
    return RoundedWeight("int4", values.to(torch.int8).view(w.shape), scales, GROUP, (zeros - 8).to(torch.int8))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=Path("docs/architecture.md"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    products = check_products("cuda", (1, 3, 8, 13, 16, 29, 64, 65, 200, 700), [(48, 288), (80, 1088), (4096, 4096)])
    document = {
        "command": "python -m benchmarks.gpu.quantized_files",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "products": products,
        "times": time_products(),
        "model": {"name": options.model, **check_model(options.model, options.text, "cuda")},
    }
    text = json.dumps(document, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    return 0 if all(one["right"] for one in products) else 1


if __name__ == "__main__":
    sys.exit(main())
