"""One row of FP8 weights on the CUDA cores against float64, at odd shapes, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear.config import LinearConfig
from firsttoken.kernels.linear.reference import best, linear
from firsttoken.kernels.linear.small import Norm
from firsttoken.kernels.packed_linear.layout import PackedWeight, pack_fp8, unpack
from firsttoken.kernels.packed_linear.one_row import fp8_row_linear
from firsttoken.kernels.packed_linear.tune import candidates, row_candidates


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (got.double() - expected).abs()
    assert (error <= tolerance * (expected.abs() + expected.abs().mean())).all(), error.max()


def random_fp8(n: int, k: int) -> PackedWeight:
    return pack_fp8((torch.randn(n, k) * 50).to(torch.float8_e4m3fn), torch.rand(n) + 0.01)


@pytest.mark.parametrize(
    ("n", "k", "config"), [(20, 144, LinearConfig("fma", 8, 64, 1, 0)), (9, 208, LinearConfig("fma", 4, 128, 2, 4))]
)
def test_one_row_of_fp8_on_the_cuda_cores(n: int, k: int, config: LinearConfig) -> None:
    x, weight = torch.randn(1, k).bfloat16(), random_fp8(n, k)
    out = torch.empty(1, n, dtype=torch.bfloat16)
    fp8_row_linear(x, weight, out, config=config)
    close(out, x.double() @ unpack(weight).double().T, 2**-7)


def test_one_row_of_fp8_has_the_epilogues() -> None:
    n, k, config = 16, 128, LinearConfig("fma", 8, 64, 1, 0)
    x, weight, bias, squares = torch.randn(1, k).bfloat16(), random_fp8(n, k), torch.randn(n), torch.rand(1, 3) + 1
    full, norm = unpack(weight), (squares, 1e-5, k)
    gated = torch.empty(1, n // 2, dtype=torch.bfloat16)
    fp8_row_linear(x, weight, gated, config=config, norm=Norm(*norm), gated=True, bias=bias)
    close(gated, linear(x, full, "gated", norm=norm, bias=bias).out, 2**-6)
    hidden, gain = torch.randn(1, n).bfloat16(), torch.rand(n)
    expected = linear(x, full, "residual", residual=hidden.clone(), next_gain=gain)
    scaled, sums = torch.empty_like(hidden), torch.empty(1, config.tiles(n))
    fp8_row_linear(
        x, weight, hidden, config=config, residual=hidden, next_gain=gain, scaled_out=scaled, ssq_out=sums
    )  # fmt: skip
    assert expected.scaled is not None
    assert expected.squares is not None
    close(scaled, expected.scaled, 2**-7)
    close(sums.sum(1), expected.squares, 2**-7)
    logits, tops = torch.empty(1, n), (torch.empty(1, 2), torch.empty(1, 2, dtype=torch.int32))
    fp8_row_linear(x, weight, logits, config=config, best=tops)
    value, index = best(logits)
    assert (tops[0].max(), tops[1][0, tops[0].argmax()]) == (value, index)


def test_fma_configs_fit_an_8b_and_others_are_refused() -> None:
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
        listed = row_candidates(k)
        assert len(listed) >= 10
        for config in listed:
            config.check("plain", n, k)
    out = torch.empty(2, 16, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="one row of FP8 weights by an fma config is what this takes, got 2 rows"):
        fp8_row_linear(torch.randn(2, 64).bfloat16(), random_fp8(16, 64), out, config=listed[0])


@pytest.mark.parametrize("format", ["int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (128256, 4096), (8192, 28672), (48, 64)])
def test_candidates_of_packed_products_fit(format: str, rows: int, n: int, k: int) -> None:
    listed = candidates(n, k, rows, format)
    assert len(listed) == len(set(listed)) >= (1 if n == 48 else 4)
    for config in listed:
        assert config.block_m >= rows
        config.check(-(-k // (256 if format == "int4" else 128)))
