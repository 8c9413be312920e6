"""Weights by name: read from a checkpoint, or made up for ``random:``."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from firsttoken.checkpoint.checkpoint import Bytes, TensorSource
from firsttoken.checkpoint.quantized.scheme import QuantScheme
from firsttoken.quantization import StoredTensor
from firsttoken.quantization.read_rounded import rounded_weight
from firsttoken.quantization.rounded import VALUE_DTYPES, RoundedWeight

# Made-up weights repeat one run of numbers. Its length is prime, so that no two rows of a matrix line up.
_RUN = 1_000_003


class Weights(Protocol):
    """Where a model's builders take tensors from. Both raise `CheckpointError` when a number is not finite."""

    def matrix(self, name: str) -> StoredTensor:
        """A two-dimensional tensor as stored."""
        ...

    def vector(self, name: str) -> Tensor:
        """A one-dimensional tensor in float32."""
        ...


class StoredWeights:
    """Reads from a checkpoint's tensor source; packed matrices stay views of the file until a method takes them."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._infos = source.infos()

    def matrix(self, name: str) -> StoredTensor:
        info = self._infos[name]
        if info.rounded is not None:
            tensor = StoredTensor.of_rounded(name, rounded_weight(self._source, info, _mapped))
        else:
            tensor = StoredTensor.from_bytes(name, info.type, tuple(info.shape), _mapped(self._source.data(name)))
        tensor.check_finite()
        return tensor

    def vector(self, name: str) -> Tensor:
        return self.matrix(name).dequantize(torch.float32)


def _mapped(raw: Bytes) -> Tensor:
    with warnings.catch_warnings():
        # The file is mapped read-only and nothing here writes to it: torch warns about the first only.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(raw)


class RandomWeights:
    """Seeded weights for benchmarks: matrices normal with variance 1 / fan-in (embedding 0.02), norms one.

    Each tensor is one run of normal numbers, repeated from a place that its name decides: filling goes at the speed
    of copying, on the device, and does not depend on the order of tensors.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._shapes = shapes
        # Drawn on the CPU whatever the device, so that a model has the same weights everywhere.
        self._run = torch.randn(_RUN, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)

    def matrix(self, name: str) -> StoredTensor:
        shape = self._shapes[name]
        std = 0.02 if "embed_tokens" in name else 1.0 / math.sqrt(shape[-1])
        return StoredTensor.dense(name, self._normal(name, shape, std))

    def vector(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return torch.ones(shape) if "norm" in name else self._normal(name, shape, 0.02).float()

    def _normal(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        run = self._run * std
        first = zlib.crc32(name.encode()) % _RUN
        out = torch.empty(math.prod(shape), dtype=run.dtype, device=run.device)
        head = min(len(out), _RUN - first)
        out[:head] = run[first : first + head]
        whole = (len(out) - head) // _RUN
        out[head : head + whole * _RUN].view(whole, _RUN).copy_(run)
        rest = head + whole * _RUN
        out[rest:] = run[: len(out) - rest]
        return out.view(shape)


class OutlineWeights:
    """Shapes without numbers, on torch's meta device; linears that ``quantized`` names are rounded."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], quantized: QuantScheme | None = None) -> None:
        self._shapes = shapes
        self._quantized = quantized

    def matrix(self, name: str) -> StoredTensor:
        scheme = None if self._quantized is None else self._quantized.of(name)
        if scheme is None:
            return StoredTensor.dense(name, torch.empty(self._shapes[name], dtype=torch.bfloat16, device="meta"))
        n, k = self._shapes[name]
        shape = (n, k // scheme.group) if scheme.group else (n,)
        weight = RoundedWeight(
            scheme.format,
            torch.empty((n, k), dtype=VALUE_DTYPES[scheme.format], device="meta"),
            torch.empty(shape, dtype=torch.float32, device="meta"),
            scheme.group,
            torch.empty(shape, dtype=torch.int8, device="meta") if scheme.zeros else None,
        )
        return StoredTensor.of_rounded(name, weight)

    def vector(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=torch.float32, device="meta")
