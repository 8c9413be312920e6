"""A model's layers one after the other, each rounded for the inputs that the rounded layers before it give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from firsttoken.calibration.layer import PlainLayer
from firsttoken.calibration.model import STORED, PlainModel, stored
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.quantization.calibrate.choose import Choice, Chooser, Method, Source
from firsttoken.quantization.calibrate.grid import Grid
from firsttoken.quantization.calibrate.inputs import InputMoments, Inputs

# Tokens that are computed at once, and the most that are held out to judge by.
_TOKENS_AT_ONCE = 4096
_MOST_HELD = 4096
# One window in so many is held out.
_HOLD_EVERY = 8

Read = Callable[[PlainLayer, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Stage:
    """Linears that read one input, which ``read`` gives from the residual stream at the layer's start or, ``middle``,
    after attention. ``source``: what gives the columns of that input, a norm or a linear."""

    linears: tuple[str, ...]
    read: Read
    middle: bool
    source: str


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
STAGES = (
    Stage(_QKV, PlainLayer.attention_input, False, "input_layernorm"),
    Stage(("self_attn.o_proj",), PlainLayer.heads, False, "self_attn.v_proj"),
    Stage(("mlp.gate_proj", "mlp.up_proj"), PlainLayer.mlp_input, True, "post_attention_layernorm"),
    Stage(("mlp.down_proj",), PlainLayer.gated, True, "mlp.up_proj"),
)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedLayer:
    """A finished layer by names without ``model.layers.N.``: ``linears`` as they were chosen, ``vectors`` (gains,
    biases) as they are stored."""

    linears: Mapping[str, Choice]
    vectors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """The residual streams of a text's windows in batches ``[windows, T, hidden]``: with weights in ``full``, and as
    they are ``rounded`` so far. Batches that are ``held`` out judge what was learned from the others."""

    held: tuple[bool, ...]
    full: tuple[Tensor, ...]
    rounded: tuple[Tensor, ...]

    @classmethod
    def begin(cls, model: PlainModel, windows: Tensor) -> Streams:
        """``windows`` int64 ``[W, T]``, at least two."""
        held = max(1, min(len(windows) // _HOLD_EVERY, _MOST_HELD // windows.shape[1]))
        at_once = max(1, _TOKENS_AT_ONCE // windows.shape[1])
        # Held out are windows from all over the text, not one end of it.
        picked = torch.zeros(len(windows), dtype=torch.bool)
        picked[torch.arange(held) * len(windows) // held] = True
        kept, judges = torch.split(windows[~picked], at_once), torch.split(windows[picked], at_once)
        table = model.embedding()
        full = tuple(table[part].to(model.device) for part in (*kept, *judges))
        is_held = (False,) * len(kept) + (True,) * len(judges)
        return cls(is_held, full, tuple(stored(hidden) for hidden in full))

    def through(self, step: Read, full: PlainLayer, rounded: PlainLayer) -> Streams:
        """Both after a step of the layer."""
        return replace(
            self,
            full=tuple(step(full, hidden) for hidden in self.full),
            rounded=tuple(step(rounded, hidden) for hidden in self.rounded),
        )

    def inputs(self, read: Read, full: PlainLayer, rounded: PlainLayer) -> Inputs:
        """What some linears of the layer get."""
        gathered = InputMoments()
        for held, hidden_full, hidden in zip(self.held, self.full, self.rounded, strict=True):
            x, y = read(rounded, hidden).flatten(0, 1), read(full, hidden_full).flatten(0, 1)
            (gathered.hold if held else gathered.add)(x, y)
        return gathered.inputs()


class LayerRounder:
    """Rounds one layer, stage by stage. `layer` and `after` are what becomes of it once `run` is done."""

    def __init__(self, model: PlainModel, index: int, streams: Streams, grid: Grid, method: Method) -> None:
        self._model = model
        self._index = index
        self._grid = grid
        self._method = method
        self._streams = streams
        self._tensors = model.layer(index)
        self._full = model.plain(index, self._tensors)
        # What is rounded so far, the rest in full.
        self._now = {name: tensor if tensor.dim() == 2 else stored(tensor) for name, tensor in self._tensors.items()}
        self._linears: dict[str, Choice] = {}

    def run(self) -> tuple[RoundedLayer, Streams]:
        """The layer, and the streams after it."""
        at, middle = self._streams, False
        for stage in STAGES:
            rounded = self._model.plain(self._index, self._now)
            if stage.middle and not middle:
                at, middle = at.through(PlainLayer.attended, self._full, rounded), True
            self._round(stage, at.inputs(stage.read, self._full, rounded))
        after = at.through(PlainLayer.finished, self._full, self._model.plain(self._index, self._now))
        vectors = {name: tensor.to(STORED) for name, tensor in self._now.items() if tensor.dim() == 1}
        return RoundedLayer(self._linears, vectors), after

    def _round(self, stage: Stage, inputs: Inputs) -> None:
        weights = {name: self._tensors[f"{name}.weight"] for name in stage.linears}
        chosen = Chooser(weights, inputs, self._grid, self._method).choose(self._source(stage))
        for name, choice in chosen.linears.items():
            self._keep(name, choice)
        if chosen.scale is not None:
            self._divide(stage.source, chosen.scale)

    def _keep(self, name: str, choice: Choice) -> None:
        self._linears[name] = choice
        self._now[f"{name}.weight"] = choice.weight.dequantized()

    def _source(self, stage: Stage) -> Source:
        if stage.source not in self._linears:
            gain = self._now[f"{stage.source}.weight"]

            def settled(wanted: Tensor) -> Tensor:
                divided = stored(gain / wanted)
                return torch.where(divided == 0, torch.ones_like(gain), gain / divided)

            return Source(torch.arange(len(gain), device=gain.device), len(gain), settled)
        rows = len(self._now[f"{stage.source}.weight"])
        columns = self._now[f"{stage.linears[0]}.weight"].shape[1]
        index = source_rows(self._model.config) if columns != rows else torch.arange(rows)
        return Source(index.to(self._model.device), rows, lambda wanted: wanted)

    def _divide(self, source: str, scale: Tensor) -> None:
        """What a stage's columns were multiplied by is taken from where they come from."""
        if source not in self._linears:
            self._now[f"{source}.weight"] = stored(self._now[f"{source}.weight"] / scale)
            return
        choice = self._linears[source]
        weight = choice.weight
        divided = (weight.scales.float() / scale.view(-1, *[1] * (weight.scales.dim() - 1))).to(weight.scales.dtype)
        self._keep(source, replace(choice, weight=replace(weight, scales=divided)))
        if (bias := self._now.get(f"{source}.bias")) is not None:
            self._now[f"{source}.bias"] = stored(bias / scale)


def source_rows(config: ModelConfig) -> Tensor:
    """For each column of the output projection, its row of the v projection: query heads share one."""
    heads = torch.arange(config.num_heads) // (config.num_heads // config.num_kv_heads)
    return (heads[:, None] * config.head_dim + torch.arange(config.head_dim)).flatten()
