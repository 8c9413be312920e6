"""``bench layout``: the bandwidth of every layout, as a share of the device's peak, and what the engine chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from firsttoken.bench.layouts import conv, kv, weights
from firsttoken.bench.layouts.case import Measured, Setting
from firsttoken.bench.layouts.timing import seconds_per_operation
from firsttoken.bench.roof import read_roof_gb_s
from firsttoken.core.errors import ConfigError
from firsttoken.kernels.layout import Capability, choose_layout

Say = Callable[[str], None]

MIB = 1 << 20
# More than the last caches of the devices that are measured.
DEFAULT_BYTES = {"cuda": 512 * MIB, "cpu": 128 * MIB}


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """``nbytes`` that each case reads in all (None: enough for the device), for about ``seconds`` each."""

    device: str = "auto"
    dtype: str = "bfloat16"
    nbytes: int | None = None
    seconds: float = 0.3
    seed: int = 0


def all_measured() -> tuple[Measured, ...]:
    """Everything that is measured. A layout that has a kernel of its own adds its `Measured` here."""
    return (*kv.measured(), *weights.measured(), *conv.measured())


def measure_layouts(
    config: LayoutConfig, measured: Sequence[Measured] | None = None, say: Say = lambda text: None
) -> dict[str, Any]:
    """``layouts`` (a row each, best first within its tensor), ``chosen`` (what `choose_layout` says for each tensor,
    with the best measured beside it) and ``peak_gb_s`` with its source. Raises `ConfigError` for a device that is not
    there."""
    device = _device(config.device)
    setting = Setting(device, config.dtype, config.nbytes or DEFAULT_BYTES[device])
    torch.manual_seed(config.seed)
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    say("measuring the peak")
    peak, source = _peak(setting, name, config.seconds)
    cases = [case for case in (all_measured() if measured is None else measured) if case.applies(setting)]
    rows: list[dict[str, Any]] = []
    for tensor in dict.fromkeys(case.tensor for case in cases):
        say(tensor)
        found = _bandwidths([case for case in cases if case.tensor == tensor], setting, config.seconds)
        rows += [
            {"tensor": tensor, "layout": layout, "gb_s": gb_s, "share_of_peak": gb_s / peak}
            for layout, gb_s in sorted(found.items(), key=lambda item: -item[1])
        ]
    return {
        "device": device,
        **({"device_name": name} if name else {}),
        "dtype": config.dtype,
        "layouts": rows,
        "chosen": _chosen(cases, rows, config.dtype, capability),
        "peak_gb_s": peak,
        "peak_source": source,
    }


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in DEFAULT_BYTES:
        raise ConfigError(f"device must be one of auto, {', '.join(DEFAULT_BYTES)}, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' cannot be used: torch finds no CUDA device here; use --device cpu")
    return name


def _bandwidths(cases: Sequence[Measured], setting: Setting, seconds: float) -> dict[str, float]:
    """GB/s by layout of one tensor."""
    prepared = [case.prepare(setting) for case in cases]
    took = seconds_per_operation([one.operations for one in prepared], setting.device, seconds * len(cases))
    return {case.layout: one.nbytes / seconds / 1e9 for case, one, seconds in zip(cases, prepared, took, strict=True)}


def _peak(setting: Setting, device_name: str, seconds: float) -> tuple[float, str]:
    """GB/s, and where the figure is from: the table of measured read roofs, else a plain copy measured now."""
    roof = read_roof_gb_s(device_name)
    if roof is not None:
        return roof, f"read roof measured on {device_name}"
    half = setting.nbytes // 2
    source = torch.ones(half, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    took = seconds_per_operation([[lambda: target.copy_(source)]], setting.device, seconds)[0]
    return 2 * half / took / 1e9, "a contiguous copy, measured in this run"


def _chosen(
    cases: Iterable[Measured], rows: Iterable[dict[str, Any]], dtype: str, capability: Capability | None
) -> list[dict[str, Any]]:
    best: dict[str, dict[str, Any]] = {}
    speeds = {}
    for row in rows:
        best.setdefault(row["tensor"], row)  # the first one is the best
        speeds[row["tensor"], row["layout"]] = row["gb_s"]
    found = {}
    for case in cases:
        if case.asked is None or case.tensor in found:
            continue
        kind, shape, head_dim = case.asked
        layout = choose_layout(kind, shape, head_dim, dtype, capability)
        fastest = best[case.tensor]
        found[case.tensor] = {
            "tensor": case.tensor,
            "layout": layout.name,
            "why": layout.why,
            "gb_s": speeds.get((case.tensor, layout.name)),
            "best": fastest["layout"],
            "best_gb_s": fastest["gb_s"],
        }
    return list(found.values())
