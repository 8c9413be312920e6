"""The folder that is written: a file of weights for each layer as it is done, and what is needed to go on after a stop.

A file appears whole or not at all. ``config.json`` comes last, so nothing takes an unfinished folder for a model. What
is gone on with is what was written: each file's digest is kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from firsttoken.checkpoint.hf_folder import CONFIG_FILE
from firsttoken.checkpoint.safetensors_files import DTYPE_BYTES, INDEX_FILE
from firsttoken.core.errors import CheckpointError, ConfigError

STATE_FILE = "quantize.json"
_ANEW = "remove the folder to begin anew"


class Task(msgspec.Struct, frozen=True):
    """What a folder is made from and how; one of another task is never gone on with. ``model`` is the checkpoint's
    fingerprint, ``calibration`` a digest of the tokens."""

    model: str
    scheme: str
    group_size: int
    method: str
    calibration: str
    format: int = 2


class LayerFigures(msgspec.Struct, frozen=True):
    """Of one linear: ``mse`` of its output on tokens held out, ``relative`` to the mean square of that output."""

    name: str
    method: str
    mse: float
    relative: float


class _Layer(msgspec.Struct, frozen=True):
    figures: tuple[LayerFigures, ...]
    digest: str  # SHA-256 of its file


class _State(msgspec.Struct, frozen=True):
    task: Task
    layers: tuple[_Layer, ...] = ()


class QuantizedFolder:
    """``parts`` files of weights, for one process at a time: a context that holds the folder. Raises `ConfigError` for
    a folder that holds something else, another task, or is being written; `CheckpointError` for one that is damaged."""

    def __init__(self, path: Path, task: Task, parts: int) -> None:
        self.path = path
        self._parts = parts
        if not path.is_dir():
            if path.exists() or path.is_symlink():
                raise ConfigError(f"{path} is no folder: name a new one")
            path.mkdir(parents=True)
        self._held = self._hold()
        try:
            self._state = self._opened(task)
        except BaseException:
            os.close(self._held)
            raise

    def __enter__(self) -> QuantizedFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._held)

    def _hold(self) -> int:
        """The folder, open and locked until it is closed or the process ends, however it does."""
        held = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            raise ConfigError(
                f"{self.path} is being written by another process: wait for it, or name another"
            ) from None
        except OSError:
            pass  # a file system without locks
        return held

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
            self._check(state)
            return state
        if (self.path / CONFIG_FILE).exists():
            raise ConfigError(f"{self.path} holds a whole model already: name a new folder, or remove what is there")
        if any(path.name != _beside(STATE_FILE) for path in self.path.iterdir()):
            raise ConfigError(f"{self.path} is not an empty folder: name a new one, or remove what is there")
        state = _State(task)
        self._write(STATE_FILE, lambda path: path.write_bytes(msgspec.json.encode(state)))
        return state

    def _read(self, path: Path) -> _State:
        try:
            return msgspec.json.decode(path.read_bytes(), type=_State)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"is not what this command writes ({error}): {_ANEW}", file=str(path)) from error

    def _check(self, state: _State) -> None:
        if len(state.layers) >= self._parts or not all(layer.figures for layer in state.layers):
            raise CheckpointError(f"tells of layers that the model does not have: {_ANEW}", file=str(self.path))
        for number, layer in enumerate(state.layers):
            path = self.path / self.part(number)
            try:
                found = _digest(path)
            except OSError as error:
                raise CheckpointError(f"cannot be read ({error.strerror}): {_ANEW}", file=str(path)) from None
            if found != layer.digest:
                raise CheckpointError(f"is not as it was written: {_ANEW}", file=str(path))

    @property
    def layers(self) -> tuple[tuple[LayerFigures, ...], ...]:
        """The figures of all layers that are done."""
        return tuple(layer.figures for layer in self._state.layers)

    def part(self, number: int) -> str:
        """A file's name, ``number`` from 0."""
        return f"model-{number + 1:05d}-of-{self._parts:05d}.safetensors"

    def keep_layer(self, tensors: Mapping[str, Tensor], figures: tuple[LayerFigures, ...]) -> None:
        """The next layer."""
        number = len(self._state.layers)
        self.write_part(number, tensors)
        layer = _Layer(figures, _digest(self.path / self.part(number)))
        self._state = _State(self._state.task, (*self._state.layers, layer))
        self._write(STATE_FILE, lambda path: path.write_bytes(msgspec.json.encode(self._state)))

    def write_part(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        ready = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        self._write(self.part(number), lambda path: save_file(ready, path, metadata={"format": "pt"}))

    def read_part(self, number: int, device: torch.device) -> dict[str, Tensor]:
        with safe_open(self.path / self.part(number), framework="pt") as file:
            return {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118  # no mapping

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
        """Whole or not at all. Raises `CheckpointError`."""
        beside = self.path / _beside(name)
        try:
            write(beside)
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.replace(self.path / name)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                beside.unlink()
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(
                f"cannot be written ({reason}): make room, and the same command goes on", file=str(self.path / name)
            ) from error


def _beside(name: str) -> str:
    return f"{name}.part"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
