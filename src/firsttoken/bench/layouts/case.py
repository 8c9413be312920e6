"""What is measured of a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from firsttoken.bench.layouts.timing import Operation

_DRAWN = 1 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """Where and how much: ``nbytes`` is about what all operations of a case read together, more than caches hold."""

    device: str
    dtype: str
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def element_bytes(self) -> int:
        return self.torch_dtype.itemsize

    def random(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers of the setting's type; a large tensor repeats some, as drawing takes long."""
        count = prod(shape)
        some = torch.randn(min(count, _DRAWN), device=self.device, dtype=torch.float32).to(self.torch_dtype)
        return some.repeat(-(-count // len(some)))[:count].view(shape)


@dataclass(frozen=True)
class Case:
    """Operations that do the same work on different data, and the bytes that one of them must move: what it reads and
    what it writes, each byte once."""

    operations: Sequence[Operation]
    nbytes: int


class Prepare(Protocol):
    """Makes a case's tensors."""

    def __call__(self, setting: Setting) -> Case: ...


@dataclass(frozen=True)
class Measured:
    """A function that reads ``tensor`` (a name with its sizes) in ``layout``. ``kind`` and ``sizes`` (shape, head_dim)
    are what `choose_layout` is asked with, None for what it does not choose. ``applies`` says where it can run."""

    tensor: str
    layout: str
    prepare: Prepare
    asked: tuple[str, tuple[int, ...], int] | None = None
    applies: Callable[[Setting], bool] = lambda setting: True
