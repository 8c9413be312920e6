"""Families by architecture name, as Hugging Face spells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import CheckpointError
from firsttoken.models.blocks import DecoderLayer, LayerBuilder, Shape


@dataclass(frozen=True, slots=True)
class Family:
    """``layer_tensors`` gives a layer's tensors by name (without ``model.layers.N.``) with their shapes;
    ``build_layer`` makes the layer from them. ``fused``: a layer is RMSNorm, attention, RMSNorm and gated SiLU MLP with
    nothing between, as `models.fused` has it."""

    layer_tensors: Callable[[ModelConfig], dict[str, Shape]]
    build_layer: Callable[[LayerBuilder], DecoderLayer]
    fused: bool = False


_FAMILIES: dict[str, Family] = {}


def register(family: Family, *architectures: str) -> None:
    for architecture in architectures:
        if architecture in _FAMILIES:
            raise ValueError(f"architecture {architecture} is registered twice")
        _FAMILIES[architecture] = family


def known_architectures() -> list[str]:
    return sorted(_FAMILIES)


def family_of(architecture: str) -> Family:
    """Raises `CheckpointError` listing the known architectures."""
    try:
        return _FAMILIES[architecture]
    except KeyError:
        known = ", ".join(known_architectures())
        raise CheckpointError(
            f"unknown architecture {architecture!r}: known are {known}", field="architecture"
        ) from None
