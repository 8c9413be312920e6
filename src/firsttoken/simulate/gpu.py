"""The GPU of a simulation: measured steps, the step-time model fitted to them, and how far it can be trusted."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from firsttoken.core.errors import ConfigError
from firsttoken.observability.percentiles import percentiles
from firsttoken.scheduler.step_time import FittedStepTime, StepLoad, StepTime, fit_steps, load_of

TABLES = Path(__file__).parent / "gpus"
MAX_FILE_BYTES = 64 << 20
# A share of the steps that a model is not shown, and then asked for; and the least that makes a model.
HELD_OUT = 0.25
MIN_STEPS = 16

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
Factor = Annotated[float, msgspec.Meta(gt=0, le=1e3)]


class MeasuredStep(msgspec.Struct, frozen=True):
    """A row of ``bench steps``: ``context`` tokens before each decode row's, ``ms`` on the device."""

    decode_rows: Count
    context: Count
    prefill_tokens: Count
    prefill_start: Count
    ms: Annotated[float, msgspec.Meta(gt=0, le=1e6)]

    @property
    def kind(self) -> str:
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decode_rows else "prefill"


class Sustained(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine under load adds to steps that were measured one at a time: by how much each kind of step is
    stretched, and ``host_ms`` of the loop's own work for each. ``source`` says where that was measured."""

    decode: Factor = 1.0
    mixed: Factor = 1.0
    prefill: Factor = 1.0
    host_ms: Annotated[float, msgspec.Meta(ge=0, le=1e3)] = 0.0
    source: str = ""


ALONE = Sustained()


class StepTable(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one model on one device. ``kv_blocks`` that an engine with its defaults has there, 0 where the table
    does not tell."""

    device_name: str
    model: str
    steps: list[MeasuredStep]
    kv_blocks: Count = 0
    sustained: Sustained = ALONE


class SustainedStepTime(NamedTuple):
    """``base``, each kind of step stretched."""

    base: StepTime
    decode: float
    mixed: float
    prefill: float

    def ms(self, load: StepLoad) -> float:
        ms = self.base.ms(load)
        if not load.prefill_tokens:
            return ms * self.decode
        return ms * (self.mixed if load.decode_rows else self.prefill)


@dataclass(frozen=True)
class GPU:
    """``error``: for each kind of step the percentiles of how far a prediction is from the measured time, as a share of
    it, over steps that the model had not been shown (``alone`` itself has seen all).

    ``step_time`` is ``alone``, the time of steps measured one at a time, as ``sustained`` stretches it.
    """

    table: StepTable
    alone: FittedStepTime
    error: dict[str, dict[str, float]]
    sustained: Sustained = ALONE

    @property
    def step_time(self) -> StepTime:
        if self.sustained == ALONE:
            return self.alone
        return SustainedStepTime(self.alone, self.sustained.decode, self.sustained.mixed, self.sustained.prefill)


def known_tables() -> list[str]:
    """What comes with the package, as ``GPU SHAPE``."""
    return sorted(path.stem.replace("_", " ", 1) for path in TABLES.glob("*.json"))


def packaged_table(gpu: str, shape: str) -> StepTable:
    """Raises `ConfigError` for a pair that does not come with the package."""
    if f"{gpu} {shape}" not in known_tables():
        raise ConfigError(
            f"no steps of {shape!r:.80} on {gpu!r:.80} come with firsttoken, only of {', '.join(known_tables())}; "
            "measure them there with 'firsttoken bench steps MODEL --output FILE' and give --steps FILE"
        )
    return read_table(TABLES / f"{gpu}_{shape}.json")


def read_table(path: Path) -> StepTable:
    """A result of ``bench steps``. Raises `ConfigError` when it is none, and `OSError`."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        table = msgspec.json.decode(data, type=StepTable)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no result of 'bench steps': {error}") from None
    for number, step in enumerate(table.steps):
        if not step.decode_rows and not step.prefill_tokens:
            raise ConfigError(f"{path}: step {number} computes nothing")
    if len(table.steps) < MIN_STEPS:
        raise ConfigError(f"{path} has {len(table.steps)} steps; a model of a device takes {MIN_STEPS} or more")
    return table


def model_gpu(table: StepTable, seed: int = 0, *, sustained: bool = True) -> GPU:
    """Fit the model; ``seed`` chooses the steps that are held out for the error. Without ``sustained``, steps take what
    they take one at a time and the host's work takes no time."""
    order = list(table.steps)
    random.Random(seed).shuffle(order)
    held_out = order[: round(HELD_OUT * len(order))]
    judged = fit_steps(_rows(order[len(held_out) :]))
    return GPU(table, fit_steps(_rows(table.steps)), _errors(judged, held_out), table.sustained if sustained else ALONE)


def _errors(model: StepTime, steps: Sequence[MeasuredStep]) -> dict[str, dict[str, float]]:
    errors: dict[str, list[float]] = {"decode": [], "mixed": [], "prefill": []}
    for step in steps:
        errors[step.kind].append(abs(model.ms(_load(step)) - step.ms) / step.ms)
    return {kind: percentiles(found) for kind, found in errors.items() if found}


def _load(step: MeasuredStep) -> StepLoad:
    return load_of(msgspec.structs.asdict(step))


def _rows(steps: Sequence[MeasuredStep]) -> list[Mapping[str, Any]]:
    return [msgspec.structs.asdict(step) for step in steps]
