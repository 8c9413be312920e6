"""Safetensors folders: equal to the library's reading, and named errors on anything damaged."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from firsttoken.checkpoint.dequantize import dequantize
from firsttoken.checkpoint.safetensors_files import SafetensorsFiles
from firsttoken.core.errors import CheckpointError

WEIGHTS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.arange(4, dtype=np.float16),
    "c.weight": np.zeros((0, 4), dtype=np.float32),
}


def write(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """``model.safetensors`` with any header: an object, or bytes as they are."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    path = folder / "model.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + raw + data)
    return path


def entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_equals_the_library(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsFiles(tmp_path)
    reference = load_file(tmp_path / "model.safetensors")
    assert set(source.infos()) == set(reference)
    for name, values in reference.items():
        info = source.infos()[name]
        assert info.shape == values.shape
        assert info.nbytes == values.nbytes
        assert np.array_equal(dequantize(source.data(name), info.type, info.shape), values.astype(np.float32))
    data = source.data("a.weight")
    assert data.shape == (2, 12)
    assert not data.flags.owndata
    with pytest.raises(CheckpointError, match="nothing"):
        source.data("nothing")


def test_bfloat16_is_read(tmp_path: Path) -> None:
    values = np.array([1.5, -2.0], dtype=np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    write(tmp_path, {"w": entry([2], 0, 4, "BF16")}, raw)
    source = SafetensorsFiles(tmp_path)
    assert dequantize(source.data("w"), "BF16", (2,)).tolist() == [1.5, -2.0]


def test_shards(tmp_path: Path) -> None:
    save_file({"a": WEIGHTS["a.weight"]}, tmp_path / "one.safetensors")
    save_file({"b": WEIGHTS["b.weight"]}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    source = SafetensorsFiles(tmp_path)
    assert source.data("a").tobytes() == WEIGHTS["a.weight"].tobytes()
    assert source.data("b").tobytes() == WEIGHTS["b.weight"].tobytes()
    assert [path.name for path in source.paths] == ["one.safetensors", "two.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "one.safetensors", "z": "one.safetensors"}, "z: the index names this tensor"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "the index names this tensor"),
        ({"b": "two.safetensors"}, None),
        ({"a": "one.safetensors"}, "extra: is not named"),
        ({"a": "gone.safetensors"}, r"gone.safetensors: is named by"),
        ({"a": "../one.safetensors"}, "not a safetensors file of the folder"),
        ({"a": "/etc/passwd"}, "not a safetensors file of the folder"),
        ({"a": "one.bin"}, "not a safetensors file of the folder"),
        ({}, "names no tensors"),
    ],
)
def test_index_and_files_must_agree(weight_map: dict[str, str], words: str | None, tmp_path: Path) -> None:
    values = WEIGHTS["a.weight"]
    save_file({"a": values, "extra": values}, tmp_path / "one.safetensors")
    save_file({"b": values}, tmp_path / "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if words is None:
        assert set(SafetensorsFiles(tmp_path).infos()) == {"b"}
    else:
        with pytest.raises(CheckpointError, match=words):
            SafetensorsFiles(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": WEIGHTS["a.weight"], name: WEIGHTS["a.weight"]}, tmp_path / f"{name}.safetensors")
    weight_map = {"a": "one.safetensors", "one": "one.safetensors", "two": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"two\.safetensors: a: is in one\.safetensors as well"):
        SafetensorsFiles(tmp_path)


W = entry([2], 0, 8)
DAMAGE: dict[str, tuple[Any, bytes, int | None, str]] = {
    "empty": (b"", b"", None, "header"),
    "length": (b"{}", b"", 2**62, "header length"),
    "length by one": (b"{}  ", b"", 5, "header length"),
    "not JSON": (b"{nope}   ", b"", None, "header"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, "header"),
    "nested deep": (b"[" * 100000, b"", None, "header"),
    "a list": ([1, 2, 3], b"", None, "header"),
    "no dtype": ({"w": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8, None, "w"),
    "dtype": ({"w": entry([2], 0, 8, "F33")}, b"\0" * 8, None, "w"),
    "negative size": ({"w": entry([-2], 0, 8)}, b"\0" * 8, None, "w"),
    "fraction": ({"w": entry([1.5], 0, 8)}, b"\0" * 8, None, "w"),
    "absurd shape": ({"w": entry([2**62, 2**62], 0, 8)}, b"\0" * 8, None, "w"),
    "too many dimensions": ({"w": entry([1] * 1000 + [2], 0, 8)}, b"\0" * 8, None, "w"),
    "shape against bytes": ({"w": entry([3], 0, 8)}, b"\0" * 8, None, "w"),
    "backwards": ({"w": entry([2], 8, 0)}, b"\0" * 8, None, "w"),
    "offsets negative": ({"w": entry([2], -8, 0)}, b"\0" * 8, None, "w"),
    "overlap": ({"v": entry([2], 0, 8), "w": entry([2], 4, 12)}, b"\0" * 12, None, "w"),
    "hole": ({"v": entry([2], 0, 8), "w": entry([2], 12, 20)}, b"\0" * 20, None, "w"),
    "beyond the file": ({"w": entry([2], 0, 8)}, b"\0" * 7, None, "w"),
    "more data": ({"w": W}, b"\0" * 9, None, "data"),
    "twice": (
        b'{"w":%b,"w":%b}' % (json.dumps(W).encode(), json.dumps(entry([2], 8, 16)).encode()),
        b"\0" * 16,
        None,
        "w",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_by_name_without_cost(case: str, tmp_path: Path) -> None:
    header, data, length, field = DAMAGE[case]
    path = write(tmp_path, header, data, length)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(CheckpointError) as caught:
            SafetensorsFiles(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.file == str(path)
    assert caught.value.field == field
    assert peak < 1 << 20
    assert time.perf_counter() - began < 1


def test_every_cut_is_refused(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError) as caught:
            SafetensorsFiles(tmp_path)
        assert caught.value.file == str(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_give_success_or_a_checkpoint_error(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.sampled_from([0, 0x22, 0x39, 0x5D, 0x7D, 0xFF, content[position] ^ 1]))
    path.write_bytes(content)
    refused: CheckpointError | None = None
    try:
        source = SafetensorsFiles(tmp_path)
        for name, info in source.infos().items():
            assert source.data(name).shape == info.raw_shape
    except CheckpointError as error:
        refused = error
    assert refused is None or refused.file == str(path)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("pytorch_model.bin", "pickle"),
        ("consolidated.00.pth", "pickle"),
        ("model-00001-of-00002.safetensors", "fetch the model again"),
        ("README.md", "no weights"),
    ],
)
def test_a_folder_without_weights_says_why(file: str, words: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=words):
        SafetensorsFiles(tmp_path)
