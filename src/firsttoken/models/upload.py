"""Weights from a file's mapped bytes to a device, at the speed of the page cache and the bus together.

Bytes go through two pinned buffers in turn: while one is sent, threads fill the other. (The copy from a mapping is
bound by one core's speed, so several threads share it.)
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firsttoken.checkpoint.checkpoint import TensorSource
from firsttoken.core.errors import CheckpointError
from firsttoken.models.weights import StoredWeights
from firsttoken.quantization.read_rounded import rounded_weight
from firsttoken.quantization.stored import FLOAT_TYPES, StoredTensor

BUFFER_BYTES = 64 << 20
# What one thread copies at a time.
PIECE_BYTES = 8 << 20
THREADS = 8


class Uploader:
    """Copies host bytes to one device; not thread-safe. Use as a context, so that its threads and buffers end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="firsttoken-upload")
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._pinned) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for event in self._sent:
            if event is not None:
                event.synchronize()

    def upload(self, raw: NDArray[np.uint8]) -> Tensor:
        """A new uint8 tensor ``[n]`` on the device with the bytes of the contiguous ``raw``, in stream order."""
        flat = raw.reshape(-1)
        out = torch.empty(len(flat), dtype=torch.uint8, device=self._device)
        for begin in range(0, len(flat), BUFFER_BYTES):
            piece = flat[begin : begin + BUFFER_BYTES]
            buffer = self._free_buffer()
            self._fill(buffer.numpy()[: len(piece)], piece)
            out[begin : begin + len(piece)].copy_(buffer[: len(piece)], non_blocking=True)
            self._mark_sent()
        return out

    def _free_buffer(self) -> Tensor:
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn]

    def _mark_sent(self) -> None:
        if self._pinned:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._sent[self._turn] = event
        self._turn = 1 - self._turn

    def _fill(self, target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        def copy(begin: int) -> None:
            target[begin : begin + PIECE_BYTES] = source[begin : begin + PIECE_BYTES]

        pieces = range(0, len(source), PIECE_BYTES)
        if len(pieces) == 1:
            copy(0)
        else:
            list(self._threads.map(copy, pieces))


class UploadedWeights:
    """A checkpoint's tensors on a device: float matrices and rounded linears as their stored bytes, others dequantised
    on the host.

    Whether the numbers are finite is looked at on the device; `check` tells, once all are read.
    """

    def __init__(self, source: TensorSource, uploader: Uploader) -> None:
        self._host = StoredWeights(source)
        self._source = source
        self._infos = source.infos()
        self._uploader = uploader
        self._sums: dict[str, Tensor] = {}

    def matrix(self, name: str) -> StoredTensor:
        info = self._infos[name]
        if info.rounded is not None:
            weight = rounded_weight(self._source, info, self._uploader.upload)
            self._sums[name] = weight.check_sum()
            return StoredTensor.of_rounded(name, weight)
        if info.type not in FLOAT_TYPES:
            return self._host.matrix(name)
        raw = self._uploader.upload(self._source.data(name))
        data = raw.view(FLOAT_TYPES[info.type]).view(tuple(info.shape))
        self._sums[name] = data.sum(dtype=torch.float32)
        return StoredTensor(name, info.type, tuple(info.shape), data)

    def vector(self, name: str) -> Tensor:
        """Float32, on the host: checked there, and small."""
        return self._host.vector(name)

    def check(self) -> None:
        """Raise `CheckpointError` when a matrix holds a number that is not finite."""
        for name in self._not_finite():
            raise CheckpointError("holds NaN or infinite numbers: the file is damaged, get it again", field=name)

    def _not_finite(self) -> Iterator[str]:
        if self._sums:
            finite = torch.isfinite(torch.stack(list(self._sums.values()))).tolist()
            yield from (name for name, good in zip(self._sums, finite, strict=True) if not good)
