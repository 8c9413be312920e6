"""Kernels on trial against float64, at odd shapes, under Triton's interpreter: what they are worth, a GPU must say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.trials.fma_fp8 import CONFIGS as FMA_FP8
from benchmarks.gpu.trials.fma_fp8 import fma_fp8_linear
from benchmarks.gpu.trials.wide_int4 import Division, WideConfig, divide, wide_int4_linear, with_room

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear.config import LinearConfig
from firsttoken.kernels.linear.reference import best, linear
from firsttoken.kernels.linear.small import Norm, Workspace
from firsttoken.kernels.packed_linear.layout import BYTE_COLUMNS, PackedWeight, pack_fp8, pack_int4, unpack
from firsttoken.kernels.packed_linear.rounded import RoundedRows, round_rows
from firsttoken.kernels.packed_linear.tune import candidates

ROUNDED = 2**-6


def random_int4(n: int, k: int, group: int, *, zeros: bool = False) -> PackedWeight:
    values = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    points = torch.randint(-8, 8, (n, k // group), dtype=torch.int8) if zeros else None
    return pack_int4(values, (torch.rand(n, k // group) * 0.1).bfloat16(), points)


def in_order(rows: RoundedRows) -> torch.Tensor:
    """Rounded rows of int4 as they are meant, float64."""
    order = torch.tensor(BYTE_COLUMNS).argsort()
    values = rows.values.float().view(rows.rows, -1, 64)[:, :, order].reshape(rows.rows, -1)
    return values[:, : rows.k].double() * rows.scales[:, None]


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (got.double() - expected).abs()
    assert (error <= tolerance * (expected.abs() + expected.abs().mean())).all(), error.max()


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "zeros", "config", "division"),
    [
        (5, 24, 256, 128, False, WideConfig(1, 16, 1, 2, 16), Division(2, 2, 1)),
        (19, 16, 128, 64, True, WideConfig(1, 16, 2, 2, 16), Division(1, 0, 2)),
        (17, 24, 192, 64, False, WideConfig(2, 16, 1, 2, 16), Division(2, 1, 2)),
    ],
)
def test_wide_int4(m: int, n: int, k: int, group: int, zeros: bool, config: WideConfig, division: Division) -> None:
    weight = random_int4(n, k, group, zeros=zeros)
    rows = with_room(round_rows(torch.randn(m, k).bfloat16() + 0.5, weight), config)
    workspace = Workspace.allocate(*division.workspace(config), torch.device("cpu"))
    out = torch.empty(m, n, dtype=torch.bfloat16)
    wide_int4_linear(rows, weight, out, workspace=workspace, config=config, division=division)
    close(out, in_order(rows) @ unpack(weight).double().T, ROUNDED)
    assert not workspace.arrived.any(), "counters return to 0"


def test_wide_int4_has_the_epilogues() -> None:
    m, n, k, config = 6, 32, 128, WideConfig(1, 16, 1, 2, 16)
    weight, bias = random_int4(n, k, 128), torch.randn(32)
    rows = with_room(round_rows(torch.randn(m, k).bfloat16(), weight), config)
    workspace = Workspace.allocate(1, 1, torch.device("cpu"))
    x, full = in_order(rows).bfloat16(), unpack(weight)
    gated = torch.empty(m, n // 2, dtype=torch.bfloat16)
    wide_int4_linear(rows, weight, gated, workspace=workspace, config=config, bias=bias, gated=True)
    close(gated, linear(x, full, "gated", bias=bias).out, 2 * ROUNDED)
    hidden = torch.randn(m, n).bfloat16()
    expected = linear(x, full, "residual", residual=hidden.clone(), bias=bias).out
    wide_int4_linear(rows, weight, hidden, workspace=workspace, config=config, bias=bias, residual=hidden)
    close(hidden, expected, 2 * ROUNDED)


def test_what_is_left_after_full_waves_is_split_where_that_is_sooner() -> None:
    assert divide(132, 64) == Division(132, 132, 1)
    assert divide(448, 64).whole == 396
    assert divide(448, 64).split == 2
    assert divide(64, 64) == Division(64, 0, 2)
    assert divide(64, 8) == Division(64, 0, 1), "parts of less than 8 groups"
    assert divide(448, 64).programs == 396 + 104


def test_wide_int4_refuses_what_it_does_not_take() -> None:
    config, workspace = WideConfig(1, 16, 1, 2, 16), Workspace.allocate(1, 1, torch.device("cpu"))
    narrow = random_int4(16, 64, 32)
    out = torch.empty(3, 16, dtype=torch.bfloat16)
    rows = round_rows(torch.randn(3, 64).bfloat16(), narrow)
    with pytest.raises(ConfigError, match="groups of 64 or 128, got int4 in 32"):
        wide_int4_linear(rows, narrow, out, workspace=workspace, config=config)
    weight = random_int4(16, 64, 64)
    with pytest.raises(ValueError, match="3 rows have no room for tiles of 16"):
        wide_int4_linear(rows, weight, out, workspace=workspace, config=config)


def random_fp8(n: int, k: int) -> PackedWeight:
    return pack_fp8((torch.randn(n, k) * 50).to(torch.float8_e4m3fn), torch.rand(n) + 0.01)


@pytest.mark.parametrize(
    ("n", "k", "config"), [(20, 144, LinearConfig("fma", 8, 64, 1, 0)), (9, 208, LinearConfig("fma", 4, 128, 2, 4))]
)
def test_one_row_of_fp8_on_the_cuda_cores(n: int, k: int, config: LinearConfig) -> None:
    x, weight = torch.randn(1, k).bfloat16(), random_fp8(n, k)
    out = torch.empty(1, n, dtype=torch.bfloat16)
    fma_fp8_linear(x, weight, out, config=config)
    close(out, x.double() @ unpack(weight).double().T, 2**-7)


def test_one_row_of_fp8_has_the_epilogues() -> None:
    n, k, config = 16, 128, LinearConfig("fma", 8, 64, 1, 0)
    x, weight, bias, squares = torch.randn(1, k).bfloat16(), random_fp8(n, k), torch.randn(n), torch.rand(1, 3) + 1
    full, norm = unpack(weight), (squares, 1e-5, k)
    gated = torch.empty(1, n // 2, dtype=torch.bfloat16)
    fma_fp8_linear(x, weight, gated, config=config, norm=Norm(*norm), gated=True, bias=bias)
    close(gated, linear(x, full, "gated", norm=norm, bias=bias).out, 2**-6)
    hidden, gain = torch.randn(1, n).bfloat16(), torch.rand(n)
    expected = linear(x, full, "residual", residual=hidden.clone(), next_gain=gain)
    scaled, sums = torch.empty_like(hidden), torch.empty(1, config.tiles(n))
    fma_fp8_linear(
        x, weight, hidden, config=config, residual=hidden, next_gain=gain, scaled_out=scaled, ssq_out=sums
    )  # fmt: skip
    assert expected.scaled is not None
    assert expected.squares is not None
    close(scaled, expected.scaled, 2**-7)
    close(sums.sum(1), expected.squares, 2**-7)
    logits, tops = torch.empty(1, n), (torch.empty(1, 2), torch.empty(1, 2, dtype=torch.int32))
    fma_fp8_linear(x, weight, logits, config=config, best=tops)
    value, index = best(logits)
    assert (tops[0].max(), tops[1][0, tops[0].argmax()]) == (value, index)


def test_fma_configs_fit_an_8b_and_others_are_refused() -> None:
    for config in FMA_FP8:
        for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
            config.check("plain", n, k)
    out = torch.empty(2, 16, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="one row of FP8 weights by an fma config is what this takes, got 2 rows"):
        fma_fp8_linear(torch.randn(2, 64).bfloat16(), random_fp8(16, 64), out, config=FMA_FP8[0])


@pytest.mark.parametrize("format", ["int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (128256, 4096), (8192, 28672), (48, 64)])
def test_candidates_of_packed_products_fit(format: str, rows: int, n: int, k: int) -> None:
    listed = candidates(n, k, rows, format)
    assert len(listed) == len(set(listed)) >= (1 if n == 48 else 4)
    for config in listed:
        assert config.block_m >= rows
        config.check(-(-k // (256 if format == "int4" else 128)))
