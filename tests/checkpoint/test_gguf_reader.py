"""The GGUF reader: right on what the format's own writer makes, and cheap, named errors on anything damaged."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken.checkpoint.ggml_types import GGML_TYPES
from firsttoken.checkpoint.gguf import MAX_STRINGS, SUPPORTED_TYPES, GGUFFile
from firsttoken.checkpoint.gguf_checkpoint import open_gguf
from firsttoken.core.errors import CheckpointError

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def read(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "raw.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def test_tensor_types_are_those_of_the_reference() -> None:
    reference = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    # An older reference knows fewer.
    assert {number: tuple(known) for number, known in GGML_TYPES.items() if number in reference} == reference
    assert {known.name for known in GGML_TYPES.values()} >= SUPPORTED_TYPES


def test_opening_a_file_imports_no_reference(write_gguf: Any) -> None:
    code = (
        "import sys; from pathlib import Path; from firsttoken.checkpoint.locate import open_checkpoint\n"
        "open_checkpoint(sys.argv[1]); sys.exit('gguf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(write_gguf())], timeout=60, check=False).returncode == 0


def test_reads_what_the_reference_writer_wrote(write_gguf: Any, tensors_written: dict[str, np.ndarray]) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
            getattr(writer, f"add_{kind}")(f"x.{kind}", 97)
        writer.add_int32("x.negative", -5)
        writer.add_float32("x.float32", 0.5)
        writer.add_float64("x.float64", 0.1)
        writer.add_bool("x.true", True)
        writer.add_string("x.text", "żółw\n🐢")
        writer.add_array("x.ints", [3, -1, 2])
        writer.add_array("x.texts", ["", "ü", "long" * 100])

    file = GGUFFile(write_gguf(extra=extra))
    meta = file.metadata
    assert file.version == 3
    assert all(meta.integer(f"x.{kind}") == 97 for kind in ("uint8", "int8", "uint16", "int64", "uint64"))
    assert meta.integer("x.negative") == -5
    assert meta.number("x.float32") == 0.5
    assert meta.number("x.float64") == 0.1
    assert meta.optional_flag("x.true") is True
    assert meta.text("x.text") == "żółw\n🐢"
    assert meta.numbers("x.ints").tolist() == [3, -1, 2]
    assert meta.strings("x.texts") == ["", "ü", "long" * 100]
    assert set(file.tensors) == set(tensors_written)
    for name, values in tensors_written.items():
        tensor = file.tensors[name]
        assert tensor.shape == values.shape
        assert file.raw(tensor).tobytes() == values.tobytes()


def test_version_2_has_the_same_layout(write_gguf: Any, tmp_path: Path) -> None:
    content = bytearray(write_gguf().read_bytes())
    content[4] = 2
    assert read(tmp_path, bytes(content)).version == 2


@pytest.mark.parametrize("kind", [int, str, bool, list])
def test_a_field_of_the_wrong_type_is_named(kind: type, write_gguf: Any) -> None:
    meta = GGUFFile(write_gguf()).metadata
    key, get = {
        int: ("general.architecture", meta.integer),
        str: ("llama.block_count", meta.text),
        bool: ("llama.block_count", meta.optional_flag),
        list: ("llama.block_count", meta.strings),
    }[kind]
    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")) as caught:
        get(key)
    assert caught.value.field == key


def damage() -> list[tuple[str, str, Callable[[Any], bytes]]]:
    """(what is wrong, the field the error must name, the file)."""
    huge = 2**63
    f32_64 = b"\0" * 256

    def good(raw: Any) -> Any:
        raw = raw()
        raw.data = f32_64
        return raw.field("general.architecture", STRING, raw.string(b"llama")).tensor(b"t", [64], 0, 0)

    def with_attr(name: str, value: object) -> Callable[[Any], bytes]:
        def build(raw: Any) -> bytes:
            file = good(raw)
            setattr(file, name, value)
            return file.build()

        return build

    def field(key: str, kind: int, value: bytes) -> Callable[[Any], bytes]:
        return lambda raw: good(raw).field(key, kind, value).build()

    def tensor(*args: Any, **options: Any) -> Callable[[Any], bytes]:
        return lambda raw: good(raw).tensor(*args, **options).build()

    return [
        ("empty", "header", lambda raw: b""),
        ("magic", "magic", with_attr("magic", b"GGML")),
        ("version 1", "version", with_attr("version", 1)),
        ("version 4", "version", with_attr("version", 4)),
        ("big-endian", "version", lambda raw: b"GGUF" + struct.pack(">IQQ", 3, 0, 0)),
        ("tensor count", "tensor_count", with_attr("num_tensors", huge)),
        ("tensor count, near", "name of tensor 1", with_attr("num_tensors", 3)),
        ("field count", "metadata_kv_count", with_attr("num_fields", huge)),
        ("string length", "k", field("k", STRING, struct.pack("<Q", huge))),
        ("key length", "key of metadata field 1", lambda raw: _long_key(good(raw))),
        ("not UTF-8", "k", field("k", STRING, struct.pack("<Q", 1) + b"\xff")),
        ("value type", "k", field("k", 77, b"\0" * 8)),
        ("bool of 2", "k", field("k", BOOL, b"\x02")),
        ("nesting", "k", field("k", ARRAY, struct.pack("<IQIQ", ARRAY, 1, U32, 0))),
        ("array type", "k", field("k", ARRAY, struct.pack("<IQ", 99, 1))),
        ("array count", "k", field("k", ARRAY, struct.pack("<IQ", F32, huge))),
        ("array count, overflow", "k", field("k", ARRAY, struct.pack("<IQ", U64, 2**61 + 1))),
        ("string array count", "k", field("k", ARRAY, struct.pack("<IQ", STRING, huge))),
        ("string in array", "k", field("k", ARRAY, struct.pack("<IQQ", STRING, 1, huge))),
        ("key twice", "general.architecture", field("general.architecture", U32, b"\0" * 4)),
        ("alignment 0", "general.alignment", field("general.alignment", U32, struct.pack("<I", 0))),
        ("alignment 24", "general.alignment", field("general.alignment", U32, struct.pack("<I", 24))),
        ("alignment huge", "general.alignment", field("general.alignment", U32, struct.pack("<I", 2**31))),
        ("tensor name length", "name of tensor 1", tensor(b"u", [64], 0, 0, name_length=2**40)),
        ("tensor twice", "t", tensor(b"t", [64], 0, 0)),
        ("no dimensions", "u", tensor(b"u", [], 0, 0)),
        ("dimensions", "u", tensor(b"u", [1], 0, 0, num_dims=2**31)),
        ("zero dimension", "u", tensor(b"u", [0], 0, 0)),
        ("absurd dimension", "u", tensor(b"u", [2**63], 0, 0)),
        ("dimensions overflow", "u", tensor(b"u", [2**32, 2**32, 4], 0, 0)),
        ("tensor type", "u", tensor(b"u", [64], 1000, 0)),
        ("removed tensor type", "u", tensor(b"u", [64], 4, 0)),
        ("unsupported tensor type", "u", tensor(b"u", [256], 23, 0)),
        ("odd row", "u", tensor(b"u", [33], 8, 0)),
        ("unaligned", "u", tensor(b"u", [8], 0, 4)),
        ("overlap", "u", tensor(b"u", [8], 0, 224)),
        ("beyond the file", "u", tensor(b"u", [8], 0, 256)),
        ("offset overflow", "u", tensor(b"u", [8], 0, 2**64 - 32)),
    ]


def _long_key(file: Any) -> bytes:
    file.fields.append(struct.pack("<Q", 2**32) + b"key")
    return bytes(file.build())


DAMAGE = damage()


@pytest.mark.parametrize(("field", "build"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_damage_is_refused_by_name_without_cost(
    field: str, build: Callable[[Any], bytes], tmp_path: Path, raw_gguf: Any
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(build(raw_gguf))
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(CheckpointError) as caught:
            GGUFFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.file == str(path)
    assert caught.value.field == field
    assert peak < 1 << 20
    assert time.perf_counter() - began < 1


def test_the_undamaged_file_of_those_tests_is_read(tmp_path: Path, raw_gguf: Any) -> None:
    raw = raw_gguf()
    raw.data = b"\0" * 256
    raw.field("general.architecture", STRING, raw.string(b"llama")).tensor(b"t", [64], 0, 0)
    assert read(tmp_path, raw.build()).tensors["t"].nbytes == 256


def test_unsupported_type_and_big_endian_are_called_by_name(tmp_path: Path, raw_gguf: Any) -> None:
    raw = raw_gguf()
    raw.data = b"\0" * 256
    with pytest.raises(CheckpointError, match="IQ4_XS"):
        read(tmp_path, raw.tensor(b"t", [256], 23, 0).build())
    with pytest.raises(CheckpointError, match="big-endian"):
        read(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0))


def test_a_huge_file_of_empty_strings_is_refused_at_once(tmp_path: Path, raw_gguf: Any) -> None:
    raw = raw_gguf().field("k", ARRAY, struct.pack("<IQ", STRING, 2**30))
    path = tmp_path / "sparse.gguf"
    path.write_bytes(raw.build())
    os.truncate(path, 16 << 30)  # sparse: takes no disk
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match=str(MAX_STRINGS)):
        GGUFFile(path)
    assert time.perf_counter() - began < 1


def test_every_cut_is_refused(write_gguf: Any, tmp_path: Path) -> None:
    path = write_gguf()
    content = path.read_bytes()
    end = max(t.offset + t.nbytes for t in GGUFFile(path).tensors.values())
    cut = tmp_path / "cut.gguf"
    header = [*range(0, 1500, 7), *range(1500, end, 4001), end - 1]
    for size in header:
        cut.write_bytes(content[:size])
        with pytest.raises(CheckpointError) as caught:
            GGUFFile(cut)
        assert caught.value.file == str(cut)
        assert caught.value.field


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_give_success_or_a_checkpoint_error(data: st.DataObject, write_gguf: Any) -> None:
    path = write_gguf(name="good.gguf")
    content = bytearray(path.read_bytes())
    header_end = min(t.offset for t in GGUFFile(path).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header_end - 1))
        content[position] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, content[position] ^ 1]))
    bad = path.with_name("bad.gguf")
    bad.write_bytes(content)
    refused: CheckpointError | None = None
    began = time.perf_counter()
    try:
        checkpoint = open_gguf(bad)
        for name, info in checkpoint.tensors.infos().items():
            assert checkpoint.tensors.data(name).shape == info.raw_shape
    except CheckpointError as error:
        refused = error
    assert refused is None or refused.file == str(bad)
    assert time.perf_counter() - began < 1
