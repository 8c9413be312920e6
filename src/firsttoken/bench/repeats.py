"""The same measurement several times, or at several rates; means and how sure they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from firsttoken.bench.shape import Load

L = TypeVar("L", bound=Load)

_SURE = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "requests_per_s", "output_tokens_per_s", "goodput_rps")
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom (Fisher and Yates, table III).
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_Z95 = 1.959964


async def measure_all(
    measure: Callable[[L, int], Awaitable[dict[str, Any]]], load: L, rates: Sequence[float], repeat: int
) -> list[dict[str, Any]]:
    """A result for each rate, or for the load as it is where there are none; each the mean of ``repeat`` runs. One
    that was ``stopped`` is the last.
    ``measure`` gets a load, and a number that tells the measurements of one command apart."""
    loads = [replace(load, rate=rate) for rate in rates] or [load]
    results = []
    for place, one in enumerate(loads):
        runs: list[dict[str, Any]] = []
        for number in range(repeat):
            runs.append(await measure(one, place * repeat + number))
            if runs[-1].get("stopped"):
                break
        results.append({"rate": one.rate, **(together(runs) if len(runs) > 1 else runs[0])})
        if runs[-1].get("stopped"):
            break
    return results


def together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures that are the means of those of ``runs`` (two at least), but for the counts of ``requests`` and
    ``tokens``, which are sums, and ``met``, which is true where it always is.

    ``ci95`` has half the width of the mean's 95 % confidence interval (Student's t), under the figures' own names;
    ``repeats`` are the runs.
    """
    found: dict[str, Any] = {
        name: _sum(values) if name in ("requests", "tokens") else _mean(values) for name, values in _columns(runs)
    }
    found["ci95"] = {name: _half_width([run[name] for run in runs]) for name in _SURE if name in found}
    found["repeats"] = list(runs)
    return found


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean of two values or more."""
    freedom = len(values) - 1
    return student_t95(freedom) * statistics.stdev(values) / math.sqrt(len(values))


def student_t95(freedom: int) -> float:
    """The quantile that 95 % lie within; beyond the table by the first terms of its expansion in 1 / ``freedom``
    (Abramowitz and Stegun, 26.7.5)."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = _Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _columns(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Each name with its values, of the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return [(name, [run[name] for run in runs if name in run]) for name in names]


def _mean(values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if all(isinstance(value, dict) for value in known):
        return {name: _mean(below) for name, below in _columns(known)}
    if all(isinstance(value, bool) for value in known):
        return all(known)
    if all(isinstance(value, int | float) for value in known):
        return math.fsum(known) / len(known)
    return known[0]


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _sum(below) for name, below in _columns(values)}
    return sum(values)


def _half_width(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _half_width(below) for name, below in _columns(values)}
    return half_width(values) if len(values) > 1 else None
