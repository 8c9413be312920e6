"""Stored bytes to float32 with numpy: the reference for every packed format, and the loader's fallback."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from firsttoken.checkpoint.checkpoint import Bytes
from firsttoken.checkpoint.gguf import SUPPORTED_TYPES
from firsttoken.core.errors import CheckpointError

# Rows are converted in pieces of about this many elements, so that temporaries stay in the cache.
CHUNK_ELEMENTS = 1 << 16


def dequantize(raw: Bytes, type: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Convert ``raw`` (uint8, any shape, the rows in order) of GGML type ``type`` to float32 of ``shape``.

    The arithmetic is the ``gguf`` package's. Raises `CheckpointError` for a type that is not supported and
    `ValueError` when ``raw`` does not hold exactly ``shape``.
    """
    if type not in SUPPORTED_TYPES:
        raise CheckpointError(
            f"cannot convert tensors stored as {type}; known are {', '.join(sorted(SUPPORTED_TYPES))}"
        )
    # Imported here, since the formats that are computed with as they are do without.
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    kind = GGMLQuantizationType[type]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count = prod(shape)
    if raw.size * block != count * block_bytes:
        raise ValueError(f"{raw.size} bytes of {type} do not hold shape {shape}")
    blocks = np.ascontiguousarray(raw).reshape(-1, block_bytes)
    out = np.empty((blocks.shape[0], block), dtype=np.float32)
    step = max(1, CHUNK_ELEMENTS // block)
    for begin in range(0, blocks.shape[0], step):
        # One long row a piece: the package splits what it gets into groups of 16 rows.
        piece = blocks[begin : begin + step].reshape(1, -1)
        out[begin : begin + step] = gguf_dequantize(piece, kind).reshape(-1, block)
    return out.reshape(shape)
