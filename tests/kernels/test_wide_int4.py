"""int4 weights in wide tiles against float64, at odd shapes, with every epilogue; under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear.reference import linear
from firsttoken.kernels.linear.small import Workspace
from firsttoken.kernels.packed_linear.config import (
    SHARED_FLOATS,
    SHARED_TILES,
    WideConfig,
    WideDivision,
    rounded_config,
    wide_config,
)
from firsttoken.kernels.packed_linear.layout import BYTE_COLUMNS, PackedWeight, pack_int4, unpack
from firsttoken.kernels.packed_linear.rounded import RoundedRows, as_fp8, round_rows, rounded_linear

SMALL = WideConfig(16, 2, 16, 4)


def random_int4(n: int, k: int, group: int, *, zeros: bool = False) -> PackedWeight:
    values = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    points = torch.randint(-8, 8, (n, k // group), dtype=torch.int8) if zeros else None
    return pack_int4(values, (torch.rand(n, k // group) * 0.1).bfloat16(), points)


def in_order(values: torch.Tensor, k: int) -> torch.Tensor:
    """Columns as they are meant, float64."""
    order = torch.tensor(BYTE_COLUMNS).argsort()
    return values.float().view(len(values), -1, 64)[:, :, order].reshape(len(values), -1)[:, :k].double()


def rows_of(rows: RoundedRows) -> torch.Tensor:
    return in_order(rows.values, rows.k) * rows.scales[:, None]


def rounded(weight: PackedWeight) -> torch.Tensor:
    """int4 weights as the product rounds them: scaled, to e4m3."""
    eight = as_fp8(weight, torch.empty(weight.n * 2048, dtype=torch.uint8))
    return in_order(eight.words, weight.k) * eight.scales[:, None]


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "zeros"),
    [
        (5, 24, 384, 128, False),
        (17, 40, 256, 64, True),
        (3, 32, 1088, 64, False),
        (19, 16, 2048, 128, True),
    ],
)
def test_product_of_wide_tiles(m: int, n: int, k: int, group: int, zeros: bool) -> None:
    weight = random_int4(n, k, group, zeros=zeros)
    rows = round_rows(torch.randn(m, k).bfloat16() + 0.5, weight, config=SMALL)
    assert rows.sums is None
    division = SMALL.divide(n, m, k)
    workspace = Workspace.allocate(*SMALL.workspace(division), torch.device("cpu"))
    out = torch.empty(m, n, dtype=torch.bfloat16)
    rounded_linear(rows, weight, out, workspace=workspace, config=SMALL)
    # Scales are rounded to eight bits before, so some weights fall to the other of two neighbours.
    assert apart(out, rows_of(rows) @ rounded(weight).T) < 0.025
    assert apart(out, rows_of(rows) @ unpack(weight).double().T) < 0.04
    assert not workspace.arrived.any(), "counters return to 0"


def test_scales_of_eight_bits_are_multiplied_exactly() -> None:
    """One scale for all, so that weights are nibbles times a power of two: nothing is rounded but the result."""
    values = torch.randint(-8, 8, (16, 256), dtype=torch.int8)
    weight = pack_int4(values, torch.full((16, 2), 0.5))
    rows = round_rows(torch.randn(3, 256).bfloat16(), weight, config=SMALL)
    out = torch.empty(3, 16, dtype=torch.bfloat16)
    rounded_linear(rows, weight, out, workspace=Workspace.allocate(1, 1, torch.device("cpu")), config=SMALL)
    assert apart(out, rows_of(rows) @ unpack(weight).double().T) < 2**-8


def test_wide_tiles_have_the_epilogues() -> None:
    m, n, k = 6, 32, 256
    weight, bias = random_int4(n, k, 128), torch.randn(32)
    rows = round_rows(torch.randn(m, k).bfloat16(), weight, config=SMALL)
    workspace = Workspace.allocate(1, 1, torch.device("cpu"))
    x, full = rows_of(rows).bfloat16(), rounded(weight).float()
    gated = torch.empty(m, n // 2, dtype=torch.bfloat16)
    rounded_linear(rows, weight, gated, workspace=workspace, config=SMALL, bias=bias, gated=True)
    assert apart(gated, linear(x, full, "gated", bias=bias).out.double()) < 0.04
    hidden = torch.randn(m, n).bfloat16()
    expected = linear(x, full, "residual", residual=hidden.clone(), bias=bias).out
    rounded_linear(rows, weight, hidden, workspace=workspace, config=SMALL, bias=bias, residual=hidden)
    assert apart(hidden, expected.double()) < 0.03


def test_zero_and_huge_scales() -> None:
    values = torch.full((16, 256), 7, dtype=torch.int8)
    scales = torch.tensor([[0.0, 2.0**100], [2.0**-100, 2.0**-100]]).repeat(8, 1)
    weight = pack_int4(values, scales)
    rows = round_rows(torch.ones(1, 256).bfloat16(), weight, config=SMALL)
    out = torch.empty(1, 16, dtype=torch.bfloat16)
    rounded_linear(rows, weight, out, workspace=Workspace.allocate(1, 1, torch.device("cpu")), config=SMALL)
    assert torch.allclose(out[0, ::2].double(), torch.full((8,), 128 * 7 * 2.0**100).double(), rtol=0.05)
    assert torch.allclose(out[0, 1::2].double(), torch.full((8,), 256 * 7 * 2.0**-100).double(), rtol=0.05)


def test_what_is_left_after_full_waves_is_split_where_that_is_sooner() -> None:
    tall = WideConfig(256, 3)
    assert tall.divide(128 * 132, 256, 8192) == WideDivision(132, 132, 1)
    assert tall.divide(57344, 256, 8192) == WideDivision(448, 396, 2)
    assert tall.divide(8192, 256, 8192) == WideDivision(64, 0, 2)
    assert tall.divide(10240, 256, 8192) == WideDivision(80, 80, 1), "three parts each were two rounds"
    assert tall.divide(8192, 256, 1024) == WideDivision(64, 64, 1), "parts of less than four chunks"
    assert tall.divide(57344, 256, 8192).programs == 396 + 104


@pytest.mark.parametrize(
    ("n", "k", "rows", "block_m"),
    [(57344, 8192, 256, 256), (28672, 4096, 256, 256), (4096, 4096, 256, 128), (6144, 4096, 256, 128)],
)
def test_tiles_are_those_that_were_the_fastest(n: int, k: int, rows: int, block_m: int) -> None:
    config = rounded_config(n, k, rows, "int4")
    assert isinstance(config, WideConfig)
    assert config.block_m == block_m


def test_any_product_in_wide_tiles_has_room_where_its_parts_meet() -> None:
    for n in (64, 512, 1024, 4096, 10240, 28672):
        for k in (256, 2048, 8192, 28672):
            for rows in (*range(65, 1024, 48), 1024):
                config = wide_config(n, k, rows, 128, zeros=False)
                floats, slots = config.workspace(config.divide(n, rows, k))
                assert floats <= SHARED_FLOATS, (n, k, rows, config)
                assert slots <= SHARED_TILES, (n, k, rows, config)


def test_what_wide_tiles_do_not_take_is_refused() -> None:
    workspace = Workspace.allocate(1, 1, torch.device("cpu"))
    narrow, weight = random_int4(16, 64, 32), random_int4(16, 4096, 128)
    out = torch.empty(3, 16, dtype=torch.bfloat16)
    rows = round_rows(torch.randn(3, 64).bfloat16(), narrow)
    with pytest.raises(ConfigError, match="groups of 64 or 128, got int4 in groups of 32"):
        rounded_linear(rows, narrow, out, workspace=workspace, config=SMALL)
    rows = round_rows(torch.randn(3, 4096).bfloat16(), weight, config=SMALL)
    with pytest.raises(ValueError, match="needs a workspace of"):
        rounded_linear(rows, weight, out, workspace=workspace, config=SMALL)
    cut = RoundedRows(rows.values[:3].clone(), rows.scales, None, rows.k, True)
    with pytest.raises(ValueError, match="3 rows have room for 3, wide tiles need a multiple of 256"):
        rounded_linear(cut, weight, out, workspace=workspace, config=SMALL)
    with pytest.raises(ValueError, match="takes the sums of the rows' groups"):
        rounded_linear(rows, weight, out, workspace=workspace)
