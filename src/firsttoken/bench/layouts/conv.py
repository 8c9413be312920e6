"""Convolution inputs: what a 3 x 3 convolution reads for each pixel, and torch's convolution itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F

from firsttoken.bench.layouts.case import Case, Measured, Setting
from firsttoken.bench.layouts.timing import Operation

KERNEL = 3
CHANNEL_BLOCK = 16
OPERATIONS = 4
OUTPUTS = 16  # few output channels: more reading than arithmetic
LAYOUTS = ("nchw", "nhwc", "nchw16c")
SHAPES = ((64, 56), (256, 28))  # (channels, height and width)


@dataclass(frozen=True)
class Windows:
    """Copies all windows of some inputs to ``[pixels, 9, channels]``: the rows of the matrix that is multiplied."""

    layout: str
    channels: int
    side: int

    def __call__(self, setting: Setting) -> Case:
        inner = self.side - KERNEL + 1
        read = self.channels * self.side**2
        written = inner**2 * KERNEL**2 * self.channels
        per_image = (read + written) * setting.element_bytes
        images = max(1, setting.nbytes // (per_image * OPERATIONS))
        operations = [self._operation(self._windows(setting, images)) for _ in range(OPERATIONS)]
        return Case(operations, images * per_image)

    def _windows(self, setting: Setting, images: int) -> torch.Tensor:
        """A view ``[image, y, x, ky, kx, channel]``, or with the channel split in blocks, of inputs in this layout."""
        c, side = self.channels, self.side
        if self.layout == "nchw":
            inputs = setting.random(images, c, side, side).permute(0, 2, 3, 1)
        elif self.layout == "nhwc":
            inputs = setting.random(images, side, side, c)
        else:
            blocks = c // CHANNEL_BLOCK
            inputs = setting.random(images, blocks, side, side, CHANNEL_BLOCK).permute(0, 2, 3, 1, 4)
        windows = inputs.unfold(1, KERNEL, 1).unfold(2, KERNEL, 1)  # [image, y, x, channel(s), ky, kx]
        return windows.movedim((-2, -1), (3, 4))

    def _operation(self, windows: torch.Tensor) -> Operation:
        target = torch.empty(windows.shape, device=windows.device, dtype=windows.dtype)
        return lambda: target.copy_(windows)


@dataclass(frozen=True)
class Convolution:
    """``conv2d`` as torch's libraries do it, on inputs that lie so."""

    layout: str
    channels: int
    side: int

    def __call__(self, setting: Setting) -> Case:
        image = self.channels * self.side**2
        batch = 8
        inner = self.side - KERNEL + 1
        moved = batch * (image + OUTPUTS * inner**2) + OUTPUTS * self.channels * KERNEL**2
        copies = max(2, setting.nbytes // (batch * image * setting.element_bytes))
        weight = setting.random(OUTPUTS, self.channels, KERNEL, KERNEL)
        operations = [self._operation(setting, batch, weight) for _ in range(copies)]
        return Case(operations, moved * setting.element_bytes)

    def _operation(self, setting: Setting, batch: int, weight: torch.Tensor) -> Operation:
        inputs = setting.random(batch, self.channels, self.side, self.side)
        if self.layout == "nhwc":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
            weight = weight.contiguous(memory_format=torch.channels_last)
        return lambda: F.conv2d(inputs, weight)


def measured() -> Iterator[Measured]:
    for (channels, side), layout in product(SHAPES, LAYOUTS):
        asked = ("conv", (1, channels, side, side), 0)
        yield Measured(f"conv windows {channels}x{side}x{side}", layout, Windows(layout, channels, side), asked=asked)
    for (channels, side), layout in product(SHAPES, ("nchw", "nhwc")):
        yield Measured(f"conv2d {channels}x{side}x{side}", layout, Convolution(layout, channels, side))
