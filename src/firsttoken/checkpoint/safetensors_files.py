"""Weights of a Hugging Face folder: one safetensors file, or several under an index.

The `safetensors` library judges the format; before it sees a file, our own check bounds what a damaged header could
cost and names the tensor at fault. Tensor bytes are then views of the mapped file: the library's numpy interface
copies, and knows no bfloat16.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from firsttoken.checkpoint.checkpoint import Bytes, TensorInfo
from firsttoken.checkpoint.json_files import MAX_CONFIG_BYTES, decode_json, read_bytes
from firsttoken.core.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Room for some 60,000 tensors a file; bounds what decoding a damaged header can cost.
MAX_HEADER_BYTES = 8 << 20
MAX_DIMS = 8
METADATA = "__metadata__"

# Bytes an element: the dtypes of the format whose elements fill whole bytes.
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """A tensor's line in the header. The defaults, which no check lets pass, allow `METADATA` among the lines."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class _Place(msgspec.Struct, frozen=True):
    file: int
    offset: int
    info: TensorInfo


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _decode_header(raw: bytes, file: str) -> dict[str, _Entry]:
    try:
        entries = msgspec.json.decode(raw, type=dict[str, _Entry])
        entries.pop(METADATA, None)
        return entries
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Once more, slowly, to learn which tensor's line it is.
        lines: dict[str, msgspec.Raw] = decode_json(raw, dict[str, msgspec.Raw], file, "header")
        lines.pop(METADATA, None)
        return {name: decode_json(line, _Entry, file, name) for name, line in lines.items()}


def _check_header(data: mmap.mmap, file: str) -> dict[str, tuple[TensorInfo, int]]:
    """Every tensor's info and absolute offset; raises `CheckpointError` naming the tensor at fault."""

    def fail(field: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=file, field=field)

    size = int.from_bytes(data[:8], "little")
    if size > min(MAX_HEADER_BYTES, len(data) - 8):
        raise fail("header length", f"is {size} bytes in a file of {len(data)}: it is cut short or damaged")
    entries = _decode_header(data[8 : 8 + size], file)
    base, position = 8 + size, 0
    tensors: dict[str, tuple[TensorInfo, int]] = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in DTYPE_BYTES:
            raise fail(name, f"has dtype {entry.dtype!r}; known are {', '.join(DTYPE_BYTES)}")
        if len(entry.shape) > MAX_DIMS or min(entry.shape, default=1) < 0:
            raise fail(name, f"has the shape {entry.shape!r:.80}, which is not one")
        needed = prod(entry.shape) * DTYPE_BYTES[entry.dtype]
        if end - begin != needed:
            raise fail(name, f"of shape {entry.shape!r:.80} needs {needed} bytes, its offsets give it {end - begin}")
        if begin != position:
            problem = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise fail(name, f"starts at {begin} and {problem}, which ends at {position}: the file is damaged")
        if base + end > len(data):
            raise fail(name, f"ends at byte {base + end} of a file of {len(data)}: it is cut short; fetch it again")
        position = end
        tensors[name] = (TensorInfo(name, entry.shape, entry.dtype, needed), base + begin)
    if base + position != len(data):
        raise fail("data", f"has {len(data) - base} bytes where the tensors take {position}: the file is damaged")
    return tensors


def _open_file(path: Path) -> tuple[mmap.mmap, dict[str, tuple[TensorInfo, int]]]:
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 10:
                raise CheckpointError("is too short to be a safetensors file", file=str(path), field="header")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be opened ({error})", file=str(path)) from error
    tensors = _check_header(data, str(path))
    try:
        with safe_open(str(path), framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"is refused by the safetensors library ({error})", file=str(path)) from error
    return data, tensors


class SafetensorsFiles:
    """`TensorSource` over the files of a folder. Raises `CheckpointError` naming file and tensor."""

    def __init__(self, folder: Path) -> None:
        self.paths = _weight_files(folder)
        self._maps: list[mmap.mmap] = []
        self._places: dict[str, _Place] = {}
        for number, path in enumerate(self.paths):
            data, tensors = _open_file(path)
            self._maps.append(data)
            for name, (info, offset) in tensors.items():
                if name in self._places:
                    other = self.paths[self._places[name].file].name
                    raise CheckpointError(f"is in {other} as well", file=str(path), field=name)
                self._places[name] = _Place(number, offset, info)
        if (folder / INDEX_FILE).is_file():
            self._check_index(folder)
        self._infos = {name: place.info for name, place in self._places.items()}

    def _check_index(self, folder: Path) -> None:
        weight_map = _read_index(folder)
        for name, shard in weight_map.items():
            place = self._places.get(name)
            if place is None or self.paths[place.file].name != shard:
                raise CheckpointError("the index names this tensor, but it is not there", file=shard, field=name)
        for name, place in self._places.items():
            if name not in weight_map:
                raise CheckpointError(f"is not named by {INDEX_FILE}", file=str(self.paths[place.file]), field=name)

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def data(self, name: str) -> Bytes:
        """See `TensorSource.data`: always a read-only view of the mapped file."""
        place = self._places.get(name)
        if place is None:
            raise CheckpointError("the checkpoint has no such tensor", file=str(self.paths[0].parent), field=name)
        if place.info.nbytes == 0:
            return np.empty(place.info.raw_shape, dtype=np.uint8)
        raw = np.frombuffer(self._maps[place.file], np.uint8, count=place.info.nbytes, offset=place.offset)
        return raw.reshape(place.info.raw_shape)


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    index: _Index = decode_json(read_bytes(path, MAX_CONFIG_BYTES), _Index, str(path))
    if not index.weight_map:
        raise CheckpointError("names no tensors", file=str(path), field="weight_map")
    for name, shard in index.weight_map.items():
        # A name, never a path: an index must not make us read files outside its folder.
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"is said to be in {shard!r:.80}, which is not a safetensors file of the folder",
                file=str(path),
                field=name,
            )
    return index.weight_map


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).is_file():
        paths = [folder / shard for shard in sorted(set(_read_index(folder).values()))]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"is named by {INDEX_FILE} but is missing: fetch the model again", file=str(path))
        return paths
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    raise CheckpointError(_why_no_weights(folder), file=str(folder))


def _why_no_weights(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return f"has {shards[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}: fetch the model again"
    if pickled:
        return (
            f"has its weights only as {pickled[0]}, a pickle, which can run code and is never read: "
            "convert the model to safetensors"
        )
    return f"has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
