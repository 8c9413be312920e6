"""What opening a model gives: its shape, defaults, tokenizer data and raw tensors, whatever file they came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from firsttoken.checkpoint.model_config import GenerationConfig, ModelConfig, TokenizerSpec
from firsttoken.checkpoint.quantized.scheme import LinearScheme

Source = Literal["folder", "gguf", "random"]
Bytes = npt.NDArray[np.uint8]


class TensorInfo(msgspec.Struct, frozen=True):
    """A stored tensor: ``shape`` is row-major as in torch, ``type`` a GGML or safetensors type name ("F32", "BF16",
    "Q8_0", ...), ``nbytes`` what it takes in the file. ``rounded``: it stands for the several tensors of a quantized
    linear (`quantized.tensors`)."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    rounded: LinearScheme | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Shape of the raw bytes: ``[rows, row_bytes]`` for a matrix, else ``[nbytes]``."""
        if len(self.shape) == 2 and self.shape[0] > 0:
            return (self.shape[0], self.nbytes // self.shape[0])
        return (self.nbytes,)


class TensorSource(Protocol):
    """Raw tensors under Hugging Face names (``model.layers.0.self_attn.q_proj.weight``, ...)."""

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name; costs no reading of weights."""
        ...

    def data(self, name: str) -> Bytes:
        """The stored bytes as uint8, shaped `TensorInfo.raw_shape`, rows in Hugging Face order.

        A read-only view of the mapped file where the file's row order allows it, else a copy of this one tensor.
        Raises `CheckpointError` when the source has no such tensor, or no bytes at all (``random:``).
        """
        ...


@dataclass(frozen=True, slots=True)
class CheckpointText:
    """What a model's files say of text: its defaults, its tokenizer (None where it brings none), its chat template."""

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    tokenizer: TokenizerSpec | None = None
    chat_template: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """An opened model. No weight has been read; `tensors` maps the file and reads on demand.

    ``name`` is what the model is served as, ``path`` where it came from (the folder or file, or ``random:`` and a shape
    or folder), ``fingerprint`` its content's identity (never its name): the root of the KV prefix chain.

    ``read_text`` is called when text is first asked for: an engine, which knows token ids only, starts without it. So
    `generation`, `tokenizer` and `chat_template` raise `CheckpointError` for files that are damaged.
    """

    name: str
    source: Source
    path: str
    config: ModelConfig
    fingerprint: str
    tensors: TensorSource
    read_text: Callable[[], CheckpointText] = CheckpointText

    @property
    def generation(self) -> GenerationConfig:
        return self._text.generation

    @property
    def tokenizer(self) -> TokenizerSpec | None:
        """None for ``random:<shape>`` and for a folder that has no ``tokenizer.json``."""
        return self._text.tokenizer

    @property
    def chat_template(self) -> str | None:
        return self._text.chat_template

    @cached_property
    def _text(self) -> CheckpointText:
        return self.read_text()
