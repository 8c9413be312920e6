"""The folder that is written: a file of weights for each layer as it is done, and what is needed to go on after a stop.

A file appears whole or not at all. ``config.json`` comes last, so nothing takes an unfinished folder for a model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from firsttoken.checkpoint.hf_folder import CONFIG_FILE
from firsttoken.checkpoint.safetensors_files import DTYPE_BYTES, INDEX_FILE
from firsttoken.core.errors import CheckpointError, ConfigError

STATE_FILE = "quantize.json"


class Task(msgspec.Struct, frozen=True):
    """What a folder is made from and how; one of another task is never gone on with. ``model`` is the checkpoint's
    fingerprint, ``calibration`` a digest of the tokens."""

    model: str
    scheme: str
    group_size: int
    method: str
    calibration: str
    format: int = 1


class LayerFigures(msgspec.Struct, frozen=True):
    """Of one linear: ``mse`` of its output on tokens held out, ``relative`` to the mean square of that output."""

    name: str
    method: str
    mse: float
    relative: float


class _State(msgspec.Struct, frozen=True):
    task: Task
    layers: tuple[tuple[LayerFigures, ...], ...] = ()


class QuantizedFolder:
    """``parts`` files of weights. Raises `ConfigError` for a folder that holds something else, or another task."""

    def __init__(self, path: Path, task: Task, parts: int) -> None:
        self.path = path
        self._parts = parts
        self._state = self._opened(task)

    def _opened(self, task: Task) -> _State:
        state_path = self.path / STATE_FILE
        if state_path.is_file():
            state = self._read(state_path)
            for name in Task.__struct_fields__:
                then, now = getattr(state.task, name), getattr(task, name)
                if then != now:
                    raise ConfigError(
                        f"{self.path} was begun with {name} {then!r:.80}, not {now!r:.80}: give the same to go on, "
                        "or another folder to begin anew"
                    )
            return state
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(f"{self.path} is not an empty folder: name a new one, or remove what is there")
        self.path.mkdir(parents=True, exist_ok=True)
        state = _State(task)
        self._write(STATE_FILE, lambda path: path.write_bytes(msgspec.json.encode(state)))
        return state

    def _read(self, path: Path) -> _State:
        try:
            return msgspec.json.decode(path.read_bytes(), type=_State)
        except msgspec.MsgspecError as error:
            raise CheckpointError(
                f"is not what this command writes ({error}): remove the folder to begin anew", file=str(path)
            ) from error

    @property
    def layers(self) -> tuple[tuple[LayerFigures, ...], ...]:
        """The figures of all layers that are done."""
        return self._state.layers

    def part(self, number: int) -> str:
        """A file's name, ``number`` from 0."""
        return f"model-{number + 1:05d}-of-{self._parts:05d}.safetensors"

    def keep_layer(self, tensors: Mapping[str, Tensor], figures: tuple[LayerFigures, ...]) -> None:
        """The next layer."""
        self.write_part(len(self.layers), tensors)
        self._state = _State(self._state.task, (*self._state.layers, figures))
        self._write(STATE_FILE, lambda path: path.write_bytes(msgspec.json.encode(self._state)))

    def write_part(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        ready = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        self._write(self.part(number), lambda path: save_file(ready, path, metadata={"format": "pt"}))

    def read_part(self, number: int, device: torch.device) -> dict[str, Tensor]:
        """Raises `CheckpointError` for a file that is gone or damaged."""
        path = self.path / self.part(number)
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118  # no mapping
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"cannot be read ({error}): remove the folder to begin anew", file=str(path)
            ) from error

    def finish(self, config: bytes) -> int:
        """The index and ``config.json``; the state goes. Gives the bytes of all tensors."""
        weight_map: dict[str, str] = {}
        total = 0
        for number in range(self._parts):
            with safe_open(self.path / self.part(number), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    held = file.get_slice(name)
                    weight_map[name] = self.part(number)
                    total += prod(held.get_shape()) * DTYPE_BYTES[held.get_dtype()]
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        self._write(INDEX_FILE, lambda path: path.write_bytes(msgspec.json.format(msgspec.json.encode(index))))
        self._write(CONFIG_FILE, lambda path: path.write_bytes(config))
        (self.path / STATE_FILE).unlink()
        return total

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        """Whole or not at all."""
        beside = self.path / f"{name}.part"
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(self.path / name)
