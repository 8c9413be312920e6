"""Model files, damaged in any way."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fuzz.pieces import Pieces
from firsttoken.checkpoint.gguf_checkpoint import open_gguf
from firsttoken.checkpoint.safetensors_files import SafetensorsFiles
from firsttoken.core.errors import CheckpointError

TENSOR_BYTES = 1 << 18
_WORDS = ("dtype", "shape", "data_offsets", "F32", "BF16", "F8_E4M3", "I64", "U8", "__metadata__", "a.weight", "pt")


@contextlib.contextmanager
def _folder_with(name: str, data: bytes) -> Iterator[Path]:
    memory = "/dev/shm"  # noqa: S108  # a fuzzer writes thousands of files a second
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        # Zeros where the tensors would be, or no input that is small would get as far as them.
        os.truncate(path, len(data) + TENSOR_BYTES)
        yield path


def _check(error: CheckpointError, path: Path) -> None:
    assert error.file == str(path)
    str(error).encode("utf-8")


def gguf(data: bytes) -> None:
    """A model, or an error that names the file."""
    with _folder_with("model.gguf", data) as path:
        try:
            found = open_gguf(path)
            for name, info in found.tensors.infos().items():
                assert found.tensors.data(name).shape == info.raw_shape
            _ = found.generation, found.tokenizer, found.chat_template
        except CheckpointError as error:
            _check(error, path)


def safetensors(data: bytes) -> None:
    """Tensors, or an error that names the file. The first byte says whether the rest is the file, or its header's JSON
    is made of it."""
    pieces = Pieces(data)
    raw = data[1:]
    if pieces.below(4):
        header = json.dumps(_header(pieces)).encode()
        raw = len(header).to_bytes(8, "little") + header
    with _folder_with("model.safetensors", raw) as path:
        try:
            source = SafetensorsFiles(path.parent)
            for name, info in source.infos().items():
                assert source.data(name).shape == info.raw_shape
        except CheckpointError as error:
            _check(error, path)


def _header(pieces: Pieces) -> dict[str, Any]:
    """Mostly of tensors that lie one after the other, as in a good file, with something else in it."""
    found: dict[str, Any] = {}
    at = 0
    for number in range(pieces.below(5)):
        rows, columns = pieces.below(5), pieces.below(5)
        end = at + 4 * rows * columns
        entry: dict[str, Any] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [at, end]}
        if not pieces.below(4):
            entry[_WORDS[pieces.below(3)]] = pieces.value(_WORDS)
        found[f"t{number}" if pieces.below(8) else pieces.text()] = entry
        at = end
    if not pieces.below(4):
        found |= pieces.object(_WORDS)
    if pieces.below(8):
        # The file is longer than its tensors: the last one takes what is left.
        found["rest"] = {"dtype": "U8", "shape": [TENSOR_BYTES - at], "data_offsets": [at, TENSOR_BYTES]}
    return found
