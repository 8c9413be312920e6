"""A GGUF file as a `Checkpoint`: canonical names, and Q and K rows put back in Hugging Face order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from firsttoken.checkpoint.checkpoint import Bytes, Checkpoint, CheckpointText, TensorInfo
from firsttoken.checkpoint.families import FAMILIES
from firsttoken.checkpoint.fingerprint import fingerprint_files
from firsttoken.checkpoint.gguf import GGUFFile, GGUFTensor
from firsttoken.checkpoint.gguf_config import ROPE_FACTORS, read_config, read_generation, read_tokenizer
from firsttoken.checkpoint.gguf_names import hugging_face_name
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import CheckpointError


class GGUFTensors:
    """`TensorSource` over a GGUF file. Raises `CheckpointError` for a tensor that the architecture does not have."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._permuted = FAMILIES[config.architecture].permuted
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in file.tensors.values():
            if tensor.name == ROPE_FACTORS:
                continue  # honoured by the configuration
            name = hugging_face_name(tensor.name)
            if name is None:
                raise CheckpointError(
                    f"is not a tensor of the {config.architecture} architecture",
                    file=str(file.path),
                    field=tensor.name,
                )
            self._tensors[name] = tensor
        self._infos = {
            name: TensorInfo(name, tensor.shape, tensor.type, tensor.nbytes) for name, tensor in self._tensors.items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def data(self, name: str) -> Bytes:
        """See `TensorSource.data`: a view of the file, but a copy where Q or K rows change places."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError("the file has no such tensor", file=str(self._file.path), field=name)
        raw = self._file.raw(tensor)
        heads = self._permuted_heads(name)
        if heads is not None:
            rows = self._rows(tensor, heads)
            return raw.reshape(tensor.shape[0], -1)[rows].reshape(self._infos[name].raw_shape)
        return raw.reshape(self._infos[name].raw_shape)

    def _permuted_heads(self, name: str) -> int | None:
        if not self._permuted:
            return None
        if ".self_attn.q_proj." in name:
            return self._config.num_heads
        if ".self_attn.k_proj." in name:
            return self._config.num_kv_heads
        return None

    def _rows(self, tensor: GGUFTensor, heads: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if tensor.shape[0] != heads * self._config.head_dim:
            raise CheckpointError(
                f"has {tensor.shape[0]} rows, expected {heads} heads of {self._config.head_dim}",
                file=str(self._file.path),
                field=tensor.name,
            )
        return half_split_rows(heads, self._config.head_dim)


def half_split_rows(heads: int, head_dim: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each row in Hugging Face order, its row in the file, ``[heads * head_dim]`` int64.

    Files for interleaved rotary embedding keep the two halves of a pair side by side (2i, 2i + 1); Hugging Face
    keeps them half a head apart (i, i + head_dim / 2).
    """
    interleaved = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return interleaved.swapaxes(1, 2).reshape(-1)


def open_gguf(path: Path, name: str | None = None) -> Checkpoint:
    """Open a ``.gguf`` file, served as ``name`` (default: the file's stem). Raises `CheckpointError`."""
    file = GGUFFile(path)
    config = read_config(file)
    tensors = GGUFTensors(file, config)

    def read_text() -> CheckpointText:
        tokenizer = read_tokenizer(file)
        assert tokenizer.gguf is not None
        return CheckpointText(
            generation=read_generation(file, tokenizer.gguf, config.vocab_size),
            tokenizer=tokenizer,
            chat_template=file.metadata.optional_text("tokenizer.chat_template"),
        )

    return Checkpoint(
        name=name or path.stem,
        source="gguf",
        path=str(path),
        config=config,
        fingerprint=fingerprint_files("gguf", [path]),
        tensors=tensors,
        read_text=read_text,
    )
