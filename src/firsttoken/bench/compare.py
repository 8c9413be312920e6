"""``bench compare``: two results, or two folders of them, figure by figure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from firsttoken.core.errors import ConfigError

Verdict = Literal["same", "better", "worse", "new", "missing"]

# Compared where a result has them; the lower the better. Medians: a p99 of some hundred samples moves by more than 3 %
# from run to run.
LOWER = ("ttft_ms.p50", "tpot_ms.p50", "itl_ms.p50", "e2e_ms.p50", "host_us_per_step", "peak_memory_gib")
HIGHER = ("tokens_per_s_median", "requests_per_s", "output_tokens_per_s")
# Results that differ in one of these are not of the same case.
IDENTITY = (
    *("device", "device_name", "model", "dtype", "quantization", "kv_dtype"),
    *("batch", "input", "output", "rate", "rates", "concurrency", "burst", "trace", "scale", "mix", "seconds"),
)
# How the rows of a table are told apart, and what is compared in them.
_STEP_KEY = ("kind", "decode_rows", "context", "prefill_tokens", "prefill_start")
_LAYOUT_KEY = ("tensor", "layout")
# 103 against 100 is 3 % worse, though binary fractions make it a little more.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Comparison:
    """``ratio`` is new / old, None where one of them is missing or old is 0."""

    case: str
    old: float | None
    new: float | None
    ratio: float | None
    verdict: Verdict

    @property
    def failed(self) -> bool:
        """A figure that got worse, or that nobody measures any more."""
        return self.verdict in ("worse", "missing")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(old: Path, new: Path, tolerance: float, metrics: Sequence[str] = ()) -> list[Comparison]:
    """Every figure of ``old`` beside ``new``'s: two JSON files, or two folders whose files are matched by name.

    ``tolerance`` is a share: 0.03 lets a figure be 3 % worse. ``metrics`` are more figures to compare, as
    ``ttft_ms.p99`` (the lower the better, unless the name ends in ``_per_s``, ``_rps``, ``_s_median`` or ``gb_s``).
    Raises `ConfigError` for what cannot be read, or is of different cases.
    """
    if old.is_dir() != new.is_dir():
        raise ConfigError(f"{old} and {new} cannot be compared: give two files or two folders")
    if not old.is_dir():
        return list(_compare_results("", (old, new), (_read(old), _read(new)), tolerance, metrics))
    olds, news = _folder(old), _folder(new)
    if not olds:
        raise ConfigError(f"{old} holds no .json file to compare with")
    found: list[Comparison] = []
    for name in sorted(olds | news):
        if name not in news:
            found.append(Comparison(name, None, None, None, "missing"))
        elif name not in olds:
            found.append(Comparison(name, None, None, None, "new"))
        else:
            pair = (olds[name], news[name])
            found += _compare_results(name, pair, (_read(pair[0]), _read(pair[1])), tolerance, metrics)
    return found


def judge(case: str, old: float | None, new: float | None, tolerance: float, *, higher: bool) -> Comparison:
    """One figure; ``higher`` when a higher one is better."""
    if old is None or new is None:
        return Comparison(case, old, new, None, "new" if old is None else "missing")
    if old == 0:
        worse = not higher and new > 0
        return Comparison(case, old, new, None, "worse" if worse else "same" if new == 0 else "better")
    ratio = new / old
    loss = 1 - ratio if higher else ratio - 1
    bound = tolerance + _ROUNDING
    verdict: Verdict = "worse" if loss > bound else "better" if loss < -bound else "same"
    return Comparison(case, old, new, ratio, verdict)


def _folder(path: Path) -> dict[str, Path]:
    return {file.relative_to(path).with_suffix("").as_posix(): file for file in sorted(path.rglob("*.json"))}


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not the result of a measurement: its top is no object")
    return value


def _compare_results(
    name: str,
    paths: tuple[Path, Path],
    results: tuple[dict[str, Any], dict[str, Any]],
    tolerance: float,
    metrics: Sequence[str],
) -> Iterator[Comparison]:
    old, new = results
    for key in IDENTITY:
        if key in old and key in new and old[key] != new[key]:
            raise ConfigError(
                f"{paths[0]} and {paths[1]} are of different cases: {key} is {old[key]!r} against {new[key]!r}"
            )
    prefix = f"{name}: " if name else ""
    compared = False
    for part, olds, news in _parts(old, new):
        for case, higher, before, after in _pairs(olds, news, metrics):
            compared = True
            yield judge(prefix + part + case, before, after, tolerance, higher=higher)
    if not compared and not name:
        raise ConfigError(f"{paths[0]} and {paths[1]} hold no figure that is compared: name one with --metric")


def _parts(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The results themselves, or where they are sweeps those of each rate, with its name. One that only one of them
    has is compared with nothing."""
    if "results" not in old and "results" not in new:
        yield "", old, new
        return
    olds, news = (
        {one["rate"]: one for one in result.get("results", ()) if isinstance(one, dict) and "rate" in one}
        for result in (old, new)
    )
    for rate in dict.fromkeys([*olds, *news]):
        yield f"rate {rate:g}: ", olds.get(rate, {}), news.get(rate, {})


def _pairs(
    old: dict[str, Any], new: dict[str, Any], metrics: Sequence[str]
) -> Iterator[tuple[str, bool, float | None, float | None]]:
    """(case, higher is better, old, new) of each figure that either has."""
    wanted = [(metric, False) for metric in LOWER] + [(metric, True) for metric in HIGHER]
    known = {metric for metric, _ in wanted}
    wanted += [(metric, _is_rate(metric)) for metric in dict.fromkeys(metrics) if metric not in known]
    for metric, higher in wanted:
        before, after = _figure(old, metric), _figure(new, metric)
        if metric in metrics and before is None and after is None:
            raise ConfigError(f"neither result has the figure {metric!r}")
        if before is not None or after is not None:
            yield metric, higher, before, after
    for table, key, figure, higher in (("steps", _STEP_KEY, "ms", False), ("layouts", _LAYOUT_KEY, "gb_s", True)):
        befores, afters = _rows(old, table, key, figure), _rows(new, table, key, figure)
        for row in dict.fromkeys([*befores, *afters]):
            yield row, higher, befores.get(row), afters.get(row)


def _is_rate(metric: str) -> bool:
    return metric.endswith(("_per_s", "_rps", "_s_median", "gb_s", "roof_share", ".ok"))


def _figure(result: dict[str, Any], path: str) -> float | None:
    value: Any = result
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _rows(result: dict[str, Any], table: str, key: Sequence[str], figure: str) -> dict[str, float]:
    rows = result.get(table)
    found: dict[str, float] = {}
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get(figure), int | float):
            found[" ".join(f"{name} {row.get(name)}" for name in key)] = float(row[figure])
    return found
