"""Small folders of quantized weights, written from the formats' definitions: integers of numbers, words of integers.

Nothing here is shared with what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.tiny_models import make_config

VOCABULARY = 48
Arrays = dict[str, np.ndarray[Any, Any]]
# The tensors of one linear in some format, and the weights that they mean, float64 [N, K].
Writer = Callable[[np.ndarray[Any, Any]], tuple[dict[str, Tensor], np.ndarray[Any, Any]]]


def quantise(w: Any, bits: int, group: int, *, zeros: bool) -> tuple[Any, Any, Any]:
    """``w`` float64 ``[N, K]`` -> unsigned values ``[N, K]``, float16 scales and unsigned zero points ``[N, G]``."""
    n, k = w.shape
    blocks = w.reshape(n, -1, group or k)
    top = 2**bits - 1
    if zeros:
        low, high = np.minimum(blocks.min(2), 0), np.maximum(blocks.max(2), 0)
        scales = ((high - low) / top).astype(np.float16)
        # A zero point of 0 cannot be held by GPTQ's first format.
        points = np.clip(np.rint(-low / scales), 1, top).astype(np.int64)
    else:
        scales = (np.abs(blocks).max(2) / (top // 2)).astype(np.float16)
        points = np.full(scales.shape, (top + 1) // 2)
    values = np.rint(blocks / scales.astype(np.float64)[..., None]) + points[..., None]
    return np.clip(values, 0, top).astype(np.int64).reshape(n, k), scales, points


def mean(values: Any, scales: Any, points: Any) -> Any:
    """What they stand for, float64 ``[N, K]``."""
    n, k = values.shape
    blocks = values.reshape(n, scales.shape[1], -1) - points[..., None]
    return (blocks * scales.astype(np.float64)[..., None]).reshape(n, k)


def words(values: Any, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """``[R, C]`` -> int32 ``[R, C * bits / 32]``; the i-th value of a word lies at its i-th place, counted from the
    lowest bits."""
    each = 32 // bits
    rows, columns = values.shape
    out = np.zeros((rows, -(-columns // each)), dtype=np.uint64)
    for column in range(columns):
        place = (places or tuple(range(each)))[column % each]
        out[:, column // each] |= values[:, column].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def compressed(bits: int = 4, group: int = 32, *, zeros: bool = False) -> Writer:
    def write(w: Any) -> tuple[dict[str, Tensor], Any]:
        values, scales, points = quantise(w, bits, group, zeros=zeros)
        tensors = {
            "weight_packed": words(values, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(w.shape),
        }
        if zeros:
            tensors["weight_zero_point"] = words(points.T, bits).t().contiguous()
        return tensors, mean(values, scales, points)

    return write


def int8_rows(w: Any) -> tuple[dict[str, Tensor], Any]:
    """compressed-tensors' int-quantized."""
    values, scales, points = quantise(w, 8, 0, zeros=False)
    signed = torch.from_numpy((values - 128).astype(np.int8))
    return {"weight": signed, "weight_scale": torch.from_numpy(scales)}, mean(values, scales, points)


def fp8(*, whole: bool = False) -> Writer:
    """compressed-tensors' float-quantized: a scale for each row, or for the whole."""

    def write(w: Any) -> tuple[dict[str, Tensor], Any]:
        largest = np.abs(w).max() if whole else np.abs(w).max(1, keepdims=True)
        scales = torch.from_numpy(np.asarray(largest / 448, dtype=np.float32)).reshape(-1, *([] if whole else [1]))
        values = (torch.from_numpy(w) / scales.double()).to(torch.float8_e4m3fn)
        tensors = {"weight": values, "weight_scale": scales, "input_scale": torch.ones(1)}
        return tensors, (values.double() * scales.double()).numpy()

    return write


def gptq(bits: int = 4, group: int = 32, *, zeros: bool = False, version: int = 1) -> Writer:
    def write(w: Any) -> tuple[dict[str, Tensor], Any]:
        values, scales, points = quantise(w, bits, group, zeros=zeros)
        tensors = {
            "qweight": words(values, bits).t().contiguous(),
            "qzeros": words(points.T - (1 if version == 1 else 0), bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.arange(w.shape[1], dtype=torch.int32) // (group or w.shape[1]),
        }
        return tensors, mean(values, scales, points)

    return write


def awq(group: int = 32) -> Writer:
    def write(w: Any) -> tuple[dict[str, Tensor], Any]:
        values, scales, points = quantise(w, 4, group, zeros=True)
        # Rows 0 to 7 of a word, from the lowest bits: 0, 2, 4, 6, 1, 3, 5, 7.
        places = (0, 4, 1, 5, 2, 6, 3, 7)
        tensors = {
            "qweight": words(values.T, 4, places),
            "qzeros": words(points.T, 4, places),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return tensors, mean(values, scales, points)

    return write


def write_folder(
    folder: Path,
    quantization: dict[str, Any] | None,
    writer: Writer,
    *,
    full: tuple[str, ...] = ("lm_head",),
    hidden: int = 64,
    inner: int = 96,
    layers: int = 2,
    change: Callable[[dict[str, Tensor]], None] | None = None,
) -> dict[str, Tensor]:
    """A Llama in ``folder`` whose linears, but for those named in ``full``, are ``writer``'s; gives the
    tensors in full that they mean, float64. ``change`` may damage the file's tensors before they are written."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "dtype": "float16",
    }
    if quantization is not None:
        config["quantization_config"] = quantization
    shapes = _shapes(hidden, inner, layers)
    random = np.random.default_rng(7)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        numbers = random.normal(0, 0.1, shape) if len(shape) == 2 else np.ones(shape)
        if module.endswith(("_proj", "lm_head")) and not any(part in module for part in full):
            tensors, numbers = writer(numbers + 0.05)
            stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
            meant[name] = torch.from_numpy(numbers)
        else:
            stored[name] = torch.from_numpy(numbers).half()
            meant[name] = stored[name].double()
    if change is not None:
        change(stored)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return meant


def _shapes(hidden: int, inner: int, layers: int) -> dict[str, tuple[int, ...]]:
    from firsttoken.checkpoint.shapes import tensor_shapes

    return tensor_shapes(
        make_config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=inner,
            num_layers=layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=hidden // 4,
        )
    )
