"""Conversion to float32: equal to the `gguf` package for every type, and to the formats' definitions for most."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from firsttoken.checkpoint import dequantize as module
from firsttoken.checkpoint.dequantize import dequantize
from firsttoken.checkpoint.gguf import SUPPORTED_TYPES
from firsttoken.core.errors import CheckpointError


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Random bytes whose half-precision scales are finite."""
    rng = np.random.default_rng(int(kind))
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)
    # Clearing the exponent's top bit everywhere keeps any pair of bytes a finite half and any four a finite float.
    return raw & np.uint8(0xBF) if kind.name in ("F32", "F16", "BF16") or block > 1 else raw


@pytest.mark.parametrize("name", sorted(SUPPORTED_TYPES))
@pytest.mark.parametrize("rows", [1, 37])
def test_equals_the_gguf_package(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1024)
    kind = gguf.GGMLQuantizationType[name]
    raw = random_blocks(kind, rows, 512)
    expected = gguf.quants.dequantize(raw, kind).reshape(rows, 512)
    assert np.isfinite(expected).all()
    ours = dequantize(raw, name, (rows, 512))
    assert ours.dtype == np.float32
    assert np.array_equal(ours, expected)
    assert np.array_equal(dequantize(raw.reshape(-1), name, (rows * 512,)), expected.reshape(-1))


def half(raw: np.ndarray, at: int) -> float:
    return float(raw[at : at + 2].view(np.float16)[0])


def nibble(raw: np.ndarray, at: int, index: int, size: int) -> int:
    """Low nibbles hold the first half of a block, high nibbles the second."""
    return int(raw[at + index]) & 15 if index < size // 2 else int(raw[at + index - size // 2]) >> 4


def scalar(name: str, raw: np.ndarray) -> list[float]:
    """One block, element by element, after the definitions in ggml's ``ggml-common.h``."""
    if name == "Q8_0":
        return [half(raw, 0) * int(q) for q in raw[2:34].view(np.int8)]
    if name == "Q4_0":
        return [half(raw, 0) * (nibble(raw, 2, i, 32) - 8) for i in range(32)]
    if name == "Q4_1":
        return [half(raw, 0) * nibble(raw, 4, i, 32) + half(raw, 2) for i in range(32)]
    if name in ("Q5_0", "Q5_1"):
        base = 2 if name == "Q5_0" else 4
        high = int(raw[base : base + 4].view(np.uint32)[0])
        quants = [nibble(raw, base + 4, i, 32) | (high >> i & 1) << 4 for i in range(32)]
        if name == "Q5_0":
            return [half(raw, 0) * (q - 16) for q in quants]
        return [half(raw, 0) * q + half(raw, 2) for q in quants]
    if name in ("Q4_K", "Q5_K"):
        return _k_quant(name, raw)
    assert name == "Q6_K"
    values = []
    for i in range(256):
        part, within = divmod(i, 128)
        group, lane = divmod(within, 32)
        low = int(raw[part * 64 + lane + 32 * (group % 2)]) >> (4 * (group // 2)) & 15
        top = int(raw[128 + part * 32 + lane]) >> (2 * group) & 3
        scale = int(raw[192:208].view(np.int8)[i // 16])
        values.append(half(raw, 208) * scale * ((low | top << 4) - 32))
    return values


def _k_quant(name: str, raw: np.ndarray) -> list[float]:
    packed = [int(b) for b in raw[4:16]]
    values = []
    for i in range(256):
        group, lane = divmod(i, 32)
        if group < 4:
            scale, low = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            low = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        at = (16 if name == "Q4_K" else 48) + group // 2 * 32 + lane
        quant = int(raw[at]) >> 4 * (group % 2) & 15
        if name == "Q5_K":
            quant |= (int(raw[16 + lane]) >> group & 1) << 4
        values.append(half(raw, 0) * scale * quant - half(raw, 2) * low)
    return values


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_equals_the_definition(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    raw = random_blocks(kind, 3, block)
    expected = np.array([scalar(name, row) for row in raw])
    np.testing.assert_allclose(dequantize(raw, name, (3, block)), expected, rtol=1e-5, atol=1e-5)


def test_wrong_size_and_type_are_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes of Q8_0"):
        dequantize(np.zeros(33, dtype=np.uint8), "Q8_0", (32,))
    for name in ("IQ4_XS", "I64", "nonsense"):
        with pytest.raises(CheckpointError, match=name):
            dequantize(np.zeros(8, dtype=np.uint8), name, (1,))
