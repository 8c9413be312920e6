"""Reading and writing files of measured configs. Torch-free."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated

import msgspec

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear.config import LinearConfig, OpKind, RowBucket, default_config, row_bucket

_MAX_BYTES = 1 << 20
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class TunedLinear(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The best config found for one product: ``kind`` over weights ``[n, k]`` with the bucket's ``rows``.

    ``us`` is its share of the decode step in microseconds, when it was measured.
    """

    kind: OpKind
    n: _Size
    k: _Size
    rows: RowBucket
    config: LinearConfig
    us: Annotated[float, msgspec.Meta(ge=0)] | None = None

    @property
    def key(self) -> tuple[OpKind, int, int, RowBucket]:
        return self.kind, self.n, self.k, self.rows


class TunedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that was measured on the GPU that the driver calls ``gpu``."""

    gpu: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    linear: Annotated[list[TunedLinear], msgspec.Meta(max_length=4096)]


def read_tuned(path: Path) -> TunedFile:
    """The file's content; raises `ConfigError` that names what is wrong with it and where."""
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise ConfigError(f"{path}: is {size} bytes long, tuned configs take at most {_MAX_BYTES}")
        tuned = msgspec.json.decode(path.read_bytes(), type=TunedFile)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: does not hold tuned configs ({error}); tune again or remove it") from error
    _check(path, tuned)
    return tuned


def _check(path: Path, tuned: TunedFile) -> None:
    seen = set()
    for index, entry in enumerate(tuned.linear):
        place = f"{path}: linear[{index}]"
        if entry.key in seen:
            raise ConfigError(f"{place}: a second config for {entry.key}; keep one")
        seen.add(entry.key)
        try:
            entry.config.check(entry.kind, entry.n, entry.k)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        most = int(entry.rows.split("-")[-1])
        if entry.config.block_m < most:
            raise ConfigError(f"{place}: block_m = {entry.config.block_m} cannot hold the {entry.rows} rows of its key")


def write_tuned(path: Path, tuned: TunedFile) -> None:
    """Write ``tuned``, one entry a line in the order of the keys, so that a diff shows what tuning changed."""
    entries = sorted(tuned.linear, key=lambda entry: entry.key)
    lines = ",\n  ".join(msgspec.json.encode(entry).decode() for entry in entries)
    path.write_text(f'{{\n "gpu": {msgspec.json.encode(tuned.gpu).decode()},\n "linear": [\n  {lines}\n ]\n}}\n')


def file_name(gpu_name: str) -> str:
    """``NVIDIA H200`` -> ``h200.json``: the driver's name without its maker, as a file name."""
    words = re.findall(r"[a-z0-9]+", gpu_name.lower())
    return "-".join(word for word in words if word != "nvidia") + ".json"


@functools.cache
def tuned_for(gpu_name: str) -> TunedFile | None:
    """What comes with firsttoken for the GPU that the driver calls ``gpu_name``; None when it was never tuned."""
    path = Path(__file__).with_name(file_name(gpu_name))
    return read_tuned(path) if path.is_file() else None


@functools.cache
def linear_config(kind: OpKind, n: int, k: int, rows: int, gpu_name: str) -> LinearConfig:
    """The config of a product over weights ``[n, k]`` with ``rows`` rows: measured, else `default_config`."""
    key = (kind, n, k, row_bucket(rows))
    tuned = tuned_for(gpu_name)
    for entry in tuned.linear if tuned is not None else ():
        if entry.key == key:
            return entry.config
    return default_config(kind, n, k, rows)
