"""From what the engine pooled to the vector that a caller gets. No torch."""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

from firsttoken.core.pooling import Pooling, PoolingParams

Vector = NDArray[np.float32]


def finish(pooled: bytes, pooling: Pooling, params: PoolingParams) -> Vector:
    """``pooled`` is float32. Cut first and then brought to length 1, as models are trained whose beginnings are vectors
    of their own; a vector of zeros stays one."""
    vector: Vector = np.frombuffer(pooled, dtype="<f4")[: params.dimensions]
    if not (pooling.normalize if params.normalize is None else params.normalize):
        return vector
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32) if length > 0 else vector


def cosine(one: Vector, other: Vector) -> float:
    """Of the angle between two vectors, in [-1, 1]; 0 where one is all zeros."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return min(max(float(a @ b) / lengths, -1.0), 1.0) if lengths > 0 else 0.0


def to_base64(vector: Vector) -> str:
    """Its float32 numbers, little-endian."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
