"""The small linear kernels, in Triton's interpreter where there is no GPU, against float64."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

pytest.importorskip("triton")

from firsttoken.core.errors import ConfigError
from firsttoken.kernels.linear import LinearConfig, OpKind, reference
from firsttoken.kernels.linear.small import Norm, Workspace, small_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts float32 off where the GPU rounds to the nearest bfloat16.
ROUNDING = 2**-8 if DEVICE == "cuda" else 2**-7
# The interpreter's own: it turns arrays of one element into loop bounds.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
FMA = LinearConfig("fma", 8, 64, 4, 0)
DOT = LinearConfig("dot", 16, 32, 4, 3, block_m=8)


class Case:
    """Random tensors for one product, and the call on them."""

    def __init__(self, kind: OpKind, rows: int, n: int, k: int, config: LinearConfig, *, parts: int = 0, **has: bool):
        torch.manual_seed(rows * n + k)
        self.kind, self.config, self.n = kind, config, n
        self.x = torch.randn(rows, k, device=DEVICE).bfloat16()
        self.weight = (torch.randn(n, k, device=DEVICE) * k**-0.5).bfloat16()
        self.bias = torch.randn(n, device=DEVICE) if has.get("bias") else None
        self.norm = Norm(torch.rand(rows, parts, device=DEVICE) * k, 1e-5, k) if parts else None
        self.residual = torch.randn(rows, n, device=DEVICE).bfloat16() if kind == "residual" else None
        self.gain = torch.rand(n, device=DEVICE) + 0.5 if has.get("prepare") else None
        tiles = config.tiles(n)
        self.out = torch.zeros(rows, n // 2 if kind == "gated" else n, device=DEVICE)
        self.best: tuple[torch.Tensor, torch.Tensor] | None = None
        self.scaled = self.squares = None
        if kind == "head":
            self.best = (torch.zeros(rows, tiles, device=DEVICE), torch.zeros(rows, tiles, device=DEVICE).int())
        else:
            self.out = self.out.bfloat16()
        if self.gain is not None:
            self.scaled, self.squares = self.out.clone(), torch.zeros(rows, tiles, device=DEVICE)
        self.workspace = Workspace.allocate(config.workspace_floats(n), tiles, torch.device(DEVICE))

    def run(self, **changes: Any) -> torch.Tensor:
        arguments: dict[str, Any] = {
            "config": self.config, "workspace": self.workspace, "bias": self.bias, "norm": self.norm,
            "gated": self.kind == "gated", "residual": self.residual, "next_gain": self.gain,
            "scaled_out": self.scaled, "ssq_out": self.squares, "best": self.best,
        }  # fmt: skip
        small_linear(self.x, self.weight, self.out, **(arguments | changes))
        return self.out

    def check(self) -> None:
        expected = reference.linear(
            self.x, self.weight, self.kind, bias=self.bias, norm=self.norm, residual=self.residual, next_gain=self.gain
        )
        out = self.run()
        rtol = 1e-5 if self.kind == "head" else ROUNDING
        torch.testing.assert_close(out.double(), expected.out, rtol=rtol, atol=1e-5)
        if self.scaled is not None and self.squares is not None:
            torch.testing.assert_close(self.scaled.double(), expected.scaled, rtol=ROUNDING, atol=1e-5)
            torch.testing.assert_close(self.squares.double().sum(-1), expected.squares, rtol=1e-5, atol=1e-5)
        if self.best is not None:
            self.check_best()
        assert not self.workspace.arrived.any(), "the counters must be 0 again for the next launch"

    def check_best(self) -> None:
        assert self.best is not None
        values, indices = self.best
        tiles, groups = self.config.tiles(self.n), -(-self.n // self.config.block_n)
        for tile in range(tiles):
            begin, end = (groups * t // tiles * self.config.block_n for t in (tile, tile + 1))
            value, index = reference.best(self.out[:, begin:end])
            assert torch.equal(values[:, tile], value)
            assert torch.equal(indices[:, tile].long(), index + begin)


@pytest.mark.parametrize("kind", ["plain", "residual", "gated", "head"])
@pytest.mark.parametrize(
    ("n", "k"), [(16, 128), (22, 72)]
)  # even tiles; a last tile and a last block that are not full
@pytest.mark.parametrize("stages", [0, 3])
def test_one_row(kind: OpKind, n: int, k: int, stages: int) -> None:
    config = LinearConfig("fma", 8, 64, 4, stages)
    Case(kind, 1, n, k, config, parts=3, bias=True, prepare=kind == "residual").check()


@pytest.mark.parametrize("kind", ["plain", "residual", "gated", "head"])
@pytest.mark.parametrize(
    ("rows", "n", "k", "config"),
    [
        (2, 32, 64, DOT),
        (8, 34, 72, LinearConfig("dot", 16, 32, 4, 3, block_m=8, prefetch=True)),
        (3, 32, 128, LinearConfig("dot", 16, 32, 4, 3, block_m=8, split_k=2)),
        (9, 34, 168, LinearConfig("dot", 16, 32, 4, 3, block_m=16, split_k=3, prefetch=True)),
        (16, 32, 72, LinearConfig("dot", 16, 32, 4, 1, block_m=16)),
    ],
)
def test_several_rows(kind: OpKind, rows: int, n: int, k: int, config: LinearConfig) -> None:
    Case(kind, rows, n, k, config, parts=2, bias=True, prepare=kind == "residual").check()


@pytest.mark.parametrize("kind", ["plain", "residual", "gated", "head"])
@pytest.mark.parametrize(
    ("rows", "n", "k", "config"),
    [
        (17, 34, 72, LinearConfig("dot", 32, 32, 4, 3, block_m=32)),
        (31, 32, 168, LinearConfig("dot", 32, 32, 4, 3, block_m=32, split_k=2, prefetch=True)),
        (33, 18, 72, LinearConfig("dot", 16, 64, 4, 2, block_m=64, prefetch=True)),
        (64, 18, 168, LinearConfig("dot", 16, 64, 4, 4, block_m=64, split_k=3)),
    ],
)
def test_many_rows(kind: OpKind, rows: int, n: int, k: int, config: LinearConfig) -> None:
    Case(kind, rows, n, k, config, parts=3, bias=True, prepare=kind == "residual").check()


@pytest.mark.parametrize("split_k", [1, 2])
def test_more_of_the_residual_than_registers_hold(split_k: int) -> None:
    config = LinearConfig("dot", 128, 32, 4, 2, block_m=64, split_k=split_k)
    Case("residual", 63, 130, 64, config, prepare=True).check()


@pytest.mark.parametrize("parts", [64, 65, 200])
def test_more_sums_of_squares_than_registers_hold(parts: int) -> None:
    Case("plain", 33, 16, 32, LinearConfig("dot", 16, 32, 4, 2, block_m=64), parts=parts).check()


@pytest.mark.parametrize(("rows", "config"), [(1, FMA), (5, DOT)])
def test_without_norm_and_bias(rows: int, config: LinearConfig) -> None:
    Case("plain", rows, 16, 64, config).check()
    Case("residual", rows, 16, 64, config).check()


def test_a_k_below_one_block() -> None:
    Case("plain", 1, 8, 24, FMA).check()
    Case("plain", 2, 16, 24, DOT).check()


def test_the_residual_may_be_the_output() -> None:
    for case in (
        Case("residual", 1, 16, 64, FMA, prepare=True),
        Case("residual", 4, 16, 128, LinearConfig("dot", 16, 32, 4, 2, block_m=8, split_k=2)),
        Case("residual", 33, 128, 32, LinearConfig("dot", 128, 32, 4, 2, block_m=64), prepare=True),
    ):
        apart = case.run().clone()
        assert case.residual is not None
        case.out = case.residual
        assert torch.equal(case.run(), apart)


@pytest.mark.parametrize("block_m", [8, 64])
def test_rows_do_not_depend_on_each_other(block_m: Literal[8, 64]) -> None:
    config = LinearConfig("dot", 16, 32, 4, 3, block_m=block_m, split_k=2)
    case = Case("residual", 5, 16, 128, config)
    together = case.run().clone()
    assert case.residual is not None
    case.x, case.residual, case.out = case.x[2:3], case.residual[2:3].clone(), case.out[2:3].clone()
    assert torch.equal(case.run(), together[2:3])


@pytest.mark.parametrize(("rows", "config"), [(1, FMA), (2, DOT)])
def test_best_at_ties_and_nan(rows: int, config: LinearConfig) -> None:
    case = Case("head", rows, 32, 32, config)
    case.weight[5] = case.weight[3] = case.x[0] * 10
    case.run()
    case.check_best()
    assert case.best is not None
    assert case.best[1][0, 0] == 3
    case.weight[6] = float("nan")
    case.run()
    assert case.best[0][:, 0].isnan().all()
    assert (case.best[1][:, 0] == 6).all()


def test_best_of_a_tile_that_is_not_full_ignores_what_is_beyond() -> None:
    case = Case("head", 1, 9, 32, FMA)
    case.weight[8] = -case.x[0]
    case.run()
    assert case.best is not None
    assert case.best[1][0, 1] == 8
    assert case.best[0][0, 1] < 0


def test_arguments_that_do_not_fit_are_refused() -> None:
    case = Case("residual", 1, 16, 64, FMA, prepare=True)
    with pytest.raises(ValueError, match="given together"):
        case.run(ssq_out=None)
    with pytest.raises(ValueError, match=r"ssq_out must be contiguous \[1, 2\], got \[1, 3\]"):
        case.run(ssq_out=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="a gated product takes no residual"):
        small_linear(case.x, case.weight, case.out[:, :8], config=FMA, gated=True, residual=case.residual)
    case = Case("plain", 2, 16, 128, DOT)
    with pytest.raises(ValueError, match="needs a workspace of 512, 1"):
        case.run(config=LinearConfig("dot", 16, 32, 4, 3, block_m=16, split_k=2), workspace=None)
    with pytest.raises(ConfigError, match="takes 1 to 1 rows, got 2"):
        case.run(config=FMA)
    case.weight = case.weight.float()
    with pytest.raises(ValueError, match=r"weight must be torch.bfloat16, got torch.float32"):
        case.run()
