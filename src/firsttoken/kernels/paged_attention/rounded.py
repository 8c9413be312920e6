"""Heads of K and V in eight and four bits: how a vector is rounded, and what is kept of it. Torch, on any device.

A vector's elements lie in words of 16 bits. A word holds one element of each of its *fields*, equal parts of the head
in turn, the first in its lowest bits: two of int8 and FP8, four of int4. So kernels take a field of many words apart
with the same few operations, and a field's elements follow one another as they do in the head.

- ``int8``: -127 to 127, kept as 1 to 255, and a bfloat16 scale with which the largest element becomes 127. Elements
  of a vector are so alike in size that even steps serve them better than e4m3's, which are finer near 0 alone.
- ``fp8``: e4m3, and a bfloat16 scale with which the largest element becomes 448.
- ``int4``: 0 to 15, and a bfloat16 scale and least value. A few elements of K are many times larger than all others,
  and would leave those a handful of steps; so K is multiplied by an orthonormal Hadamard matrix first (QuaRot: Ashkboos
  et al., 2024), as is q, which leaves their product as it was.

Each vector is rounded by itself: what is kept does not depend on what was written beside it. Where an element is not a
finite number, nothing of its vector is when it is read.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from firsttoken.core.kv_format import KVFormat

FIELDS = {"int8": 2, "fp8": 2, "int4": 4}
INT8_MOST = 127.0
FP8_MOST = 448.0


def spreads_keys(dtype: str) -> bool:
    """Whether q and K are multiplied by `hadamard` before anything else."""
    return dtype == "int4"


@functools.cache
def hadamard(size: int) -> Tensor:
    """The orthonormal matrix ``[size, size]``, float32, its own inverse; in equal blocks where ``size`` is no power of
    two. On the CPU."""
    block = size & -size
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.kron(torch.eye(size // block), matrix).mul_(block**-0.5)


def spread(x: Tensor) -> Tensor:
    """``x [..., D]`` times `hadamard`, in the type of ``x``."""
    return x @ hadamard(x.shape[-1]).to(x.device, x.dtype)


def encode(x: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Words int16 ``[..., D / fields]`` of ``x [..., D]``, and its scales bfloat16 ``[..., 1 or 2]``."""
    wide = x.float()
    codes, scales = _ENCODERS[dtype](wide)
    fields = FIELDS[dtype]
    bits = 16 // fields
    parts = codes.int().view(*x.shape[:-1], fields, x.shape[-1] // fields).unbind(-2)
    words = parts[0]
    for number, part in enumerate(parts[1:], 1):
        words = words | part << bits * number
    return words.to(torch.int16), scales


def decode(words: Tensor, scales: Tensor, dtype: str, out: Tensor | None = None) -> Tensor:
    """What `encode` kept, float32 ``[..., D]``, or in the type of ``out [..., fields, D / fields]``, which is filled
    and given back as ``[..., D]``; its type takes part in the last rounding alone."""
    fields = FIELDS[dtype]
    if out is None:
        out = torch.empty((*words.shape[:-1], fields, words.shape[-1]), device=words.device)
    for number in range(fields):
        out[..., number, :] = _FIELD[dtype](words, number)
    wide = scales.to(out.dtype) * (256 if dtype == "fp8" else 1)
    scale = wide[..., :1].unsqueeze(-1)
    if dtype == "int4":
        torch.addcmul(wide[..., 1:].unsqueeze(-1), out, scale, out=out)
    else:
        out.mul_(scale)
    return out.flatten(-2)


def _fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = (x.abs().amax(-1, keepdim=True) * (1 / FP8_MOST)).bfloat16()
    codes = (x * _inverse(scales)).clamp_(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def _int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = (x.abs().amax(-1, keepdim=True) * (1 / INT8_MOST)).bfloat16()
    codes = (x * _inverse(scales)).round_().clamp_(-INT8_MOST, INT8_MOST).nan_to_num_()
    return codes.int() + 128, scales


def _int4(x: Tensor) -> tuple[Tensor, Tensor]:
    least, most = x.aminmax(dim=-1, keepdim=True)
    scales = torch.cat(((most - least) * (1 / 15), least), -1).bfloat16()
    codes = (x - scales[..., 1:].float()).mul_(_inverse(scales[..., :1])).round_().clamp_(0, 15)
    return codes.nan_to_num_(), scales


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, or 0 for a vector of zeros; float32."""
    wide = scale.float()
    return torch.where(wide == 0, 0.0, wide.reciprocal())


def _int8_field(words: Tensor, number: int) -> Tensor:
    return (words >> 8 * number & 255) - 128


def _int4_field(words: Tensor, number: int) -> Tensor:
    return words >> 4 * number & 15


def _fp8_field(words: Tensor, number: int) -> Tensor:
    """Bytes of e4m3 as float16, whose exponent is wider: without its bias's difference, a factor of 256."""
    moved = words >> 1 if number else (words << 8) >> 1
    return (moved & -16512).view(torch.float16)


_ENCODERS = {"int8": _int8, "fp8": _fp8, "int4": _int4}
_FIELD = {"int8": _int8_field, "fp8": _fp8_field, "int4": _int4_field}


class TileLayout:
    """Where things lie in a tile of `KVFormat`: K of 16 tokens, V, then each token's scales. In words of 16 bits.

    ``words`` a vector, ``scales`` of K and V of one token, ``size`` of a tile.
    """

    __slots__ = ("head_dim", "scales", "size", "tokens", "words")

    def __init__(self, kv_format: KVFormat) -> None:
        self.head_dim = kv_format.head_dim
        self.tokens = kv_format.block_tokens
        self.words = kv_format.vector_bytes // 2
        self.scales = kv_format.scale_bytes
        self.size = self.tokens * (2 * self.words + self.scales)

    def elements(self, tiles: Tensor) -> Tensor:
        """K and V words ``[..., 2, tokens, words]`` of int16 ``tiles [..., size]``, a view."""
        both = 2 * self.tokens * self.words
        return tiles[..., :both].view(*tiles.shape[:-1], 2, self.tokens, self.words)

    def factors(self, tiles: Tensor) -> Tensor:
        """Scales bfloat16 ``[..., tokens, 2 (K, V), 1 or 2]``, a view."""
        own = tiles[..., 2 * self.tokens * self.words :]
        return own.view(torch.bfloat16).view(*tiles.shape[:-1], self.tokens, 2, self.scales // 2)
