"""The best of several ways to round the linears that read one input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from firsttoken.core.errors import ConfigError
from firsttoken.quantization.calibrate.gptq import Factor, damped, factor, gptq
from firsttoken.quantization.calibrate.grid import TURNED, Grid
from firsttoken.quantization.calibrate.inputs import Inputs
from firsttoken.quantization.calibrate.refine import descend, fitted_scales
from firsttoken.quantization.on_load import SHRINK
from firsttoken.quantization.rounded import VALUE_DTYPES, RoundedFormat, RoundedWeight

Method = Literal["best", "rtn", "gptq", "awq"]
METHODS: tuple[Method, ...] = ("best", "rtn", "gptq", "awq")
# Powers of the inputs' size by which AWQ multiplies columns of weights, 0 being none.
_POWERS = tuple(step / 10 for step in range(1, 11))
# How much of what rounding did before is made up for, by weights that are moved before they are rounded.
_AMENDS = (0.0, 0.25, 0.5, 0.75, 1.0)
_ROUNDS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """How one linear is rounded: ``method`` says by what, ``mse`` what it costs its output on tokens held out, and
    ``power`` the mean square of that output."""

    weight: RoundedWeight
    method: str
    mse: float
    power: float


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where the inputs come from, if their columns can be scaled there: ``index`` int64 ``[K]`` names for each the
    source's row, of ``rows``, that several may share. ``settled``: wanted divisors ``[rows]`` -> those that the source
    can be divided by, once it is stored."""

    index: Tensor
    rows: int
    settled: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """``scale`` ``[rows]``: what each of the source's rows must be divided by; None: nothing."""

    linears: Mapping[str, Choice]
    scale: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    method: str
    codes: Tensor
    scales: Tensor
    errors: Mapping[str, float]


def check_method(method: Method, format: RoundedFormat) -> None:
    """Raises `ConfigError` for a pair that does not go together."""
    if method == "awq" and format != "int4":
        raise ConfigError(f"awq is for int4: {format} has enough bits for small columns, use rtn, gptq or best")


class Chooser:
    """Rounds ``weights`` (name to float32 ``[N, K]``), all of which read ``inputs``, by ``method``."""

    def __init__(self, weights: Mapping[str, Tensor], inputs: Inputs, grid: Grid, method: Method) -> None:
        self._names = list(weights)
        self._rows = [len(weight) for weight in weights.values()]
        self._weight = torch.cat(list(weights.values()))
        self._inputs = inputs
        self._grid = grid
        self._method = method
        self._wanted = inputs.held_full @ self._weight.t()
        self._power = self._by_name(self._wanted.square().mean(0))

    def choose(self, source: Source | None) -> Chosen:
        """``source``: None where columns cannot be scaled before. Raises `ConfigError` as `check_method` does."""
        check_method(self._method, self._grid.format)
        plain = self._trials("", None)
        best, scale = self._best(plain), None
        if source is not None and self._method in ("awq", "best") and self._grid.format == "int4":
            found = self._search(source)
            if found is not None:
                scaled = self._best(self._trials("awq", found[source.index]))
                if self._total(scaled) < self._total(best):
                    best, scale = scaled, found
        return Chosen({name: self._choice(name, trial) for name, trial in best.items()}, scale)

    def _trials(self, prefix: str, scale: Tensor | None) -> list[_Trial]:
        weight = self._weight if scale is None else self._weight * scale
        inputs = self._inputs if scale is None else self._inputs.scaled(scale)
        trials = []
        # Rounding is the floor of each method: on tokens that were held out no other is better for certain.
        scales = self._grid.scales(weight, SHRINK)
        trials.append(self._judged(prefix or "rtn", self._grid.nearest(weight, scales), scales, inputs))
        if self._method in ("gptq", "best"):
            found = factor(inputs.moments)
            mixed = damped(inputs.moments).float()
            target = self._amended(weight, inputs, mixed)
            scales = self._grid.scales(target, self._shrinks(), inputs.moments.diagonal().sqrt())
            codes, scales = _gptq(target, scales, self._grid, found, mixed)
            trials.append(self._judged(f"{prefix}+gptq" if prefix else "gptq", codes, scales, inputs))
        return trials

    def _shrinks(self) -> Sequence[float]:
        return SHRINK if self._grid.format == "fp8" else TURNED

    def _amended(self, weight: Tensor, inputs: Inputs, mixed: Tensor) -> Tensor:
        """Weights that give from inputs as they are what ``weight`` gives from them in full, as far as that helps on
        tokens held out (Arai and Ichikawa, 2025, "Quantization Error Propagation")."""
        lacking = inputs.cross @ self._weight.t() - inputs.moments @ weight.t()
        change: Tensor = torch.linalg.solve(mixed, lacking).t()
        if not bool(torch.isfinite(change).all()):
            return weight
        tried = [(self._total_of(weight + part * change, inputs), part) for part in _AMENDS]
        return weight + min(tried)[1] * change

    def _search(self, source: Source) -> Tensor | None:
        """AWQ's search: columns multiplied by a power of their inputs' size; None where no power helps."""
        size = torch.zeros(source.rows, device=self._weight.device)
        size.scatter_reduce_(0, source.index, self._inputs.moments.diagonal(), "mean", include_self=False)
        size = size.sqrt()
        size = torch.where(size > 0, size, torch.ones_like(size))
        scales = self._grid.scales(self._weight, SHRINK)
        best = self._distance(self._grid.nearest(self._weight, scales) * self._grid.spread(scales, self._columns))
        chosen = None
        for power in _POWERS:
            candidate = size.log().mul_(power)
            candidate = source.settled((candidate - candidate.mean()).exp_())
            scale = candidate[source.index]
            weight = self._weight * scale
            scales = self._grid.scales(weight, SHRINK)
            values = self._grid.nearest(weight, scales) * self._grid.spread(scales, self._columns) / scale
            distance = self._distance(values)
            if distance < best:
                best, chosen = distance, candidate
        return chosen

    @property
    def _columns(self) -> int:
        return self._weight.shape[1]

    def _distance(self, values: Tensor) -> float:
        """The outputs' mean square error by moments, each linear's by its outputs' size."""
        error = values - self._weight
        rows = ((error @ self._inputs.moments) * error).sum(-1)
        return sum(part / max(self._power[name], 1e-30) for name, part in self._by_name(rows).items())

    def _judged(self, method: str, codes: Tensor, scales: Tensor, inputs: Inputs) -> _Trial:
        values = codes * self._grid.spread(scales, self._columns)
        return _Trial(method, codes, scales, self._errors(values, inputs))

    def _errors(self, values: Tensor, inputs: Inputs) -> dict[str, float]:
        return self._by_name((inputs.held @ values.t() - self._wanted).square_().mean(0))

    def _total_of(self, values: Tensor, inputs: Inputs) -> float:
        return sum(part / max(self._power[name], 1e-30) for name, part in self._errors(values, inputs).items())

    def _best(self, trials: Sequence[_Trial]) -> dict[str, _Trial]:
        return {name: min(trials, key=lambda trial: trial.errors[name]) for name in self._names}

    def _total(self, chosen: Mapping[str, _Trial]) -> float:
        return sum(trial.errors[name] / max(self._power[name], 1e-30) for name, trial in chosen.items())

    def _by_name(self, rows: Tensor) -> dict[str, float]:
        """The mean of each linear's rows."""
        return {name: float(part.mean()) for name, part in zip(self._names, torch.split(rows, self._rows), strict=True)}

    def _choice(self, name: str, trial: _Trial) -> Choice:
        at = self._names.index(name)
        codes, scales = (torch.split(each, self._rows)[at] for each in (trial.codes, trial.scales))
        return Choice(rounded(codes, scales, self._grid), trial.method, trial.errors[name], self._power[name])


def rounded(codes: Tensor, scales: Tensor, grid: Grid) -> RoundedWeight:
    """As it is stored."""
    kept = scales if grid.format == "fp8" else scales.bfloat16()
    kept = kept if grid.group else kept.view(-1)
    return RoundedWeight(grid.format, codes.to(VALUE_DTYPES[grid.format]), kept.contiguous(), grid.group)


def _gptq(target: Tensor, scales: Tensor, grid: Grid, found: Factor, mixed: Tensor) -> tuple[Tensor, Tensor]:
    """GPTQ, and then scales fitted to codes and codes to scales in turn."""
    codes = gptq(target, scales, grid, found)
    for _ in range(_ROUNDS):
        scales = fitted_scales(target, codes, scales, grid, mixed)
        codes = descend(target, codes, scales, grid, mixed, found.order)
    return codes, scales
