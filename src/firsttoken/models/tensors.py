"""The tensors a model must have, compared with those a checkpoint does have."""

from __future__ import annotations

import re
from collections.abc import Mapping

from firsttoken.checkpoint.checkpoint import TensorInfo
from firsttoken.checkpoint.gguf import SUPPORTED_TYPES
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import CheckpointError
from firsttoken.models.blocks import Shape
from firsttoken.models.registry import family_of

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
# Old exports keep this derived buffer; it is computed from the configuration instead.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_MOST_NAMED = 20


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model with its shape. Raises `CheckpointError` for an unknown architecture."""
    family = family_of(config.architecture)
    layer = family.layer_tensors(config)
    tensors: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors[FINAL_NORM] = (config.hidden_size,)
    tensors |= family.other_tensors(config)
    if not config.tie_word_embeddings:
        tensors[HEAD] = tensors[EMBEDDING]
    return tensors


def check_tensors(config: ModelConfig, infos: Mapping[str, TensorInfo], path: str) -> None:
    """Compare with `expected_tensors`; one `CheckpointError` names all that is missing, extra, misshapen or of a type
    that cannot be read."""
    expected = expected_tensors(config)
    faults = [f"{name} is missing (shape {list(shape)})" for name, shape in expected.items() if name not in infos]
    for name, info in infos.items():
        if name in expected:
            if tuple(info.shape) != expected[name]:
                faults.append(f"{name} has shape {list(info.shape)}, the configuration says {list(expected[name])}")
            elif info.rounded is None and info.type not in SUPPORTED_TYPES:
                faults.append(f"{name} is stored as {info.type}, supported are {', '.join(sorted(SUPPORTED_TYPES))}")
        elif not (_DERIVED.fullmatch(name) or name == HEAD):
            faults.append(f"{name} is not a tensor of {config.architecture}")
    if not faults:
        return
    shown = "; ".join(faults[:_MOST_NAMED])
    more = f"; and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
    raise CheckpointError(f"the tensors do not fit: {shown}{more}", file=path, field=faults[0].split()[0])
