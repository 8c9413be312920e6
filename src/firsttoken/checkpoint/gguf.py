"""A bounded reader of GGUF files (versions 2 and 3, little-endian) over a memory map.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is not trusted: every count, length and
offset is compared with what is left of the file before anything is built from it, so a damaged file costs neither
time nor memory. Strings in arrays are skipped over and decoded only when asked for.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from firsttoken.checkpoint.checkpoint import Bytes
from firsttoken.checkpoint.ggml_types import GGML_TYPES
from firsttoken.checkpoint.gguf_metadata import ArrayField, Field, GGUFMetadata, Scalar
from firsttoken.core.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KEY_BYTES = 65535  # the format's own limit
MAX_TENSOR_NAME_BYTES = 256  # the format says 64; some writers are generous
MAX_DIMS = 4
MAX_FIELDS = 65536
MAX_TENSORS = 1 << 14
# Above any real vocabulary with its merges; bounds the time that skipping strings can take.
MAX_STRINGS = 2_000_000

SUPPORTED_TYPES = frozenset(
    {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
)

# The format's value types: uint8, int8, uint16, int16, uint32, int32, float32, bool, uint64, int64, float64.
_SCALARS: dict[int, tuple[str, int]] = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    7: ("B", 1),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GGUFTensor(msgspec.Struct, frozen=True):
    """A tensor under its GGUF name: ``shape`` row-major (the file's dimensions reversed), ``offset`` in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class GGUFFile:
    """An opened GGUF file: metadata and tensor table are checked, tensor data is only mapped.

    Raises `CheckpointError` naming file and field for anything damaged or unsupported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        reader = _HeaderReader(self._map, str(path))
        self.version, num_tensors, num_fields = reader.preamble()
        self.metadata = GGUFMetadata(str(path), self._map, reader.fields(num_fields))
        alignment = _alignment(self.metadata)
        self.tensors = reader.tensors(num_tensors, alignment)

    def raw(self, tensor: GGUFTensor) -> Bytes:
        """The tensor's bytes, flat: a read-only view of the map."""
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if path.stat().st_size < len(MAGIC) + 4:
                raise CheckpointError("is too short to be a GGUF file", file=str(path), field="header")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be opened ({error})", file=str(path)) from error


def _alignment(metadata: GGUFMetadata) -> int:
    alignment = metadata.integer("general.alignment", default=DEFAULT_ALIGNMENT)
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"is {alignment}, must be a power of two from 8 to {MAX_ALIGNMENT}: the file is damaged",
            file=metadata.file,
            field="general.alignment",
        )
    return alignment


class _HeaderReader:
    """A cursor over the header. Invariant: ``position`` never passes the end of the file."""

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self.data = data
        self.end = len(data)
        self.file = file
        self.position = 0
        self.strings_left = MAX_STRINGS

    def fail(self, field: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=self.file, field=field)

    def need(self, size: int, field: str) -> None:
        left = self.end - self.position
        if size > left:
            raise self.fail(field, f"needs {size} bytes where {left} are left in the file: it is cut short or damaged")

    def u32(self, field: str) -> int:
        self.need(4, field)
        value: int = _U32.unpack_from(self.data, self.position)[0]
        self.position += 4
        return value

    def u64(self, field: str) -> int:
        self.need(8, field)
        value: int = _U64.unpack_from(self.data, self.position)[0]
        self.position += 8
        return value

    def text(self, field: str, limit: int | None = None) -> str:
        size = self.u64(field)
        if limit is not None and size > limit:
            raise self.fail(field, f"is a string of {size} bytes, at most {limit} are allowed: the file is damaged")
        self.need(size, field)
        raw = self.data[self.position : self.position + size]
        self.position += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(field, f"is not valid UTF-8 ({error.reason} at byte {error.start})") from error

    def name(self, field: str, limit: int) -> str:
        name = self.text(field, limit)
        if not name:
            raise self.fail(field, "is empty: the file is damaged")
        return name

    def preamble(self) -> tuple[int, int, int]:
        if self.data[:4] != MAGIC:
            raise self.fail("magic", f"is {self.data[:4]!r} where {MAGIC!r} is expected: not a GGUF file")
        self.position = 4
        version = self.u32("version")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
            raise self.fail("version", "the file is big-endian, which is not supported: convert it to little-endian")
        if version not in VERSIONS:
            raise self.fail("version", f"is {version}, supported are 2 and 3: convert the model again")
        num_tensors = self.u64("tensor_count")
        num_fields = self.u64("metadata_kv_count")
        # The smallest field is an 8-byte length, an empty key, a type and one byte; a tensor has 8 + 4 + 4 + 8.
        left = self.end - self.position
        if num_fields > min(MAX_FIELDS, left // 13):
            raise self.fail("metadata_kv_count", f"is {num_fields}, more than the file can hold: it is damaged")
        if num_tensors > min(MAX_TENSORS, left // 24):
            raise self.fail("tensor_count", f"is {num_tensors}, more than the file can hold: it is damaged")
        return version, num_tensors, num_fields

    def fields(self, count: int) -> dict[str, Field]:
        fields: dict[str, Field] = {}
        for index in range(count):
            key = self.name(f"key of metadata field {index}", MAX_KEY_BYTES)
            if key in fields:
                raise self.fail(key, "appears twice in the metadata: the file is damaged")
            fields[key] = self.value(key)
        return fields

    def value(self, key: str) -> Field:
        kind = self.u32(key)
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self.array(key)
        return self.scalar(key, kind)

    def scalar(self, key: str, kind: int) -> Scalar:
        if kind not in _SCALARS:
            raise self.fail(key, f"has value type {kind}, which GGUF does not define: the file is damaged")
        code, size = _SCALARS[kind]
        self.need(size, key)
        value: int | float = struct.unpack_from("<" + code, self.data, self.position)[0]
        self.position += size
        if kind == _BOOL:
            if value not in (0, 1):
                raise self.fail(key, f"is a bool of value {value}: the file is damaged")
            return bool(value)
        return value

    def array(self, key: str) -> ArrayField:
        kind = self.u32(key)
        count = self.u64(key)
        if kind == _ARRAY:
            raise self.fail(key, "is an array of arrays, which is not supported")
        if kind == _STRING:
            return self.string_array(key, count)
        if kind not in _SCALARS:
            raise self.fail(key, f"is an array of value type {kind}, which GGUF does not define: the file is damaged")
        code, size = _SCALARS[kind]
        self.need(count * size, key)
        start = self.position
        self.position += count * size
        return ArrayField(code="?" if kind == _BOOL else code, count=count, start=start)

    def string_array(self, key: str, count: int) -> ArrayField:
        self.need(count * 8, key)
        if count > self.strings_left:
            raise self.fail(key, f"holds {count} strings: a file may hold at most {MAX_STRINGS}")
        self.strings_left -= count
        start = position = self.position
        end, data, unpack = self.end, self.data, _U64.unpack_from
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
                if position > end:
                    break
        except struct.error:
            position = end + 1
        if position > end:
            raise self.fail(key, "holds a string that reaches past the end of the file: it is cut short or damaged")
        self.position = position
        return ArrayField(code="", count=count, start=start)

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        for index in range(count):
            tensor = self.tensor(index, alignment)
            if tensor.name in tensors:
                raise self.fail(tensor.name, "appears twice among the tensors: the file is damaged")
            tensors[tensor.name] = tensor
        base = -(-self.position // alignment) * alignment
        placed = {name: msgspec.structs.replace(t, offset=base + t.offset) for name, t in tensors.items()}
        self.check_layout(placed)
        return placed

    def tensor(self, index: int, alignment: int) -> GGUFTensor:
        name = self.name(f"name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        num_dims = self.u32(name)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(name, f"has {num_dims} dimensions, 1 to {MAX_DIMS} are allowed: the file is damaged")
        dims = [self.u64(name) for _ in range(num_dims)]
        kind = self.u32(name)
        offset = self.u64(name)
        if kind not in GGML_TYPES:
            raise self.fail(name, f"has tensor type {kind}, which is unknown")
        type_name, block, block_bytes = GGML_TYPES[kind]
        if type_name not in SUPPORTED_TYPES:
            raise self.fail(name, f"is stored as {type_name}; supported are {', '.join(sorted(SUPPORTED_TYPES))}")
        if min(dims) < 1:
            raise self.fail(name, f"has a dimension of size 0 in {dims}: the file is damaged")
        if dims[0] % block:
            raise self.fail(name, f"has rows of {dims[0]} elements, which {type_name} cannot hold (blocks of {block})")
        if offset % alignment:
            raise self.fail(name, f"starts at offset {offset}, which is not a multiple of {alignment}")
        nbytes = prod(dims) // block * block_bytes
        if offset + nbytes > self.end:
            raise self.fail(name, f"has shape {dims[::-1]} and needs {nbytes} bytes at offset {offset}, past the end")
        return GGUFTensor(name, tuple(reversed(dims)), type_name, offset, nbytes)

    def check_layout(self, tensors: dict[str, GGUFTensor]) -> None:
        previous: GGUFTensor | None = None
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            end = tensor.offset + tensor.nbytes
            if end > self.end:
                raise self.fail(
                    tensor.name, f"ends at byte {end} of a file of {self.end}: the file is cut short; fetch it again"
                )
            if previous is not None and tensor.offset < previous.offset + previous.nbytes:
                raise self.fail(tensor.name, f"overlaps the tensor {previous.name}: the file is damaged")
            previous = tensor
