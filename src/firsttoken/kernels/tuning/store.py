"""Reading and writing files of measured configs. Torch-free."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear.config import (
    BUCKET_ROWS,
    LinearConfig,
    OpKind,
    RowBucket,
    default_config,
    row_bucket,
)
from firsttoken.kernels.packed_linear.config import CHUNK_COLUMNS, PackedConfig
from firsttoken.kernels.packed_linear.config import default_config as default_packed

_MAX_BYTES = 1 << 20
# One row of FP8 weights goes to the CUDA cores from so many columns of the result on: a head's, or gate and up's.
_MANY_COLUMNS = 16_384
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

    def check(self) -> None:
        """Raise `ConfigError` for a config that does not fit."""
        self.config.check(self.kind, self.n, self.k)
        most = int(self.rows.split("-")[-1])
        if self.config.block_m < most:
            raise ConfigError(f"block_m = {self.config.block_m} cannot hold the {self.rows} rows of its key")


class TunedPacked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The same over packed weights: ``config``, or ``row`` for one row of FP8 weights on the CUDA cores."""

    kind: OpKind
    n: _Size
    k: _Size
    rows: RowBucket
    format: Literal["int4", "fp8"]
    config: PackedConfig | None = None
    row: LinearConfig | None = None

    @property
    def key(self) -> tuple[OpKind, int, int, RowBucket, str]:
        return self.kind, self.n, self.k, self.rows, self.format

    def check(self) -> None:
        """Raise `ConfigError` for a config that does not fit, or for none or two."""
        if (self.config is None) == (self.row is None):
            raise ConfigError("has to have a config or a row, and not both")
        if self.config is not None:
            self.config.check(-(-self.k // CHUNK_COLUMNS[self.format]))
            if self.config.block_m < BUCKET_ROWS[self.rows]:
                raise ConfigError(f"block_m = {self.config.block_m} cannot hold the {self.rows} rows of its key")
        if self.row is not None:
            self.row.check(self.kind, self.n, self.k)
            if (self.format, self.rows, self.row.kernel) != ("fp8", "1", "fma"):
                got = f"{self.rows} of {self.format} by {self.row.kernel}"
                raise ConfigError(f"a row is for 1 row of fp8 by fma, got {got}")


class TunedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that was measured on the GPU that the driver calls ``gpu``."""

    gpu: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    linear: Annotated[list[TunedLinear], msgspec.Meta(max_length=4096)]
    packed: Annotated[list[TunedPacked], msgspec.Meta(max_length=4096)] = []


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
    entries: list[tuple[str, TunedLinear | TunedPacked]] = [
        *((f"linear[{index}]", entry) for index, entry in enumerate(tuned.linear)),
        *((f"packed[{index}]", entry) for index, entry in enumerate(tuned.packed)),
    ]
    seen = set()
    for place, entry in entries:
        if entry.key in seen:
            raise ConfigError(f"{path}: {place}: a second config for {entry.key}; keep one")
        seen.add(entry.key)
        try:
            entry.check()
        except ConfigError as error:
            raise ConfigError(f"{path}: {place}: {error}") from error


def write_tuned(path: Path, tuned: TunedFile) -> None:
    """Write ``tuned``, one entry a line in the order of the keys, so that a diff shows what tuning changed."""
    lists = [f'"gpu": {msgspec.json.encode(tuned.gpu).decode()}', f'"linear": [\n  {_lines(tuned.linear)}\n ]']
    if tuned.packed:
        lists.append(f'"packed": [\n  {_lines(tuned.packed)}\n ]')
    path.write_text("{\n " + ",\n ".join(lists) + "\n}\n")


def _lines(entries: Sequence[TunedLinear] | Sequence[TunedPacked]) -> str:
    ordered = sorted(entries, key=lambda entry: entry.key)
    return ",\n  ".join(msgspec.json.encode(entry).decode() for entry in ordered)


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


@functools.cache
def packed_config(
    kind: OpKind, n: int, k: int, rows: int, format: Literal["int4", "fp8"], gpu_name: str
) -> PackedConfig | LinearConfig:
    """The same over packed weights."""
    key = (kind, n, k, row_bucket(rows), format)
    tuned = tuned_for(gpu_name)
    for entry in tuned.packed if tuned is not None else ():
        if entry.key == key:
            found = entry.config or entry.row
            assert found is not None
            return found
    if format == "fp8" and rows == 1 and n >= _MANY_COLUMNS and k >= 1024:
        return LinearConfig("fma", 8, 512, 2, 4)
    return default_packed(n, k, rows, format)


def product_config(kind: OpKind, n: int, k: int, rows: int, format: str, gpu_name: str) -> LinearConfig | PackedConfig:
    """`linear_config` for bfloat16 weights, `packed_config` for packed ones."""
    if format == "int4" or format == "fp8":
        return packed_config(kind, n, k, rows, format, gpu_name)
    return linear_config(kind, n, k, rows, gpu_name)
