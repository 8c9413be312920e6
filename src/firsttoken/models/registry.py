"""Families by architecture name, as Hugging Face spells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import CheckpointError
from firsttoken.models.blocks import Builder, Layer, LayerBuilder, Norm, Shape
from firsttoken.models.embedding import Embedding
from firsttoken.quantization.row_table import RowTable


def _no_tensors(config: ModelConfig) -> dict[str, Shape]:
    return {}


def _plain_embedding(builder: Builder, table: RowTable) -> Embedding:
    return table


def _final_rms_norm(builder: Builder) -> Norm:
    return builder.rms_norm("model.norm")


@dataclass(frozen=True, slots=True)
class Family:
    """``layer_tensors`` gives a layer's tensors by name (without ``model.layers.N.``) with their shapes;
    ``build_layer`` makes the layer from them. ``fused``: a layer is RMSNorm, attention, RMSNorm and gated SiLU MLP with
    nothing between, as `models.fused` has it.

    ``other_tensors`` are those beside the layers', the embedding, the final norm's gain and the head;
    ``norm_offset`` is what the gains of RMSNorms are stored without.
    """

    layer_tensors: Callable[[ModelConfig], dict[str, Shape]]
    build_layer: Callable[[LayerBuilder], Layer]
    fused: bool = False
    other_tensors: Callable[[ModelConfig], dict[str, Shape]] = _no_tensors
    embedding: Callable[[Builder, RowTable], Embedding] = _plain_embedding
    final_norm: Callable[[Builder], Norm] = _final_rms_norm
    norm_offset: float = 0.0


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
