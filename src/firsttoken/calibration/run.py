"""From an opened checkpoint and a text's tokens to a folder of rounded weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from firsttoken.calibration.folder import LayerFigures, QuantizedFolder, Task
from firsttoken.calibration.layer import PlainLayer
from firsttoken.calibration.model import STORED, PlainModel
from firsttoken.calibration.walk import STAGES, LayerRounder, RoundedLayer, Streams
from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.hf_write import config_values, write_text_files
from firsttoken.core.errors import ConfigError
from firsttoken.kernels.packed_linear.layout import GROUPS
from firsttoken.quantization.calibrate.choose import Method, check_method
from firsttoken.quantization.calibrate.grid import Grid
from firsttoken.quantization.compressed import BITS, read_linear, write_linear
from firsttoken.quantization.rounded import RoundedFormat

LINEARS = tuple(name for stage in STAGES for name in stage.linears)
OnLayer = Callable[[int, tuple[LayerFigures, ...]], None]


@dataclass(frozen=True, slots=True)
class Order:
    """``group_size`` None: the largest that divides the columns of all linears. ``windows`` int64 ``[W, T]``."""

    scheme: RoundedFormat
    method: Method
    group_size: int | None
    windows: npt.NDArray[np.int64]
    device: str
    threads: int | None = None  # of the CPU; None: as many as torch takes


@dataclass(frozen=True, slots=True)
class Done:
    """``group_size`` 0: a scale a row. ``bytes_before`` and ``bytes_after``: of all tensors."""

    layers: tuple[LayerFigures, ...]
    group_size: int
    bytes_before: int
    bytes_after: int


@torch.inference_mode()
def quantize(
    checkpoint: Checkpoint, order: Order, out: Path, tokenizer_json: str | None, on_layer: OnLayer = lambda *_: None
) -> Done:
    """Write ``out``, or go on with it where it was begun. ``on_layer`` is told of each layer that is done, those of an
    earlier run first. Raises `ConfigError` for what does not fit together and `CheckpointError` for a damaged model."""
    check_method(order.method, order.scheme)
    if order.threads is not None:
        torch.set_num_threads(order.threads)
    model = PlainModel(checkpoint, torch.device(order.device))
    grid = Grid(order.scheme, _group_size(model, order))
    values = config_values(checkpoint)
    values |= {"dtype": str(STORED).removeprefix("torch."), "quantization_config": quantization_config(grid)}
    values.pop("torch_dtype", None)
    with QuantizedFolder(out, _task(checkpoint, order, grid), model.config.num_layers + 1) as folder:
        _layers(model, order, grid, folder, on_layer)
        folder.write_part(model.config.num_layers, _outer(model))
        write_text_files(checkpoint, out, tokenizer_json)
        figures = tuple(figure for layer in folder.layers for figure in layer)
        after = folder.finish(json.dumps(values, indent=2).encode() + b"\n")
    before = sum(info.nbytes for info in checkpoint.tensors.infos().values())
    return Done(figures, grid.group, before, after)


def quantization_config(grid: Grid) -> dict[str, Any]:
    """As `compressed-tensors` has it: integers packed, FP8 for activations that are rounded token by token."""
    bits = BITS.get(grid.format, 8)
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": "float" if grid.format == "fp8" else "int",
        "symmetric": True,
        "strategy": "group" if grid.group else "channel",
        "group_size": grid.group or None,
        "dynamic": False,
    }
    activations = None
    if grid.format == "fp8":
        activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if grid.format == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _layers(model: PlainModel, order: Order, grid: Grid, folder: QuantizedFolder, on_layer: OnLayer) -> None:
    if len(folder.layers) == model.config.num_layers:
        return
    streams = Streams.begin(model, torch.from_numpy(order.windows))
    for index in range(model.config.num_layers):
        if index < len(folder.layers):
            full, rounded = model.plain(index, model.layer(index)), _read_layer(model, index, grid, folder)
            streams = streams.through(PlainLayer.attended, full, rounded)
            streams = streams.through(PlainLayer.finished, full, rounded)
        else:
            layer, streams = LayerRounder(model, index, streams, grid, order.method).run()
            folder.keep_layer(_tensors(layer, index), _figures(layer, index))
        on_layer(index, folder.layers[index])


def _tensors(layer: RoundedLayer, index: int) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(layer.vectors)
    for name, choice in layer.linears.items():
        tensors |= {f"{name}.{part}": tensor for part, tensor in write_linear(choice.weight).items()}
    return {f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items()}


def _figures(layer: RoundedLayer, index: int) -> tuple[LayerFigures, ...]:
    return tuple(
        LayerFigures(
            f"model.layers.{index}.{name}", choice.method, choice.mse, choice.mse / choice.power if choice.power else 0
        )
        for name, choice in layer.linears.items()
    )


def _read_layer(model: PlainModel, index: int, grid: Grid, folder: QuantizedFolder) -> PlainLayer:
    """A layer that an earlier run finished."""
    prefix = f"model.layers.{index}."
    held = {name.removeprefix(prefix): tensor for name, tensor in folder.read_part(index, model.device).items()}
    ready: dict[str, Tensor] = {}
    for name in LINEARS:
        n, k = model.names[f"{prefix}{name}.weight"]
        parts = {part: held.pop(f"{name}.{part}") for part in _parts(held, name)}
        ready[f"{name}.weight"] = read_linear(parts, grid.format, (n, k)).dequantized()
    return model.plain(index, ready | {name: tensor.float() for name, tensor in held.items()})


def _parts(held: Mapping[str, Tensor], name: str) -> list[str]:
    """What belongs to a linear but its bias, which is not rounded."""
    found = [full.removeprefix(f"{name}.") for full in held if full.startswith(f"{name}.")]
    return [part for part in found if part != "bias"]


def _outer(model: PlainModel) -> dict[str, Tensor]:
    """What is not in a layer, and is not rounded to few bits."""
    names = (name for name in model.names if not name.startswith("model.layers."))
    return {name: model.tensor(name).to(STORED) for name in names}


def _group_size(model: PlainModel, order: Order) -> int:
    """0: a scale a row. Raises `ConfigError`."""
    if order.scheme != "int4":
        if order.group_size is not None:
            raise ConfigError(f"group_size {order.group_size} is for int4: {order.scheme} has a scale for each row")
        return 0
    columns = {name: model.names[f"model.layers.0.{name}.weight"][1] for name in LINEARS}
    sizes = [order.group_size] if order.group_size is not None else sorted(GROUPS, reverse=True)
    for size in sizes:
        if all(k % size == 0 for k in columns.values()):
            return size
    name, k = next((name, k) for name, k in columns.items() if k % sizes[-1])
    raise ConfigError(
        f"group_size {sizes[-1]} does not divide the {k} columns of {name}: choose one of "
        f"{', '.join(str(size) for size in GROUPS if all(k % size == 0 for k in columns.values())) or 'none'}, or "
        "another scheme"
    )


def _task(checkpoint: Checkpoint, order: Order, grid: Grid) -> Task:
    digest = hashlib.sha256(str(order.windows.shape).encode() + order.windows.tobytes()).hexdigest()
    return Task(checkpoint.fingerprint, grid.format, grid.group, order.method, digest)
