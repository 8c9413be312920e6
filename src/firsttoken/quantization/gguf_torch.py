"""GGUF block formats in vectorised torch, for the types that must load fast.

A block holds 32 weights of a row. Formats as in GGML: Q8_0 is (fp16 scale, 32 int8); Q4_0 is (fp16 scale, 16 bytes),
Q4_1 is (fp16 scale, fp16 minimum, 16 bytes); byte ``j`` of a 4-bit block holds weight ``j`` in its low and weight
``j + 16`` in its high nibble. The ``gguf`` package's own dequantisation is what tests compare with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
FOUR_BIT_TYPES = frozenset({"Q4_0", "Q4_1"})
TYPES = FOUR_BIT_TYPES | {"Q8_0"}


@dataclass(frozen=True, slots=True, eq=False)
class FourBit:
    """Weights as ``codes * scale + offset``: codes uint8 ``[N, K]`` in 0..15, the others float32 ``[N, K / 32]``."""

    codes: Tensor
    scale: Tensor
    offset: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """``[N, K]``; the arithmetic is float32, rounded once."""
        rows = self.codes.shape[0]
        wide = self.codes.view(rows, -1, GROUP).float()
        return wide.mul_(self.scale.unsqueeze(-1)).add_(self.offset.unsqueeze(-1)).to(dtype).view(rows, -1)


def four_bit(raw: Tensor, type: str) -> FourBit:
    """Take ``raw`` uint8 ``[N, row_bytes]`` of Q4_0 or Q4_1 apart."""
    rows = raw.shape[0]
    blocks = raw.view(rows, -1, 20 if type == "Q4_1" else 18)
    header = 4 if type == "Q4_1" else 2
    packed = blocks[..., header:]
    codes = torch.stack((packed & 15, packed >> 4), dim=2).view(rows, -1)
    numbers = _halves(blocks[..., :header])
    scale = numbers[..., 0].contiguous()
    offset = numbers[..., 1].contiguous() if type == "Q4_1" else scale * -8.0
    return FourBit(codes, scale, offset)


def dequantize(raw: Tensor, type: str, dtype: torch.dtype) -> Tensor:
    """``raw`` uint8 ``[N, row_bytes]`` of a type in `TYPES` -> ``[N, K]`` in ``dtype``. Raises ValueError otherwise."""
    if type in FOUR_BIT_TYPES:
        return four_bit(raw, type).dequantize(dtype)
    if type != "Q8_0":
        raise ValueError(f"no torch dequantisation for {type}: known are {', '.join(sorted(TYPES))}")
    rows = raw.shape[0]
    blocks = raw.view(rows, -1, 34)
    wide = blocks[..., 2:].view(torch.int8).float()
    return wide.mul_(_halves(blocks[..., :2])).to(dtype).view(rows, -1)


def block_numbers(raw: Tensor, type: str) -> Tensor:
    """The fp16 scales (and minima) of all blocks, as float32."""
    header = 4 if type == "Q4_1" else 2
    size = header + (GROUP if type == "Q8_0" else GROUP // 2)
    return _halves(raw.view(raw.shape[0], -1, size)[..., :header])


def _halves(header: Tensor) -> Tensor:
    """The fp16 numbers at the head of each block, as float32."""
    return header.contiguous().view(torch.float16).float()
