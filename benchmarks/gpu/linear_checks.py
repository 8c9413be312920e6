"""Checks of the small products and their neighbours on the GPU: odd shapes against float64, and a chain of dependent
launches that must give the same bits with and without overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from firsttoken.kernels.embed import reference as embed_reference
from firsttoken.kernels.embed.triton import embed
from firsttoken.kernels.linear import LinearConfig, OpKind, default_config, reference
from firsttoken.kernels.linear.config import OP_KINDS
from firsttoken.kernels.linear.small import Norm, Workspace, small_linear
from firsttoken.kernels.rms_norm.reference import rms_norm
from firsttoken.kernels.rms_norm.triton import add_rms_norm
from firsttoken.kernels.silu_mul.reference import silu_mul_interleaved
from firsttoken.kernels.silu_mul.triton import silu_mul

# Half a unit in the last place of bfloat16 for the result, and float32 sums.
_ROUNDING = 2**-8


@dataclass
class Product:
    """One product's tensors on ``device``; ``weights`` are copies to rotate over."""

    kind: OpKind
    rows: int
    config: LinearConfig
    x: Tensor
    weights: list[Tensor]
    out: Tensor
    norm: Norm | None
    residual: Tensor | None
    gain: Tensor | None
    scaled: Tensor | None
    squares: Tensor | None
    best: tuple[Tensor, Tensor] | None
    workspace: Workspace

    def run(self, *, copy: int = 0, pdl: bool = False) -> None:
        small_linear(
            self.x,
            self.weights[copy % len(self.weights)],
            self.out,
            config=self.config,
            workspace=self.workspace,
            pdl=pdl,
            norm=self.norm,
            gated=self.kind == "gated",
            residual=self.residual,
            next_gain=self.gain,
            scaled_out=self.scaled,
            ssq_out=self.squares,
            best=self.best,
        )


def make(
    kind: OpKind, rows: int, n: int, k: int, config: LinearConfig, *, weights: list[Tensor] | None, parts: int = 64
) -> Product:
    """Random tensors as the decode step has them: a norm before, or a residual and the next norm's input after.

    ``weights`` None makes meta tensors: running such a product compiles its kernel.
    """
    device = torch.device("meta") if weights is None else weights[0].device
    tiles = config.tiles(n)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_()

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    residual = kind == "residual"
    return Product(
        kind=kind,
        rows=rows,
        config=config,
        x=randn(rows, k),
        weights=weights or [torch.empty(n, k, dtype=torch.bfloat16, device=device)],
        out=zeros(rows, n // 2 if kind == "gated" else n, dtype=torch.float32 if kind == "head" else torch.bfloat16),
        norm=None if residual else Norm(zeros(rows, parts).uniform_().mul_(k / parts * 2), 1e-5, k),
        residual=randn(rows, n) if residual else None,
        gain=zeros(n).uniform_(0.5, 1.5) if residual else None,
        scaled=randn(rows, n) if residual else None,
        squares=zeros(rows, tiles) if residual else None,
        best=(zeros(rows, tiles), zeros(rows, tiles, dtype=torch.int32)) if kind == "head" else None,
        workspace=Workspace.allocate(config.workspace_floats(n), tiles, device),
    )


def check_product(case: Product) -> float:
    """The largest error of every output, as a multiple of what rounding allows; 1.0 and below is right."""
    case.run()
    norm = (case.norm.squares, case.norm.eps, case.norm.width) if case.norm is not None else None
    want = reference.linear(
        case.x, case.weights[0], case.kind, norm=norm, residual=case.residual, next_gain=case.gain
    )  # fmt: skip
    worst = _excess(case.out, want.out, 1e-4 if case.kind == "head" else _ROUNDING)
    if case.scaled is not None and case.squares is not None and want.scaled is not None and want.squares is not None:
        worst = max(worst, _excess(case.scaled, want.scaled, _ROUNDING))
        worst = max(worst, _excess(case.squares.sum(-1), want.squares, 1e-4))
    if case.best is not None:
        values, indices = case.best
        top, at = reference.best(case.out)
        first = torch.where(values == values.max(-1, keepdim=True).values, indices, 1 << 30).min(-1).values
        right = torch.equal(values.max(-1).values, top) and torch.equal(first.long(), at)
        worst = max(worst, 0.0 if right else float("inf"))
    return worst if not case.workspace.arrived.any() else float("inf")


def _excess(got: Tensor, want: Tensor, relative: float) -> float:
    allowed = want.abs() * relative + 1e-3 * max(relative, 1e-3)
    return float(((got.double() - want).abs() / allowed).max())


def odd_products(quick: bool) -> Iterator[tuple[OpKind, int, int, int, LinearConfig]]:
    """Shapes with tiles and blocks that are not full, and the shapes of a small real model."""
    shapes = [(90, 168), (960, 576)] if quick else [(90, 168), (256, 1000), (960, 576), (576, 1536), (3072, 2048)]
    for kind, (n, k), rows in product(OP_KINDS, shapes, (1, 2, 3, 8, 9, 16, 17, 32, 33, 64)):
        yield kind, rows, n, k, default_config(kind, n, k, rows)
    for kind, (n, k) in product(OP_KINDS, [(1000, 1024), (90, 168)]):
        yield kind, 1, n, k, LinearConfig("fma", 16, 128, 4, 4)
        yield kind, 5, n, k, LinearConfig("dot", 32, 32, 4, 3, block_m=8, split_k=3, prefetch=True)
        yield kind, 13, n, k, LinearConfig("dot", 64, 64, 4, 3, block_m=16, split_k=2, prefetch=True)
        yield kind, 31, n, k, LinearConfig("dot", 128, 64, 8, 4, block_m=32, split_k=2, prefetch=True)
        yield kind, 47, n, k, LinearConfig("dot", 256, 64, 8, 4, block_m=64, prefetch=True)
        yield kind, 64, n, k, LinearConfig("dot", 128, 32, 4, 3, block_m=64, split_k=3)


def check_rows() -> dict[str, float]:
    """The row kernels at odd shapes; excess over rounding as in `check_product`."""
    worst = {"add_rms_norm": 0.0, "silu_mul": 0.0, "embed": 0.0}

    def note(name: str, got: Tensor, want: Tensor, relative: float = _ROUNDING) -> None:
        worst[name] = max(worst[name], _excess(got, want, relative))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    for rows, width in ((1, 576), (17, 4096), (1500, 1000), (2500, 2048)):
        h, y, gain, out = randn(rows, width), randn(rows, width), torch.rand(width, device="cuda"), randn(rows, width)
        total = h.double() + y.double()
        add_rms_norm(h, y, gain, 1e-5, out)
        note("add_rms_norm", h, total)
        note("add_rms_norm", out, rms_norm(total, gain, 1e-5))
        gate_up, half = randn(rows, 2 * width), randn(rows, width)
        silu_mul(gate_up, half)
        note("silu_mul", half, silu_mul_interleaved(gate_up))
        table = randn(100, width)
        tokens = torch.randint(100, (rows, 7), device="cuda").int()
        slots, positions = torch.randperm(rows, device="cuda").int(), torch.randint(-1, 7, (rows,), device="cuda").int()
        h.zero_()
        squares = torch.zeros(rows, 3, device="cuda")
        embed(tokens, slots, positions, table, h, gain=gain, scaled=out.zero_(), ssq=squares, scale=0.5)
        want = embed_reference.embed(tokens, slots, positions, table, 0.5)
        note("embed", h, want)
        note("embed", out, want * gain.double())
        note("embed", squares.sum(-1), want.square().sum(-1), 1e-4)
    return worst


class Chain:
    """A decode step without attention, small enough to be repeated a thousand times: every kernel feeds the next."""

    def __init__(self, rows: int, device: str, layers: int = 4) -> None:
        width, wide, vocabulary = 2048, 8192, 32000
        torch.manual_seed(rows)
        self.rows, self.width = rows, width
        shapes: list[tuple[OpKind, int, int]] = [
            ("plain", width, width), ("residual", width, width), ("gated", 2 * wide, width), ("residual", width, wide),
        ]  # fmt: skip
        self.configs = [default_config(*shape, rows) for shape in shapes]
        self.head_config = default_config("head", vocabulary, width, rows)

        def weight(n: int, k: int) -> Tensor:
            return torch.empty(n, k, device=device, dtype=torch.bfloat16).normal_(0, k**-0.5)

        self.layers = [[weight(n, k) for _, n, k in shapes] for _ in range(layers)]
        self.head, self.table = weight(vocabulary, width), weight(1000, width)
        self.gain = torch.rand(width, device=device) + 0.5
        self.tokens = torch.randint(1000, (rows, 4), device=device).int()
        self.slots = torch.arange(rows, device=device).int()
        self.positions = self.slots % 4

        def bf16(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=device, dtype=torch.bfloat16)

        self.h, self.scaled, self.mixed, self.act = (bf16(rows, n) for n in (width, width, width, wide))
        tiles = [config.tiles(width) for config in (self.configs[1], self.configs[3])]
        self.after_output, self.after_down = (torch.zeros(rows, count, device=device) for count in tiles)
        self.logits = torch.zeros(rows, vocabulary, device=device)
        parts = self.head_config.tiles(vocabulary)
        self.best = torch.zeros(rows, parts, device=device), torch.zeros(rows, parts, device=device).int()
        every = [(config, n) for config, (_, n, _) in zip(self.configs, shapes, strict=True)]
        every.append((self.head_config, vocabulary))
        self.workspace = Workspace.allocate(
            max(config.workspace_floats(n) for config, n in every),
            max(config.tiles(n) for config, n in every),
            torch.device(device),
        )

    def run(self, *, pdl: bool) -> None:
        tokens = self.tokens, self.slots, self.positions
        squares = self.after_down
        embed(*tokens, self.table, self.h, gain=self.gain, scaled=self.scaled, ssq=squares, pdl=pdl)
        for layer in self.layers:
            self._product(0, self.scaled, layer, self.mixed, pdl, norm=Norm(self.after_down, 1e-5, self.width))
            self._residual(1, self.mixed, layer, self.after_output, pdl)
            norm = Norm(self.after_output, 1e-5, self.width)
            self._product(2, self.scaled, layer, self.act, pdl, norm=norm, gated=True)
            self._residual(3, self.act, layer, self.after_down, pdl)
        norm = Norm(self.after_down, 1e-5, self.width)
        common = {"config": self.head_config, "workspace": self.workspace, "pdl": pdl}
        small_linear(self.scaled, self.head, self.logits, norm=norm, best=self.best, **common)  # type: ignore[arg-type]

    def _product(
        self, index: int, x: Tensor, layer: list[Tensor], out: Tensor, pdl: bool, *, norm: Norm, gated: bool = False
    ) -> None:
        common = {"config": self.configs[index], "workspace": self.workspace, "pdl": pdl}
        small_linear(x, layer[index], out, norm=norm, gated=gated, **common)  # type: ignore[arg-type]

    def _residual(self, index: int, x: Tensor, layer: list[Tensor], squares: Tensor, pdl: bool) -> None:
        common = {"config": self.configs[index], "workspace": self.workspace, "pdl": pdl}
        prepared = {"next_gain": self.gain, "scaled_out": self.scaled, "ssq_out": squares}
        small_linear(x, layer[index], self.h, residual=self.h, **prepared, **common)  # type: ignore[arg-type]

    def state(self) -> list[Tensor]:
        return [self.h.clone(), self.logits.clone(), self.best[0].clone(), self.best[1].clone()]


def check_chain(rows: int, replays: int) -> int:
    """Replays of the captured chain with dependent launches that differ in any bit from the chain without them."""
    chain = Chain(rows, "cuda")
    chain.run(pdl=False)
    torch.cuda.synchronize()
    want = chain.state()
    chain.run(pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(pdl=True)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(replays):
        chain.h.fill_(7.0)
        graph.replay()
        same = [torch.equal(now, then) for now, then in zip(chain.state(), want, strict=True)]
        wrong += int(not all(same))
    return int(wrong)
