"""Packed formats and linear methods against plain float64 products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from torch import Tensor

from firsttoken.core.errors import CheckpointError, ConfigError
from firsttoken.quantization import StoredTensor, linear_method
from firsttoken.quantization.gguf_torch import dequantize, four_bit
from firsttoken.quantization.int4 import Int4Linear, pack_four_bit
from firsttoken.quantization.linear import ByRows
from firsttoken.quantization.packed import HEAD_ROWS, INT4_ROWS
from firsttoken.quantization.row_table import RowTable
from firsttoken.quantization.stored import concatenate
from firsttoken.quantization.unpacked import PlainLinear, UnpackedMethod


def stored(type: str, rows: int, columns: int, seed: int = 0) -> StoredTensor:
    values = np.random.default_rng(seed).normal(0, 0.05, (rows, columns)).astype(np.float32)
    raw = gguf_quantize(values, GGMLQuantizationType[type])
    return StoredTensor.from_bytes("w", type, (rows, columns), torch.from_numpy(raw.view(np.uint8)))


def exact(tensor: StoredTensor) -> Tensor:
    raw = tensor.data.contiguous().view(torch.uint8).numpy()
    return torch.from_numpy(gguf_dequantize(raw, GGMLQuantizationType[tensor.type]).copy()).double().view(tensor.shape)


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q8_0"])
def test_torch_dequantisation_is_gguf_s(type: str) -> None:
    tensor = stored(type, 48, 96)
    assert torch.equal(dequantize(tensor.data, type, torch.float32).double(), exact(tensor))


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1"])
def test_any_type_dequantises_the_same_in_pieces(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = stored(type, 50, 64)
    whole = tensor.dequantize(torch.float32)
    assert torch.equal(whole.double(), exact(tensor))
    monkeypatch.setattr("firsttoken.quantization.stored._PIECE_ELEMENTS", 64 * 7)
    assert torch.equal(tensor.dequantize(torch.float32), whole)


def test_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="Q2_K"):
        dequantize(torch.zeros(1, 84, dtype=torch.uint8), "Q2_K", torch.float32)


@pytest.mark.parametrize("type", ["Q4_1", "Q8_0", "Q5_0", "F16"])
def test_a_vector_dequantises_like_a_row(type: str) -> None:
    row = stored(type, 1, 64)
    vector = StoredTensor.from_bytes("b", type, (64,), row.data.view(torch.uint8).flatten())
    vector.check_finite()
    assert torch.equal(vector.dequantize(torch.float32).double(), exact(row)[0])


def test_bytes_at_an_odd_address_are_read() -> None:
    values = torch.randn(3, 4)
    raw = torch.zeros(49, dtype=torch.uint8)
    raw[1:] = values.view(torch.uint8).flatten()
    assert torch.equal(StoredTensor.from_bytes("w", "F32", (3, 4), raw[1:]).data, values)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q8_0", "F32", "BF16"])
def test_a_number_that_is_not_finite_is_refused_by_name(type: str, bad: float) -> None:
    tensor = stored(type, 16, 32)
    tensor.check_finite()
    if tensor.data.is_floating_point():
        tensor.data[3, 5] = bad
    else:
        tensor.data[3, :2] = torch.tensor([bad], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(CheckpointError, match=r"^w: .*NaN or infinite"):
        tensor.check_finite()


def test_rows_of_one_type_stay_packed_and_mixtures_do_not() -> None:
    a, b, c = stored("Q4_1", 16, 32), stored("Q4_1", 8, 32, 1), stored("Q8_0", 8, 32, 2)
    same = concatenate([a, b])
    assert (same.type, same.shape) == ("Q4_1", (24, 32))
    mixed = concatenate([a, c])
    assert (mixed.type, mixed.shape) == ("F32", (24, 32))
    assert torch.equal(mixed.data.double(), torch.cat([exact(a), exact(c)]))


@pytest.mark.parametrize("type", ["F32", "BF16", "Q4_1", "Q8_0", "Q6_K"])
def test_row_table_gives_stored_rows(type: str) -> None:
    if type == "Q6_K":
        # gguf cannot quantise K types: any bytes with a small fp16 scale at each block's end are a valid matrix.
        data = torch.randint(0, 256, (10, 210), dtype=torch.uint8)
        data[:, 208:] = torch.full((10, 1), 0.01, dtype=torch.float16).view(torch.uint8)
        tensor = StoredTensor.from_bytes("w", type, (10, 256), data)
    else:
        tensor = stored(type, 10, 64)
    table = RowTable(tensor, torch.float32)
    rows = table.rows(torch.tensor([3, 9, 3]))
    assert rows.dtype == torch.float32
    assert torch.equal(rows.double(), exact(tensor)[[3, 9, 3]])
    rows.zero_()
    assert torch.equal(table.rows(torch.tensor([3])).double(), exact(tensor)[[3]])


def relative_error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 2, INT4_ROWS, INT4_ROWS + 1, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("quantization", "dtype", "type", "bound"),
    [
        ("none", torch.float32, "Q4_1", 1e-6),
        ("none", torch.bfloat16, "Q4_1", 6e-3),
        ("packed", torch.bfloat16, "Q4_1", 6e-3),
        ("packed", torch.bfloat16, "Q4_0", 6e-3),
        ("packed", torch.bfloat16, "Q8_0", 6e-3),
        ("packed", torch.bfloat16, "BF16", 6e-3),
    ],
)
def test_products(quantization: str, dtype: torch.dtype, type: str, bound: float, bias: bool, rows: int) -> None:
    weight = stored(type, 96, 128)
    offset = torch.randn(96) if bias else None
    x = torch.randn(rows, 128).to(dtype)
    expected = x.double() @ exact(weight).T + (0 if offset is None else offset.double())
    y = linear_method(quantization, dtype).linear(weight, offset)(x)
    assert y.dtype == dtype
    assert relative_error(y, expected) < bound
    gate, up = expected.chunk(2, dim=-1)
    gated = linear_method(quantization, dtype).gated(weight, offset)(x)
    assert relative_error(gated, gate * torch.sigmoid(gate) * up) < 2 * bound


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_do_not_see_their_neighbours(rows: int) -> None:
    linear = linear_method("packed", torch.bfloat16).linear(stored("Q4_1", 64, 64), None)
    x = torch.randn(rows, 64).bfloat16()
    other = x.clone()
    other[1:] = 1000.0
    assert torch.equal(linear(x)[0], linear(other)[0])


def test_four_bit_keeps_both_forms_and_others_only_one() -> None:
    method = linear_method("packed", torch.bfloat16)
    assert isinstance(method.linear(stored("Q4_1", 32, 64), None), ByRows)
    assert isinstance(method.linear(stored("Q4_1", 24, 64), None), ByRows)
    assert not isinstance(method.linear(stored("Q8_0", 32, 64), None), ByRows)


@pytest.mark.parametrize("rows", [1, HEAD_ROWS, HEAD_ROWS + 1])
def test_the_head_of_packed_models_is_read_in_eight_bits_for_few_rows(rows: int) -> None:
    weight = stored("Q8_0", 96, 64)
    head, own_rows = linear_method("packed", torch.bfloat16).head(weight)
    assert own_rows is None
    x = torch.randn(rows, 64).bfloat16()
    error = relative_error(head(x), x.double() @ exact(weight).T)
    assert error < (0.02 if rows <= HEAD_ROWS else 6e-3)
    assert head.nbytes == 3 * 96 * 64 + 2 * 96
    odd = stored("F32", 20, 33)  # columns that the 8-bit product does not take
    assert linear_method("packed", torch.bfloat16).head(odd)[0].nbytes == 2 * 20 * 33


def test_four_bit_form_is_close_to_the_file() -> None:
    weight = stored("Q4_1", 128, 256)
    codes = four_bit(weight.data, "Q4_1")
    x = torch.eye(256).bfloat16()
    error = (Int4Linear(pack_four_bit(codes), None)(x).double() - exact(weight).T).abs().max()
    # A block spans 15 scales; rounding scale and zero to bfloat16 moves a weight by less than a 20th of one step.
    assert error < codes.scale.max() / 20


def test_fallbacks_without_prepacking_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = stored("F32", 32, 24), torch.randn(32), torch.randn(5, 24)
    fast = UnpackedMethod(torch.float32)
    monkeypatch.setattr("firsttoken.quantization.unpacked.can_prepack", lambda dtype: False)
    plain = UnpackedMethod(torch.float32)
    assert isinstance(plain.linear(weight, bias), PlainLinear)
    assert torch.allclose(plain.linear(weight, bias)(x), fast.linear(weight, bias)(x), atol=1e-5)
    assert torch.allclose(plain.gated(weight, bias)(x), fast.gated(weight, bias)(x), atol=1e-5)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of none, packed, int8, int4"):
        linear_method("awq", torch.bfloat16)
    with pytest.raises(ConfigError, match="computes in bfloat16"):
        linear_method("packed", torch.float32)
